"""DQN with a replay buffer: CartPole, by double Q-learning with a target network.

    python docs/examples/dqn.py

The exploration rate is a buffer of the policy, so each update also sends it to the workers. Ends
with status 0 when the mean return of the last 100 episodes has reached ``--goal``.
"""

from __future__ import annotations

import argparse
import copy
import sys

import gymnasium
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from sync_collector import BatchOptions, Collector

GAMMA, TAU, LEARNING_RATE = 0.99, 0.01, 1e-3
FRAMES_PER_BATCH, STEPS_PER_BATCH, MINIBATCH = 256, 64, 128
RANDOM_FRAMES, CAPACITY = 2_000, 100_000
#: The exploration rate falls from 1.0 linearly over this number of frames.
LEAST_EPSILON, EXPLORATION_FRAMES = 0.02, 15_000


class Policy(nn.Module):
    """Returns the action with the highest value, or a random one."""

    epsilon: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Sequential(
            nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
        )
        self.register_buffer("epsilon", torch.ones(()))

    def forward(self, observation: Tensor) -> Tensor:
        """Return the index of an action."""
        best = self.values(observation).argmax(-1)
        explores = torch.rand(best.shape) < self.epsilon
        return torch.where(explores, torch.randint_like(best, 2), best)


class ReplayBuffer:
    """Keeps the newest frames."""

    def __init__(self) -> None:
        self._frames: TensorDict | None = None
        self._written = 0

    def __len__(self) -> int:
        return min(self._written, CAPACITY)

    def extend(self, batch: TensorDictBase) -> None:
        """Add a worker's batch."""
        new = batch.select("observation", "action", "next").reshape(-1)
        if self._frames is None:
            self._frames = torch.zeros_like(new[:1].expand(CAPACITY))
        where = torch.arange(self._written, self._written + len(new)) % CAPACITY
        self._frames[where] = new
        self._written += len(new)

    def sample(self) -> TensorDictBase:
        """Return frames in a random order."""
        assert self._frames is not None
        return self._frames[torch.randint(len(self), (MINIBATCH,))]


def learn(
    part: TensorDictBase, policy: Policy, target: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Train the values, and move the target network slowly towards them."""
    following = part["next", "observation"]
    with torch.no_grad():
        best = policy.values(following).argmax(-1, keepdim=True)
        # A truncated episode has future rewards, a terminated one has none.
        future = target(following).gather(-1, best) * ~part["next", "terminated"]
        wanted = part["next", "reward"] + GAMMA * future
    taken = policy.values(part["observation"]).gather(-1, part["action"].unsqueeze(-1))
    loss = nn.functional.smooth_l1_loss(taken, wanted)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), policy.values.parameters(), strict=True):
            slow.lerp_(fast, TAU)


def run(scheme: str, frames: int, goal: float, seed: int) -> bool:
    """Train, and return whether the goal was reached."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    policy, buffer = Policy(), ReplayBuffer()
    target = copy.deepcopy(policy.values)
    optimizer = torch.optim.Adam(policy.values.parameters(), LEARNING_RATE)
    with Collector(
        lambda: gymnasium.make("CartPole-v1"),
        policy,
        scheme=scheme,
        num_workers=2,
        num_workers_per_collector=4,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=frames,
        sync=True,
        categorical=True,
        replay_buffer=buffer,
        batch=BatchOptions(episode_stats=True, init_random_frames=RANDOM_FRAMES),
    ) as collector:
        collector.set_seed(seed)
        for _ in collector:
            stats = collector.stats()
            if stats.frames < RANDOM_FRAMES:
                continue
            for _ in range(STEPS_PER_BATCH):
                learn(buffer.sample(), policy, target, optimizer)
            policy.epsilon.fill_(max(LEAST_EPSILON, 1 - stats.frames / EXPLORATION_FRAMES))
            collector.update_policy_weights_()
            if stats.frames % 4096 < FRAMES_PER_BATCH:
                print(f"{stats.frames:>8,} frames  return {stats.episode_reward:6.1f}")
            if stats.episodes >= 100 and stats.episode_reward >= goal:
                return True
    return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scheme", default="shm", help="how weights travel (sync-core list)")
    parser.add_argument("--frames", type=int, default=150_000, help="give up after these frames")
    parser.add_argument("--goal", type=float, default=150)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(0 if run(**vars(parser.parse_args())) else 1)
