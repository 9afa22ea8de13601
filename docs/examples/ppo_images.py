"""PPO from images: catch a ball that is seen in frames of 10 by 10 pixels.

    python docs/examples/ppo_images.py

Frames are sent and stored as bytes; the network scales them. Ends with status 0 when the mean
return of the last 100 episodes has reached ``--goal``; random actions reach about -0.5.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributions import Categorical

from sync_collector import BatchOptions, Collector

GAMMA, LAMBDA, CLIP, ENTROPY = 0.97, 0.95, 0.2, 0.01
EPOCHS, MINIBATCH, LEARNING_RATE = 4, 256, 1e-3
SIZE = 10


class Catch(gymnasium.Env[Any, Any]):
    """A ball falls, and a paddle of three pixels must be where it lands."""

    observation_space = gymnasium.spaces.Box(0, 255, (1, SIZE, SIZE), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start another ball."""
        super().reset(seed=seed, options=options)
        self._row, self._column = 0, int(self.np_random.integers(SIZE))
        self._paddle = int(self.np_random.integers(1, SIZE - 1))
        return self._image(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move the paddle left, not at all, or right."""
        self._row += 1
        self._paddle = min(max(self._paddle + int(action) - 1, 1), SIZE - 2)
        landed = self._row == SIZE - 1
        caught = abs(self._column - self._paddle) <= 1
        return self._image(), float(landed) * (1 if caught else -1), landed, False, {}

    def _image(self) -> Any:
        image = np.zeros((1, SIZE, SIZE), np.uint8)
        image[0, self._row, self._column] = 255
        image[0, -1, self._paddle - 1 : self._paddle + 2] = 255
        return image


class ActorCritic(nn.Module):
    """Samples an action, and also returns the value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(16 * 3 * 3, 64), nn.ReLU(), nn.Linear(64, 3 + 1),
        )  # fmt: skip

    def outputs(self, image: Tensor) -> tuple[Categorical, Tensor]:
        """Return the distribution of actions and the value for images, in a batch of any shape."""
        out = self.layers(image.flatten(0, -4).float() / 255).unflatten(0, image.shape[:-3])
        return Categorical(logits=out[..., :3]), out[..., 3]

    def forward(self, observation: Tensor) -> dict[str, Tensor]:
        """Return the entries to record: the action, its log-probability and the value."""
        distribution, value = self.outputs(observation)
        action = distribution.sample()
        log_prob = distribution.log_prob(action)
        return {"action": action, "action_log_prob": log_prob, "value": value}


@torch.no_grad()
def advantages(batch: TensorDictBase, policy: ActorCritic) -> tuple[Tensor, Tensor]:
    """Return generalised advantages and value targets; time is the last dimension."""
    now, done = batch["value"], batch["next", "done"].squeeze(-1).float()
    end = policy.outputs(batch["next", "observation"][..., -1, :, :, :])[1]
    # Every episode ends with a landing, after which there is no value.
    following = torch.cat([now[..., 1:], end.unsqueeze(-1)], -1) * (1 - done)
    delta = batch["next", "reward"].squeeze(-1) + GAMMA * following - now
    advantage, running = torch.zeros_like(delta), torch.zeros_like(delta[..., 0])
    for t in reversed(range(delta.shape[-1])):
        running = delta[..., t] + GAMMA * LAMBDA * (1 - done[..., t]) * running
        advantage[..., t] = running
    return advantage, advantage + now


def learn(batch: TensorDictBase, policy: ActorCritic, optimizer: torch.optim.Optimizer) -> None:
    """Train the network with a batch."""
    advantage, target = advantages(batch, policy)
    frames = batch.set("advantage", advantage).set("target", target).reshape(-1)
    for _ in range(EPOCHS):
        for indices in torch.randperm(len(frames)).split(MINIBATCH):
            part = frames[indices]
            distribution, value = policy.outputs(part["observation"])
            ratio = (distribution.log_prob(part["action"]) - part["action_log_prob"]).exp()
            gain = part["advantage"] / (frames["advantage"].std() + 1e-8)
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.minimum(ratio * gain, clipped * gain).mean()
            loss = loss - ENTROPY * distribution.entropy().mean()
            optimizer.zero_grad()
            (loss + 0.5 * (value - part["target"]).square().mean()).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


def run(scheme: str, frames: int, goal: float, seed: int) -> bool:
    """Train, and return whether the goal was reached."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    policy = ActorCritic()
    optimizer = torch.optim.Adam(policy.parameters(), LEARNING_RATE)
    with Collector(
        Catch, policy, scheme=scheme, num_workers=2, num_workers_per_collector=16, sync=True,
        frames_per_batch=2048, total_frames=frames, batch=BatchOptions(episode_stats=True),
    ) as collector:  # fmt: skip
        collector.set_seed(seed)
        for batch in collector:
            learn(batch, policy, optimizer)
            collector.update_policy_weights_()
            stats = collector.stats()
            print(f"{stats.frames:>8,} frames  return {stats.episode_reward:6.2f}")
            if stats.episode_reward >= goal:
                return True
    return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scheme", default="shm", help="how weights travel (sync-core list)")
    parser.add_argument("--frames", type=int, default=300_000, help="give up after these frames")
    parser.add_argument("--goal", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(0 if run(**vars(parser.parse_args())) else 1)
