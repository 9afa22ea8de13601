"""PPO with a recurrent policy: a corridor whose exit is shown only at its entrance.

    python docs/examples/ppo_recurrent.py

The policy sets its next hidden state under ``"next"``, and gets it in its next step. Without
memory, the mean return would be 0. Ends with status 0 when the mean return of the last 100 episodes
has reached ``--goal``.
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

GAMMA, LAMBDA, CLIP, ENTROPY, EPOCHS, LEARNING_RATE = 0.95, 0.95, 0.2, 0.01, 4, 2e-3
HIDDEN, LENGTH = 32, 6


class Corridor(gymnasium.Env[Any, Any]):
    """Shows -1 or 1 at the entrance, then 0; the last action must equal what was shown."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Enter another corridor."""
        super().reset(seed=seed, options=options)
        self._sign, self._place = int(self.np_random.integers(2)), 0
        return np.array([2 * self._sign - 1, 0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Make a step; only the last action counts, which the second number announces."""
        self._place += 1
        ends = self._place == LENGTH
        reward = float(ends) * (1.0 if action == self._sign else -1.0)
        return np.array([0, self._place == LENGTH - 1], np.float32), reward, ends, False, {}


class Policy(nn.Module):
    """Acts with a hidden state, and also returns the value."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, HIDDEN)
        self.heads = nn.Linear(HIDDEN, 2 + 1)

    def step(self, observation: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, value and the next hidden state."""
        hidden = self.cell(observation, hidden)
        out = self.heads(hidden)
        return out[..., :2], out[..., 2], hidden

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Set an action; the collector carries ``hidden`` on, and sets it to 0 at each reset."""
        observation = tensordict["observation"]
        hidden = tensordict.get("hidden", observation.new_zeros(*observation.shape[:-1], HIDDEN))
        logits, value, following = self.step(observation, hidden)
        distribution = Categorical(logits=logits)
        action = distribution.sample()
        tensordict.update({"hidden": hidden, "action": action, "value": value})
        tensordict["action_log_prob"] = distribution.log_prob(action)
        tensordict["next", "hidden"] = following
        return tensordict

    def unroll(self, rows: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return logits and values of rows of frames, from the hidden state of the first frame."""
        hidden, outputs = rows["hidden"][:, 0], []
        for t in range(rows.shape[1]):
            logits, value, hidden = self.step(rows["observation"][:, t], hidden)
            outputs.append((logits, value))
            hidden = hidden * ~rows["next", "done"][:, t]
        logits, values = (torch.stack(column, 1) for column in zip(*outputs, strict=True))
        return logits, values


@torch.no_grad()
def advantages(rows: TensorDictBase, policy: Policy) -> tuple[Tensor, Tensor]:
    """Return generalised advantages and value targets."""
    now, last = rows["value"], rows["next"][:, -1]
    done = rows["next", "done"].squeeze(-1).float()
    end = policy.step(last["observation"], last["hidden"])[1]
    following = torch.cat([now[:, 1:], end.unsqueeze(1)], 1) * (1 - done)
    delta = rows["next", "reward"].squeeze(-1) + GAMMA * following - now
    advantage, running = torch.zeros_like(delta), torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        running = delta[:, t] + GAMMA * LAMBDA * (1 - done[:, t]) * running
        advantage[:, t] = running
    return advantage, advantage + now


def learn(batch: TensorDictBase, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Train the policy with a batch, without splitting its rows."""
    rows = batch.flatten(0, -2)
    advantage, target = advantages(rows, policy)
    gain = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    for _ in range(EPOCHS):
        logits, values = policy.unroll(rows)
        distribution = Categorical(logits=logits)
        ratio = (distribution.log_prob(rows["action"]) - rows["action_log_prob"]).exp()
        loss = -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
        loss = loss - ENTROPY * distribution.entropy().mean()
        optimizer.zero_grad()
        (loss + 0.5 * (values - target).square().mean()).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()


def run(scheme: str, frames: int, goal: float, seed: int) -> bool:
    """Train, and return whether the goal was reached."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), LEARNING_RATE)
    with Collector(
        Corridor, policy, scheme=scheme, num_workers=2, num_workers_per_collector=16, sync=True,
        frames_per_batch=1024, total_frames=frames, batch=BatchOptions(episode_stats=True),
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
