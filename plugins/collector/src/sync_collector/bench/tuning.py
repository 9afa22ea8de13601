"""``sync-core tune-env``: finds how many workers, and environments per worker, are fastest.

Measures the time of a step, then collectors with different numbers of workers and environments.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sync_collector import Collector
from sync_collector.bench.training import change
from sync_collector.envs.adapt import as_env, stack_envs
from sync_collector.envs.arrays import speaks_arrays
from sync_collector.envs.normal import Conventions
from sync_collector.envs.protocol import FLAGS, Env, close_env, random_policy, reset_env
from sync_core import OptionError, registry

__all__ = ["Setup", "StepCost", "add_arguments", "measure_setup", "measure_step", "suggested"]

#: The suggested setup is the smallest one with at least this share of the most frames per second.
_NEARLY_ALL = 0.9
#: If a measurement got less than this share of a core, other programs ran, and figures mislead.
_BUSY = 0.9
_WARM_UP_BATCHES = 2
_LEAST_STEPS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = "Measure an environment, and suggest workers and environments in each."
    parser.add_argument(
        "factory",
        metavar="FACTORY",
        help="makes an environment: my_module:make_env, or the id of a Gymnasium environment",
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument(
        "--workers", nargs="+", type=int, default=_doubled(cores or 1), metavar="N",
        help="numbers of workers to try (1, 2, 4 … up to the number of cores)",
    )  # fmt: skip
    parser.add_argument(
        "--envs", nargs="+", type=int, default=[1, 4, 16], metavar="N",
        help="numbers of environments in each worker to try (1 4 16)",
    )  # fmt: skip
    parser.add_argument("--scheme", default="shm", help="how weights travel to workers (shm)")
    parser.add_argument(
        "--width", type=int, default=64, help="of the two layers of the policy (64)"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement (1.0)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The time that one step and one reset of an environment take.

    Args:
        envs: the number of environments in one step; more than 1 for a vector environment.
        step: the median seconds of a step.
        reset: the median seconds of a reset.
        steps: the number of steps measured.
    """

    envs: int
    step: float
    reset: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A number of workers and of environments, and the frames per second with them.

    Args:
        workers: the number of workers: 1 runs in the trainer's process, more run as processes.
        envs: the number of environments of each worker.
        frames_per_second: frames of all workers, with an update of the policy for each batch.
    """

    workers: int
    envs: int
    frames_per_second: float


class Actor(nn.Module):
    """A policy of two layers that returns actions drawn in advance and not the layers' outputs.

    Args:
        width: of the layers.
        actions: the actions to return, one set per step, in a cycle, by the keys of the
            environment.
    """

    def __init__(self, width: int, actions: Sequence[dict[Any, Tensor]]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LazyLinear(width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self._actions, self._next = list(actions), 0
        #: The number of dimensions of the environment's batch.
        self.dims = 0

    def drawn(self) -> dict[Any, Tensor]:
        """Return the actions of the next step."""
        self._next += 1
        return self._actions[self._next % len(self._actions)]

    def forward(self, tensordict: Any) -> Any:
        """Run the layers on all observations, and set the actions of a step."""
        dims = len(tensordict.batch_size)
        seen = [
            tensor.flatten(dims) if tensor.ndim > dims else tensor.unsqueeze(-1)
            for key, tensor in tensordict.items(include_nested=True, leaves_only=True)
            if tensor.dtype is not torch.bool and key not in self._actions[0]
        ]
        self.layers(torch.cat([each.float() for each in seen], -1))
        return tensordict.update(self.drawn())


class ObservationActor(Actor):
    """The same policy for one observation, which most policies take without a TensorDict."""

    def forward(self, observation: Tensor) -> Tensor:
        """Run the layers, and return the actions of a step."""
        action = self.drawn()["action"]
        self.layers(observation.reshape(*observation.shape[: self.dims], -1).float())
        return action


def measure_step(make: Callable[[], Any], seconds: float = 1.0) -> StepCost:
    """Measure an environment with random actions, in this process.

    Args:
        make: makes the environment.
        seconds: how long to measure.

    Example:
        >>> from sync_collector.envs import CountingEnv
        >>> measure_step(CountingEnv, 0.1).envs
        1
    """
    env = as_env(make())
    try:
        steps, resets = _timed(env, seconds)
    finally:
        close_env(env)
    return StepCost(
        envs=max(1, env.batch_size.numel()),
        step=statistics.median(steps),
        reset=statistics.median(resets),
        steps=len(steps),
    )


def _timed(env: Env, seconds: float) -> tuple[list[float], list[float]]:
    """Return the seconds of each step and of each reset of all environments together."""
    clock, steps, resets = time.perf_counter, list[float](), list[float]()
    end = clock() + seconds
    ended, conventions = True, Conventions(env)
    root: Any = None
    while clock() < end or len(steps) < _LEAST_STEPS:
        if ended:
            begin = clock()
            root = env.reset_arrays() if speaks_arrays(env) else reset_env(env)
            resets.append(clock() - begin)
        if speaks_arrays(env):
            action = env.sample_action()
            begin = clock()
            _, _, terminated, truncated = env.step_arrays(action)
            steps.append(clock() - begin)
            # A batched environment is reset once all of its environments have ended.
            ended = bool((torch.as_tensor(terminated) | torch.as_tensor(truncated)).all())
        else:
            acted = random_policy(env, conventions.action_key)(root.copy())
            begin = clock()
            stepped = env.step(acted)
            steps.append(clock() - begin)
            root = stepped["next"].exclude("reward")
            ended = bool(conventions.ended_now(stepped["next"]).all())
    return steps, resets


def measure_setup(
    make: Callable[[], Any],
    *,
    workers: int,
    envs: int,
    cost: StepCost,
    scheme: str = "shm",
    width: int = 64,
    seconds: float = 1.0,
) -> Setup:
    """Measure a collector whose workers make each batch together.

    Args:
        make: makes an environment.
        workers: 1 for one in this process, which sends nothing.
        envs: environments of each worker.
        cost: the cost of the environment, to choose the size of batches.
        scheme: the scheme, for several workers.
        width: of the policy's layers.
        seconds: how long to measure.
    """
    actor = _actor(make, envs, width)
    # A batch takes about a tenth of the time, if the policy takes as long as the environments.
    rows = max(8, min(512, int(seconds / 10 / (2 * cost.step * envs + 100e-6))))
    with Collector(
        make,
        actor,
        scheme="none" if workers == 1 else scheme,
        num_workers=workers,
        num_workers_per_collector=envs,
        frames_per_batch=workers * envs * cost.envs * rows,
        sync=True,
    ) as collector:
        for _ in range(_WARM_UP_BATCHES):
            next(collector)
        frames, begin = 0, time.perf_counter()
        while (spent := time.perf_counter() - begin) < seconds or not frames:
            frames += next(collector).numel()
            change(actor)
            collector.update_policy_weights_()
    return Setup(workers=workers, envs=envs, frames_per_second=frames / spent)


def _actor(make: Callable[[], Any], envs: int, width: int) -> Actor:
    """Return a policy with random actions for one environment, or for several."""
    made = [as_env(make()) for _ in range(envs)]
    env = made[0] if envs == 1 else stack_envs(made)
    try:
        root = reset_env(env)
        act = random_policy(env, Conventions(env).action_key)
        before = set(root.keys(include_nested=True, leaves_only=True))
        drawn = [act(root.copy()) for _ in range(16)]
        chosen = [
            {
                key: acted.get(key).clone()
                for key in acted.keys(include_nested=True, leaves_only=True)
                if key not in before
            }
            for acted in drawn
        ]
        observed = {key for key in before if key not in FLAGS}
        with torch.no_grad():
            if observed == {"observation"} and set(chosen[0]) == {"action"}:
                actor: Actor = ObservationActor(width, chosen)
                actor.dims = len(env.batch_size)
                actor(root["observation"])
            else:
                actor = Actor(width, chosen)
                actor(root.copy())
    finally:
        close_env(env)
    return actor


def suggested(setups: Sequence[Setup]) -> Setup:
    """Return the smallest setup that makes nearly as many frames as the best.

    Example:
        >>> one = Setup(workers=1, envs=4, frames_per_second=95.0)
        >>> suggested([one, Setup(workers=2, envs=4, frames_per_second=100.0)]) is one
        True
    """
    most = max(setup.frames_per_second for setup in setups)
    enough = (setup for setup in setups if setup.frames_per_second >= _NEARLY_ALL * most)
    return min(enough, key=lambda setup: (setup.workers, setup.envs))


def _run(
    arguments: argparse.Namespace, rest: Sequence[str], parser: argparse.ArgumentParser
) -> int:
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if min(*arguments.workers, *arguments.envs, arguments.width) < 1 or arguments.seconds <= 0:
        parser.error("--workers, --envs and --width are 1 or more, and --seconds more than 0")
    registry.find(registry.SCHEMES, arguments.scheme)
    make = factory(arguments.factory)
    torch.set_num_threads(1)
    begin, worked = time.perf_counter(), time.process_time()
    cost = measure_step(make, arguments.seconds)
    share = (time.process_time() - worked) / (time.perf_counter() - begin)
    if share < _BUSY:
        sys.stderr.write(
            f"This process had {share:.0%} of a core: the environment waits, or others run; "
            "in the second case, measure again when they have ended.\n"
        )
    say = sys.stderr.write if arguments.json else sys.stdout.write
    of = "" if cost.envs == 1 else f" of {cost.envs} environments"
    say(f"step{of}: {1e6 * cost.step:.0f} µs, reset: {1e6 * cost.reset:.0f} µs\n\n")
    # A vector environment is one environment of a worker.
    numbers = arguments.envs if cost.envs == 1 else [1]
    say(f"{'workers':>8} {'environments in each':>21} {'frames/s':>10}\n")
    setups = []
    for setup in _setups(make, arguments, numbers, cost):
        say(f"{setup.workers:>8} {setup.envs:>21} {setup.frames_per_second:>10,.0f}\n")
        setups.append(setup)
    best = suggested(setups)
    if arguments.json:
        made = {"step": asdict(cost), "setups": [asdict(s) for s in setups], "best": asdict(best)}
        sys.stdout.write(json.dumps(made) + "\n")
    else:
        say(f"\n{_advice(best, cost, arguments.scheme)}\n")
    return 0


def _setups(
    make: Callable[[], Any], arguments: argparse.Namespace, numbers: Sequence[int], cost: StepCost
) -> Iterator[Setup]:
    for workers in sorted(set(arguments.workers)):
        for envs in sorted(set(numbers)):
            yield measure_setup(
                make,
                workers=workers,
                envs=envs,
                cost=cost,
                scheme=arguments.scheme,
                width=arguments.width,
                seconds=arguments.seconds,
            )


def _advice(best: Setup, cost: StepCost, scheme: str) -> str:
    used = "none" if best.workers == 1 else scheme
    words = [f"scheme={used!r}", f"num_workers={best.workers}"]
    if cost.envs == 1:
        words.append(f"num_workers_per_collector={best.envs}")
    line = f"Collector(make_env, policy, {', '.join(words)}, …)"
    if best.workers > 1:
        return line
    return (
        f"{line}\nMore processes collect no faster. One process, scheme={scheme!r}, still collects "
        "while the trainer learns."
    )


def factory(name: str) -> Callable[[], Any]:
    """Return the function that makes an environment.

    Args:
        name: ``module:function``, where the module may be in the current folder, or an id of
            Gymnasium.

    Raises:
        OptionError: no such module or function, or gymnasium is not installed.
    """
    module_name, colon, function = name.partition(":")
    if not colon:
        try:
            import gymnasium
        except ImportError as error:
            raise OptionError(
                f"{name!r} is the id of a Gymnasium environment, and gymnasium is not installed; "
                "type: pip install 'sync-collector[gym]', or give module:function"
            ) from error
        try:
            gymnasium.spec(name)
        except gymnasium.error.Error as error:
            raise OptionError(
                f"Gymnasium has no environment {name!r}: {error}; give another id, or "
                "module:function"
            ) from error
        return partial(_make_registered, name)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, ValueError, TypeError) as error:
        raise OptionError(
            f"the module {module_name!r} in this folder, or installed, does not import: {error}; "
            "type my_module:make_env for the function make_env of my_module.py"
        ) from error
    made = getattr(module, function, None)
    if not callable(made):
        raise OptionError(
            f"the module {module_name!r} has no function {function!r}; give one that makes an "
            "environment"
        )
    make: Callable[[], Any] = made
    return make


def _make_registered(name: str) -> Any:
    import gymnasium

    try:
        return gymnasium.make(name)
    except gymnasium.error.Error as error:
        raise OptionError(f"the environment {name!r} cannot be made: {error}") from error


def _doubled(cores: int) -> list[int]:
    """Return 1, 2, 4 … up to the number of cores, which is the last."""
    numbers = [1]
    while 2 * numbers[-1] < cores:
        numbers.append(2 * numbers[-1])
    return numbers if cores == 1 else [*numbers, cores]
