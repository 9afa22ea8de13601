"""SAC: Pendulum, with two critics, a learned temperature and a replay buffer.

    python docs/examples/sac.py

Ends with status 0 when ten episodes without exploration have the mean return ``--goal``.
"""

from __future__ import annotations

import argparse
import copy
import sys

import gymnasium
import torch
from tensordict import TensorDictBase
from tensordict.nn.probabilistic import InteractionType, interaction_type
from torch import Tensor, nn
from torch.distributions import Normal

from sync_collector import BatchOptions, Collector

GAMMA, TAU, LEARNING_RATE, MINIBATCH = 0.98, 0.02, 1e-3, 128
FRAMES_PER_BATCH, STEPS_PER_BATCH, RANDOM_FRAMES = 64, 64, 1_000
TORQUE, ACTIONS = 2.0, 1

Networks = tuple["Policy", nn.ModuleList, nn.ModuleList]


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Return a network of two layers of width 64."""
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs)
    )


class Policy(nn.Module):
    """Samples a torque from a Gaussian, bounded by tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network(3, 2 * ACTIONS)

    def sample(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Return a differentiable action and its log-probability."""
        mean, log_std = self.body(observation).chunk(2, -1)
        distribution = Normal(mean, log_std.clamp(-5, 1).exp())
        raw = distribution.rsample()
        # The logarithm of the derivative of tanh, in a form that does not overflow.
        slope = 2 * (0.6931 - raw - nn.functional.softplus(-2 * raw))
        log_prob = (distribution.log_prob(raw) - slope).sum(-1, keepdim=True)
        return TORQUE * raw.tanh(), log_prob

    def forward(self, observation: Tensor) -> Tensor:
        """Return an action; for `Collector.evaluate`, the mean."""
        if interaction_type() is InteractionType.DETERMINISTIC:
            return TORQUE * self.body(observation).chunk(2, -1)[0].tanh()
        return self.sample(observation)[0]


class ReplayBuffer:
    """Keeps all frames."""

    def __init__(self) -> None:
        self._frames: TensorDictBase | None = None

    def extend(self, batch: TensorDictBase) -> None:
        """Add a worker's batch."""
        new = batch.select("observation", "action", "next").reshape(-1)
        self._frames = new if self._frames is None else torch.cat([self._frames, new])

    def sample(self) -> TensorDictBase:
        """Return frames in a random order."""
        assert self._frames is not None
        return self._frames[torch.randint(len(self._frames), (MINIBATCH,))]


def value(critics: nn.ModuleList, observation: Tensor, action: Tensor) -> Tensor:
    """Return the values of the two critics in the last dimension."""
    both = torch.cat([observation, action], -1)
    return torch.cat([critic(both) for critic in critics], -1)


def learn(
    part: TensorDictBase, networks: Networks, temperature: Tensor, optimizer: torch.optim.Optimizer
) -> None:
    """Train critics, policy and temperature by one step."""
    policy, critics, targets = networks
    alpha = temperature.exp().detach()
    with torch.no_grad():
        following = part["next", "observation"]
        action, log_prob = policy.sample(following)
        future = value(targets, following, action).amin(-1, keepdim=True) - alpha * log_prob
        wanted = part["next", "reward"] + GAMMA * future * ~part["next", "terminated"]
    error = value(critics, part["observation"], part["action"]) - wanted
    action, log_prob = policy.sample(part["observation"])
    critics.requires_grad_(False)
    gain = value(critics, part["observation"], action).amin(-1, keepdim=True) - alpha * log_prob
    critics.requires_grad_(True)
    balance = -temperature * (log_prob.detach().mean() - ACTIONS)
    optimizer.zero_grad()
    (error.square().mean() - gain.mean() + balance.sum()).backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(targets.parameters(), critics.parameters(), strict=True):
            slow.lerp_(fast, TAU)


def run(scheme: str, frames: int, goal: float, seed: int) -> bool:
    """Train, and return whether the goal was reached."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    policy, buffer = Policy(), ReplayBuffer()
    critics = nn.ModuleList([network(3 + ACTIONS, 1), network(3 + ACTIONS, 1)])
    networks, temperature = (policy, critics, copy.deepcopy(critics)), torch.zeros(1)
    learned = [*policy.parameters(), *critics.parameters(), temperature.requires_grad_()]
    optimizer = torch.optim.Adam(learned, LEARNING_RATE)
    with Collector(
        lambda: gymnasium.make("Pendulum-v1"),
        policy,
        scheme=scheme,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=frames,
        replay_buffer=buffer,
        batch=BatchOptions(init_random_frames=RANDOM_FRAMES),
    ) as collector:
        collector.set_seed(seed)
        for _ in collector:
            made = collector.stats().frames
            if made >= RANDOM_FRAMES:
                for _ in range(STEPS_PER_BATCH):
                    learn(buffer.sample(), networks, temperature, optimizer)
                collector.update_policy_weights_()
            if made % 1024 == 0:
                result = collector.evaluate(episodes=10, seed=seed)
                print(f"{made:>8,} frames  return {result.mean_reward:7.1f}")
                if result.mean_reward >= goal:
                    return True
    return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scheme", default="shm", help="how weights travel (sync-core list)")
    parser.add_argument("--frames", type=int, default=30_000, help="give up after these frames")
    parser.add_argument("--goal", type=float, default=-200)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(0 if run(**vars(parser.parse_args())) else 1)
