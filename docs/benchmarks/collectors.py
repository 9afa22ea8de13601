"""Compares five ways to collect for one PPO: frames per second, learning included.

    python docs/benchmarks/collectors.py

The ways alternate, with the same policy, environments, frames and training steps, on two processes
or as many as a way needs. Prints a Markdown table: frames per second of collecting alone, and of
collecting, learning and updating the workers. SubprocVecEnv is left out if stable-baselines3 is not
installed, and so is TorchRL. ``burn`` is an environment whose step takes 300 µs of a core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributions import Categorical

from sync_collector import Collector

WORKERS, ENVS, STEPS = 2, 16, 128
EPOCHS, MINIBATCH = 4, 256
BURN = 300e-6
_WARM_UP = 2

#: Yields batches of the shape [environments, steps]; a function sent to it is called for an update.
Source = Iterator[tuple[TensorDictBase, Callable[[], object]]]


class Burn(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole with a step that uses a core for longer."""

    def step(self, action: Any) -> Any:
        """Step after some work."""
        end = time.perf_counter() + BURN
        while time.perf_counter() < end:
            pass
        return self.env.step(action)


def make_env(name: str) -> Any:
    """Make an environment."""
    env = gymnasium.make("CartPole-v1", disable_env_checker=True)
    return Burn(env) if name == "burn" else env


class ActorCritic(nn.Module):
    """A policy and a value network of two layers of width 64."""

    def __init__(self) -> None:
        super().__init__()
        self.logits, self.value = (
            nn.Sequential(
                nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
            )
            for outputs in (2, 1)
        )

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Return the action and its log-probability."""
        distribution = Categorical(logits=self.logits(observation))
        action = distribution.sample()
        return action, distribution.log_prob(action)


def learn(batch: TensorDictBase, model: ActorCritic, optimizer: torch.optim.Optimizer) -> None:
    """Take the training steps of PPO."""
    with torch.no_grad():
        now = model.value(batch["observation"]).squeeze(-1)
        end = model.value(batch["last"]).squeeze(-1)
        going = 1 - batch["done"].float()
        following = torch.cat([now[:, 1:], end.unsqueeze(1)], 1) * going
        delta = batch["reward"] + 0.99 * following - now
        advantage, running = torch.zeros_like(delta), torch.zeros_like(delta[:, 0])
        for t in reversed(range(delta.shape[1])):
            running = delta[:, t] + 0.99 * 0.95 * going[:, t] * running
            advantage[:, t] = running
    rows = TensorDict(
        {
            "observation": batch["observation"],
            "action": batch["action"],
            "log_prob": batch["log_prob"],
            "advantage": advantage,
            "target": advantage + now,
        },
        batch_size=advantage.shape,
    ).reshape(-1)
    for _ in range(EPOCHS):
        for indices in torch.randperm(len(rows)).split(MINIBATCH):
            part = rows[indices]
            distribution = Categorical(logits=model.logits(part["observation"]))
            ratio = (distribution.log_prob(part["action"]) - part["log_prob"]).exp()
            gain = part["advantage"]
            loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            error = model.value(part["observation"]).squeeze(-1) - part["target"]
            optimizer.zero_grad()
            (loss + 0.5 * error.square().mean()).backward()
            optimizer.step()


def ours(name: str, model: ActorCritic, *, workers: int) -> Source:
    """Collect by `sync_collector.Collector`; one of the workers runs in this process."""
    with Collector(
        partial(make_env, name),
        model,
        scheme="none" if workers == 1 else "shm",
        num_workers=workers,
        num_workers_per_collector=ENVS // workers,
        frames_per_batch=ENVS * STEPS,
        sync=True,
    ) as collector:
        for made in collector:
            yield _of_collector(made, "action_log_prob"), collector.update_policy_weights_


def torchrl(name: str, model: ActorCritic) -> Source:
    """Collect by TorchRL's `MultiSyncCollector`."""
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import MultiSyncCollector
    from torchrl.envs import GymWrapper, SerialEnv

    policy = TensorDictModule(model, in_keys=["observation"], out_keys=["action", "log_prob"])

    def make() -> Any:
        one = partial(_wrapped, GymWrapper, name)
        return SerialEnv(ENVS // WORKERS, one)

    collector = MultiSyncCollector(
        [make] * WORKERS, policy, frames_per_batch=ENVS * STEPS, total_frames=-1,
        num_threads=1, num_sub_threads=1, cat_results=0,
    )  # fmt: skip
    try:
        for made in collector:
            yield _of_collector(made, "log_prob"), collector.update_policy_weights_
    finally:
        collector.shutdown()


def _wrapped(wrapper: Any, name: str) -> Any:
    return wrapper(make_env(name), categorical_action_encoding=True)


def _of_collector(made: TensorDictBase, log_prob: str) -> TensorDictBase:
    rows = made.flatten(0, -2)
    return TensorDict(
        {
            "observation": rows["observation"],
            "action": rows["action"],
            "log_prob": rows[log_prob],
            "reward": rows["next", "reward"].squeeze(-1),
            "done": rows["next", "done"].squeeze(-1),
            "last": rows["next", "observation"][:, -1],
        }
    )


def async_vector_env(name: str, model: ActorCritic) -> Source:
    """Step Gymnasium's `AsyncVectorEnv`, with a process for each environment."""
    envs = gymnasium.vector.AsyncVectorEnv([partial(make_env, name)] * ENVS)

    def step(action: Any) -> tuple[Any, Any, Any]:
        observation, reward, terminated, truncated, _ = envs.step(action)
        return observation, reward, terminated | truncated

    with closing(envs):
        yield from _by_hand(envs.reset()[0], step, model)


def subproc_vec_env(name: str, model: ActorCritic) -> Source:
    """Step stable-baselines3's `SubprocVecEnv`, with a process for each environment."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    envs = SubprocVecEnv([partial(make_env, name)] * ENVS)
    with closing(envs):
        yield from _by_hand(envs.reset(), lambda action: envs.step(action)[:3], model)


def _by_hand(observation: Any, step: Callable[[Any], Any], model: ActorCritic) -> Source:
    """Step environments with the trainer's own policy, as most programs do."""
    observations = np.empty((STEPS, ENVS, 4), np.float32)
    rewards, dones = np.empty((STEPS, ENVS), np.float32), np.empty((STEPS, ENVS), np.bool_)
    while True:
        acted = []
        with torch.no_grad():
            for t in range(STEPS):
                observations[t] = observation
                acted.append(model(torch.as_tensor(observation)))
                observation, rewards[t], dones[t] = step(acted[-1][0].numpy())
        actions, log_probs = (torch.stack(column, 1) for column in zip(*acted, strict=True))
        batch = TensorDict(
            {
                "observation": torch.from_numpy(observations).transpose(0, 1).contiguous(),
                "action": actions,
                "log_prob": log_probs,
                "reward": torch.from_numpy(rewards).T.contiguous(),
                "done": torch.from_numpy(dones).T.contiguous(),
                "last": torch.as_tensor(observation),
            }
        )
        yield batch, lambda: None


WAYS: dict[str, Callable[[str, ActorCritic], Source]] = {
    "sync-core, 2 processes": partial(ours, workers=WORKERS),
    "sync-core, trainer's process": partial(ours, workers=1),
    "AsyncVectorEnv": async_vector_env,
    "SubprocVecEnv": subproc_vec_env,
    "TorchRL, 2 processes": torchrl,
}
_NEEDS = {"SubprocVecEnv": "stable_baselines3", "TorchRL, 2 processes": "torchrl"}


def measure(way: str, name: str, seconds: float) -> tuple[float, float]:
    """Return frames per second of collecting alone, and of the whole loop.

    Args:
        way: one of `WAYS`.
        name: ``"cartpole"`` or ``"burn"``.
        seconds: the seconds of each measurement.
    """
    torch.manual_seed(0)
    model, optimizer, speeds = ActorCritic(), None, []
    with closing(WAYS[way](name, model)) as batches:  # type: ignore[type-var]
        for learning in (False, True):
            for _ in range(_WARM_UP):
                next(batches)
            if learning:
                optimizer = torch.optim.Adam(model.parameters(), 1e-3)
            begin, frames = time.perf_counter(), 0
            while time.perf_counter() - begin < seconds:
                batch, update = next(batches)
                if optimizer is not None:
                    learn(batch, model, optimizer)
                    update()
                frames += batch["reward"].numel()
            speeds.append(frames / (time.perf_counter() - begin))
    return speeds[0], speeds[1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--envs", nargs="+", default=["cartpole", "burn"])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ways = [way for way in WAYS if way not in _NEEDS or find_spec(_NEEDS[way])]
    print("| environment | way | collecting | with learning | of ours |")
    print("|---|---|--:|--:|--:|")
    for name in arguments.envs:
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(arguments.turns):
            for way in ways:
                found[way].append(measure(way, name, arguments.seconds))
        best = median(whole for _, whole in found[ways[0]])
        for way, pairs in found.items():
            alone, whole = (median(column) for column in zip(*pairs, strict=True))
            print(
                f"| {name} | {way} | {alone:,.0f} | {whole:,.0f} | {whole / best:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
