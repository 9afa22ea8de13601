"""Learn CartPole with PPO: workers collect, the trainer learns, and updates the workers.

    python docs/examples/cartpole.py --scheme shm --workers 2

To change how the weights are sent, only change ``--scheme``. With ``--ahead``, workers collect
while the trainer learns, so their policies lag behind. Ends with code 1 if CartPole was not
learned.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from sync_collector import Collector
from sync_collector.envs import GymEnv

GOAL = 450
ENVS_PER_WORKER = 8
FRAMES_OF_A_WORKER = 128 * ENVS_PER_WORKER
EPOCHS = 8
MINIBATCH = 256
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2
LEARNING_RATE, ENTROPY_WEIGHT = 1e-3, 0.005


def network(outputs: int, scale: float = 1.0) -> nn.Sequential:
    """Return a network of two layers of width 64; a small scale makes its first outputs small."""
    last = nn.Linear(64, outputs)
    last.weight.data *= scale
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), last)


class Policy(nn.Module):
    """Samples an action, in the trainer and, as a copy, in each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = network(2, scale=0.01)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = self.logits(observation).log_softmax(-1)
        noise = torch.empty_like(log_probs).exponential_().log()
        action = nn.functional.one_hot((log_probs - noise).argmax(-1), 2)
        return action, (log_probs * action).sum(-1)


@dataclass(frozen=True)
class Point:
    """The figures of one update, for the plot."""

    frames: int
    mean: float
    sync_ms: float
    lag: int


class Trainer:
    """Trains with PPO."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._value = network(1)
        parameters = [*policy.parameters(), *self._value.parameters()]
        self._optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE, eps=1e-5)

    def learn(self, batch: TensorDictBase, remaining: float) -> None:
        """Train policy and value with a batch; the learning rate falls towards the end."""
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * remaining
        advantage, target = self._advantages(batch)
        samples = [
            batch["observation"].flatten(0, -2),
            batch["action"].flatten(0, -2).argmax(-1, keepdim=True),
            batch["action_log_prob"].flatten(),
            advantage.flatten(),
            target.flatten(),
        ]
        for _ in range(EPOCHS):
            for indices in torch.randperm(len(samples[0])).split(MINIBATCH):
                loss = self._loss(*(sample[indices] for sample in samples))
                self._optimizer.zero_grad()
                loss.backward()
                for group in self._optimizer.param_groups:
                    nn.utils.clip_grad_norm_(group["params"], 0.5)
                self._optimizer.step()

    @torch.no_grad()
    def _advantages(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return generalised advantages and value targets; time is the last dimension."""
        value = self._value(batch["observation"]).squeeze(-1)
        # The true last observation of an episode: after a truncation it still has a value.
        next_value = self._value(batch["next", "observation"]).squeeze(-1)
        terminated = batch["next", "terminated"].squeeze(-1).float()
        done = batch["next", "done"].squeeze(-1).float()
        reward = batch["next", "reward"].squeeze(-1)
        delta = reward + GAMMA * next_value * (1 - terminated) - value
        decay = GAMMA * LAMBDA * (1 - done)
        advantage = torch.zeros_like(delta)
        running = torch.zeros_like(delta[..., 0])
        for t in reversed(range(delta.shape[-1])):
            running = delta[..., t] + decay[..., t] * running
            advantage[..., t] = running
        return advantage, advantage + value

    def _loss(
        self, observation: Tensor, action: Tensor, old: Tensor, advantage: Tensor, target: Tensor
    ) -> Tensor:
        log_probs = self._policy.logits(observation).log_softmax(-1)
        ratio = (log_probs.gather(-1, action).squeeze(-1) - old).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        value_loss = nn.functional.mse_loss(self._value(observation).squeeze(-1), target)
        loss: Tensor = 0.5 * value_loss - gain - ENTROPY_WEIGHT * entropy
        return loss


def draw(points: list[Point], path: Path, title: str) -> None:
    """Draw the learning curve, with sync time and staleness below it."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, middle, bottom) = plt.subplots(
        3, 1, sharex=True, figsize=(8, 7), height_ratios=(3, 1, 1), layout="constrained"
    )
    frames = [point.frames for point in points]
    top.plot(frames, [point.mean for point in points])
    top.axhline(GOAL, color="gray", linestyle=":")
    top.set(title=title, ylabel="return\n(mean of 20 episodes)")
    middle.plot(frames, [point.sync_ms for point in points], color="tab:orange")
    middle.set(ylabel="sync (ms)", ylim=(0, None))
    lag = [point.lag for point in points]
    bottom.step(frames, lag, color="tab:red", where="mid")
    bottom.set(ylabel="staleness\n(versions)", xlabel="frames", ylim=(-0.1, max(*lag, 1) + 0.1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(args: argparse.Namespace) -> bool:
    """Train, and return whether the goal was reached."""
    torch.manual_seed(args.seed)
    # The networks are small, and workers need the cores.
    torch.set_num_threads(1)
    policy = Policy()
    trainer, points, solved = Trainer(policy), list[Point](), False
    returns = deque[float](maxlen=20)
    collector = Collector(
        lambda: GymEnv("CartPole-v1", num_envs=ENVS_PER_WORKER),
        policy,
        scheme=args.scheme,
        num_workers=args.workers,
        frames_per_batch=FRAMES_OF_A_WORKER * (1 if args.ahead else args.workers),
        total_frames=args.frames,
        sync=not args.ahead,
        progress=True,
    )
    started = time.perf_counter()
    with collector:
        collector.set_seed(args.seed)
        for batch in collector:
            returns.extend(batch["next", "episode_reward"][batch["next", "done"]].tolist())
            stats = collector.stats()
            trainer.learn(batch, remaining=max(0.5, 1 - stats.frames / args.frames))
            collector.update_policy_weights_()
            mean = sum(returns) / max(1, len(returns))
            sync_ms = 1e3 * collector.stats().sync_seconds
            points.append(Point(stats.frames, mean, sync_ms, stats.lag))
            solved = len(returns) == returns.maxlen and mean >= GOAL
            if solved:
                break
    seconds = time.perf_counter() - started
    draw(points, args.out, f"CartPole-v1, scheme {args.scheme!r}, {args.workers} workers")
    print(
        f"{'Reached' if solved else 'Missed'} the goal of {GOAL}: mean return "
        f"{points[-1].mean:.1f} over the last {len(returns)} episodes, after "
        f"{points[-1].frames:,} frames and {seconds:.0f} s. Picture: {args.out}"
    )
    return solved


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scheme", default="shm", help="how the weights travel (sync-core list)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--frames", type=int, default=400_000, help="give up after so many")
    parser.add_argument("--ahead", action="store_true", help="collect while the trainer learns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/cartpole.png"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(0 if run(parse()) else 1)
