"""IMPALA: CartPole, with actors that never wait; V-trace corrects for their old policies.

    python docs/examples/impala.py

Each frame has the ``policy_version`` of its action. Ends with status 0 when the mean return of the
last 100 episodes has reached ``--goal``.
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

GAMMA, ENTROPY, LEARNING_RATE = 0.99, 0.01, 1e-3
#: Frames of older policies are dropped: their corrections would be close to 0.
MAX_LAG = 20


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
        """Return the action and its log-probability, which V-trace needs."""
        distribution = Categorical(logits=self.logits(observation))
        action = distribution.sample()
        return action, distribution.log_prob(action)


@torch.no_grad()
def v_trace(batch: TensorDictBase, value: nn.Module, log_prob: Tensor) -> tuple[Tensor, Tensor]:
    """Return advantages and value targets; time is the last dimension."""
    ratio = (log_prob - batch["action_log_prob"]).exp().clamp(max=1.0)
    now = value(batch["observation"]).squeeze(-1)
    following = value(batch["next", "observation"]).squeeze(-1)
    terminated = batch["next", "terminated"].squeeze(-1).float()
    done = batch["next", "done"].squeeze(-1).float()
    reward, discount = batch["next", "reward"].squeeze(-1), GAMMA * (1 - terminated)
    delta = ratio * (reward + discount * following - now)
    corrected, running = torch.zeros_like(delta), torch.zeros_like(delta[..., 0])
    for t in reversed(range(delta.shape[-1])):
        running = delta[..., t] + GAMMA * (1 - done[..., t]) * ratio[..., t] * running
        corrected[..., t] = running
    target = now + corrected
    # The target of the next step; the value where the episode or the batch ends.
    after = torch.cat([target[..., 1:], following[..., -1:]], -1)
    after = torch.where(done.bool(), following, after)
    return ratio * (reward + discount * after - now), target


def learn(
    batch: TensorDictBase, policy: Policy, value: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Train policy and value by one step."""
    distribution = Categorical(logits=policy.logits(batch["observation"]))
    log_prob = distribution.log_prob(batch["action"])
    advantage, target = v_trace(batch, value, log_prob.detach())
    gain = advantage / (advantage.std() + 1e-8)
    loss = -(log_prob * gain).mean() - ENTROPY * distribution.entropy().mean()
    error = value(batch["observation"]).squeeze(-1) - target
    optimizer.zero_grad()
    (loss + 0.5 * error.square().mean()).backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    nn.utils.clip_grad_norm_(value.parameters(), 0.5)
    optimizer.step()


def run(scheme: str, frames: int, goal: float, seed: int) -> bool:
    """Train, and return whether the goal was reached."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    policy, value = Policy(), network(1)
    parameters = [*policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(parameters, LEARNING_RATE)
    with Collector(
        lambda: gymnasium.make("CartPole-v1"),
        policy,
        scheme=scheme,
        num_workers=2,
        num_workers_per_collector=16,
        frames_per_batch=512,
        total_frames=frames,
        batch=BatchOptions(episode_stats=True),
    ) as collector:
        collector.set_seed(seed)
        for number, batch in enumerate(collector):
            # The batch of the first worker that is ready, made with its policy at that time.
            lag = collector.stats().version - batch["policy_version"]
            if lag.max() <= MAX_LAG:
                learn(batch, policy, value, optimizer)
                collector.update_policy_weights_(blocking=False)
            stats = collector.stats()
            if number % 20 == 0:
                print(
                    f"{stats.frames:>8,} frames  return {stats.episode_reward:6.1f}  "
                    f"versions behind {lag.float().mean():.1f}"
                )
            if stats.episodes >= 100 and stats.episode_reward >= goal:
                return True
    return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scheme", default="shm", help="how weights travel (sync-core list)")
    parser.add_argument("--frames", type=int, default=1_000_000, help="give up after these frames")
    parser.add_argument("--goal", type=float, default=400)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(0 if run(**vars(parser.parse_args())) else 1)
