"""PPO with discrete actions: CartPole, with an environment as Gymnasium makes it.

    python docs/examples/ppo_discrete.py

The policy samples an index and returns its log-probability. Ends with status 0 when the mean
return of the last 100 episodes has reached ``--goal``.
"""

from __future__ import annotations

import argparse
import sys

import gymnasium
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributions import Categorical

from sync_collector import BatchOptions, Collector

GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.005
EPOCHS, MINIBATCH, LEARNING_RATE = 8, 256, 1e-3


def network(outputs: int) -> nn.Sequential:
    """Return a network of two layers of width 64."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


class Policy(nn.Module):
    """Samples the index of an action."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = network(2)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Return the action and its log-probability."""
        distribution = Categorical(logits=self.logits(observation))
        action = distribution.sample()
        return action, distribution.log_prob(action)


@torch.no_grad()
def advantages(batch: TensorDictBase, value: nn.Module) -> tuple[Tensor, Tensor]:
    """Return generalised advantages and value targets; time is the last dimension."""
    now = value(batch["observation"]).squeeze(-1)
    # The true last observation of an episode: after a truncation it still has a value.
    following = value(batch["next", "observation"]).squeeze(-1)
    terminated = batch["next", "terminated"].squeeze(-1).float()
    done = batch["next", "done"].squeeze(-1).float()
    delta = batch["next", "reward"].squeeze(-1) + GAMMA * following * (1 - terminated) - now
    advantage, running = torch.zeros_like(delta), torch.zeros_like(delta[..., 0])
    for t in reversed(range(delta.shape[-1])):
        running = delta[..., t] + GAMMA * LAMBDA * (1 - done[..., t]) * running
        advantage[..., t] = running
    return advantage, advantage + now


def learn(
    batch: TensorDictBase, policy: Policy, value: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Train policy and value with a batch."""
    advantage, target = advantages(batch, value)
    frames = batch.set("advantage", advantage).set("target", target).reshape(-1)
    for _ in range(EPOCHS):
        for indices in torch.randperm(len(frames)).split(MINIBATCH):
            part = frames[indices]
            distribution = Categorical(logits=policy.logits(part["observation"]))
            ratio = (distribution.log_prob(part["action"]) - part["action_log_prob"]).exp()
            gain = part["advantage"] / (frames["advantage"].std() + 1e-8)
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.minimum(ratio * gain, clipped * gain).mean()
            loss = loss - ENTROPY * distribution.entropy().mean()
            error = value(part["observation"]).squeeze(-1) - part["target"]
            optimizer.zero_grad()
            (loss + 0.5 * error.square().mean()).backward()
            # The two networks share no weights, and the errors of values are larger.
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            nn.utils.clip_grad_norm_(value.parameters(), 0.5)
            optimizer.step()


def run(scheme: str, frames: int, goal: float, seed: int) -> bool:
    """Train, and return whether the goal was reached."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    policy, value = Policy(), network(1)
    parameters = [*policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(parameters, LEARNING_RATE, eps=1e-5)
    with Collector(
        lambda: gymnasium.make("CartPole-v1"),
        policy,
        scheme=scheme,
        num_workers=2,
        num_workers_per_collector=8,
        frames_per_batch=2048,
        total_frames=frames,
        sync=True,
        batch=BatchOptions(episode_stats=True),
    ) as collector:
        collector.set_seed(seed)
        for batch in collector:
            learn(batch, policy, value, optimizer)
            collector.update_policy_weights_()
            stats = collector.stats()
            print(f"{stats.frames:>8,} frames  return {stats.episode_reward:6.1f}")
            if stats.episodes >= 100 and stats.episode_reward >= goal:
                return True
    return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scheme", default="shm", help="how weights travel (sync-core list)")
    parser.add_argument("--frames", type=int, default=400_000, help="give up after these frames")
    parser.add_argument("--goal", type=float, default=400)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(0 if run(**vars(parser.parse_args())) else 1)
