"""Checks the arguments of a collector before anything starts, and distributes them to workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

from sync_collector.policies import exploration
from sync_collector.rollout import Devices, RolloutOptions
from sync_core import OptionError, WorkerGroup
from sync_core.checks import check_count, check_mapping


def count_workers(num_workers: int | None, create_env_fn: Any) -> int:
    """Return the number of workers: as requested, else one per environment function.

    Raises:
        TypeError: the number is not an integer.
        ValueError: the number is below 1.
    """
    if num_workers is None:
        num_workers = len(create_env_fn) if isinstance(create_env_fn, list | tuple) else 1
    return check_count(num_workers, "num_workers")


def per_worker(value: Any, num_workers: int, name: str) -> tuple[Any, ...]:
    """Return a tuple with a value for each worker, from one value for all, a list or a tuple.

    Raises:
        ValueError: the list has another length.

    Example:
        >>> per_worker("cpu", 2, "device"), per_worker(["cpu", "cuda"], 2, "device")
        (('cpu', 'cpu'), ('cpu', 'cuda'))
    """
    if not isinstance(value, list | tuple):
        return (value,) * num_workers
    if len(value) != num_workers:
        raise ValueError(
            f"{name} has {len(value)} entries for {num_workers} workers; give one for each, or "
            "a single one for all"
        )
    return tuple(value)


def factories(
    value: Callable[[], Any] | Sequence[Callable[[], Any]], num_workers: int, name: str
) -> tuple[Callable[[], Any], ...]:
    """Return a function for each worker, from one function for all or a list.

    Args:
        value: the function or the list.
        num_workers: the number of workers.
        name: the name of the argument, for messages.

    Raises:
        TypeError: a value is not a function, such as an environment itself.
        ValueError: the list has another length.
    """
    functions = per_worker(value, num_workers, name)
    for function in functions:
        kind = type(function).__name__
        if _is_made(function):
            raise TypeError(
                f"{name} got a {kind} itself, and every worker makes its own; pass a function "
                f"that makes it: {name}=lambda: {kind}(…)"
            )
        if not callable(function):
            raise TypeError(
                f"{name} must be a function or a list of functions, not {function!r}; "
                f"type {name}=lambda: … to make one"
            )
    return functions


def check_policy(policy: Any, policy_factory: Any, scheme: Any, *, shares_policy: bool) -> None:
    """Raise unless the arguments about policies go together."""
    if policy is not None:
        check_acts(policy, "policy is")
    if policy_factory is None:
        return
    if policy is not None:
        raise ValueError("give either policy or policy_factory, not both")
    if shares_policy:
        raise OptionError(
            f"scheme {scheme!r} lets workers act with the trainer's own policy, and policy_factory "
            "makes others, which it could never update; give policy=…, or use scheme='thread' "
            "(scheme='shm' for workers in processes)"
        )


def check_acts(policy: Any, said: str) -> None:
    """Raise `TypeError` unless an object can act as a policy.

    Args:
        policy: the object.
        said: the beginning of the message.
    """
    if isinstance(policy, type):
        kind = policy.__name__
        raise TypeError(f"{said} the class {kind}, not an instance of it; type {kind}(…)")
    if not callable(policy):
        raise TypeError(
            f"{said} a {type(policy).__name__}, which cannot be called; a policy is a module or a "
            "function, and policy_factory=[…] makes one for each worker"
        )


def count_frames(frames_per_batch: int, num_workers: int, *, sync: bool) -> int:
    """Return the number of frames in a batch.

    Raises:
        TypeError: the number is not an integer.
        ValueError: the number is below 1, or cannot be divided among the workers.
    """
    frames_per_batch = check_count(frames_per_batch, "frames_per_batch")
    if sync and frames_per_batch % num_workers:
        raise ValueError(
            f"frames_per_batch={frames_per_batch} cannot be divided among {num_workers} workers; "
            f"give a multiple of {num_workers}, for example "
            f"{frames_per_batch + num_workers - frames_per_batch % num_workers}"
        )
    return frames_per_batch


def check_on_worker_failure(value: str, group: type[WorkerGroup]) -> None:
    """Raise unless the worker group supports ``on_worker_failure``."""
    if value not in ("raise", "restart", "drop", "quarantine"):
        raise ValueError(
            f"on_worker_failure is {value!r}; give 'raise', 'restart', 'drop' or 'quarantine'"
        )
    if value == "restart" and "restart" not in group.capabilities:
        raise OptionError(
            f"{group.__name__} cannot put a worker in place of another; leave "
            "on_worker_failure out, or use workers='process'"
        )


def check_buffer(replay_buffer: Any, *, extend_in_workers: bool) -> None:
    """Raise if the object is not a replay buffer, or is missing although workers write to it."""
    if replay_buffer is None:
        if extend_in_workers:
            raise ValueError("extend_in_workers needs the replay_buffer that they write to")
    elif not callable(getattr(replay_buffer, "extend", None)):
        raise TypeError(
            f"replay_buffer is a {type(replay_buffer).__name__} without extend(); give a TorchRL "
            "ReplayBuffer, or an object whose extend(batch) keeps a TensorDict"
        )


def refresh_interval(
    max_weight_update_interval: int, *, each_batch: bool, has_weights: bool
) -> int:
    """Return the number of batches after which a worker is updated automatically; -1 for never.

    Raises:
        TypeError: the interval is not an integer.
        ValueError: the arguments do not go together, or there are no weights to send.
    """
    interval = check_count(
        max_weight_update_interval, "max_weight_update_interval", least=0, never="never"
    )
    if each_batch and interval > 1:
        raise ValueError(
            "update_after_each_batch is max_weight_update_interval=1; leave one of them out"
        )
    interval = 1 if each_batch else interval
    if interval >= 0 and not has_weights:
        raise ValueError(
            "there are no weights to send automatically: the workers' policies come from "
            "policy_factory; call update_policy_weights_(weights) instead, or give policy=…"
        )
    return interval


def _is_made(value: Any) -> bool:
    """Return whether a value is an environment or a policy instead of a function that makes one."""
    if isinstance(value, type):
        return False
    # Environments share no class, but all of them have these two methods.
    is_env = callable(getattr(value, "reset", None)) and callable(getattr(value, "step", None))
    return is_env or isinstance(value, nn.Module)


_Device: TypeAlias = torch.device | str | int | None

_DEVICES = ("device", "env_device", "policy_device", "storing_device")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The way in which workers make batches: the argument ``per_worker`` of `Collector`.

    Give one object for all workers, or a list with one for each. A field that is None has its
    default.

    Args:
        num_envs: the number of environments that a worker makes and steps together; 1 by default.
        max_frames_per_traj: truncate episodes after this number of steps, counted under
            ``"step_count"``; -1, the default, for never.
        reset_at_each_iter: begin every batch with a reset and new trajectories.
        exploration_type: how a probabilistic policy chooses from its distributions: a
            `tensordict.nn.InteractionType` or its name; by default ``"random"``, which samples.
        trust_policy: pass the TensorDict to the policy, whatever the names of its arguments.
        device: the default for the three devices below.
        env_device: the device of actions; an environment that has a ``to()`` is moved there.
        policy_device: the device of a worker's policy.
        storing_device: the device of delivered batches; by default that of environment and policy,
            if both were given the same device.

    Example:
        >>> from sync_collector import Collector
        >>> from sync_collector.envs import CountingEnv
        >>> two = WorkerOptions(num_envs=2, reset_at_each_iter=True)
        >>> with Collector(CountingEnv, scheme="none", frames_per_batch=6, per_worker=two) as c:
        ...     next(c).batch_size
        torch.Size([2, 3])
    """

    num_envs: int | None = None
    max_frames_per_traj: int | None = None
    reset_at_each_iter: bool | None = None
    exploration_type: InteractionType | str | None = None
    trust_policy: bool | None = None
    device: _Device = None
    env_device: _Device = None
    policy_device: _Device = None
    storing_device: _Device = None

    def given(self) -> dict[str, Any]:
        """Return the options that are not None, by name."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """The contents of batches: the argument ``batch`` of `Collector`.

    Args:
        split_trajs: yield a row for each trajectory (`split_trajectories`).
        postproc: changes every batch before it is yielded or written, after ``split_trajs``.
        extend_in_workers: let workers write to the replay buffer, for a buffer that pickles as a
            handle to shared storage.
        episode_stats: record ``("next", "episode_reward")`` and ``("next", "episode_length")``: the
            reward and the number of steps of each frame's episode so far. Where ``("next",
            "done")`` is True, these are the episode's totals. Their means are in `Collector.stats`.
        track_policy_version: record ``policy_version`` and ``("next", "policy_version")``.
        init_random_frames: act at random for at least this number of frames of all workers
            together; -1 for none.

    Example:
        >>> from sync_collector import Collector
        >>> from sync_collector.envs import CountingEnv
        >>> rows = BatchOptions(split_trajs=True)
        >>> with Collector(CountingEnv, scheme="none", frames_per_batch=10, batch=rows) as c:
        ...     next(c).batch_size
        torch.Size([2, 5])
    """

    split_trajs: bool = False
    postproc: Callable[[TensorDictBase], Any] | None = None
    extend_in_workers: bool = False
    episode_stats: bool = False
    track_policy_version: bool = True
    init_random_frames: int = -1


def options_of_workers(
    base: RolloutOptions,
    num_workers: int,
    common: Mapping[str, Any],
    own: Any = None,
    name: str = "per_worker",
) -> tuple[RolloutOptions, ...]:
    """Return the options of each worker.

    Args:
        base: options of all workers that cannot differ between workers.
        num_workers: the number of workers.
        common: the default options; a list of devices has one for each worker.
        own: options that override ``common``, for all workers or one for each: `WorkerOptions`, or
            mappings.
        name: the name of the argument ``own``, for messages.

    Raises:
        ValueError: a list has another length, or a value is invalid.
        TypeError: an option cannot differ between workers.

    Example:
        >>> base = RolloutOptions(frames_per_batch=4)
        >>> both = options_of_workers(base, 2, {}, [{}, {"max_frames_per_traj": 3}])
        >>> [options.max_frames_per_traj for options in both]
        [-1, 3]
    """
    spread = {
        key: per_worker(value, num_workers, key) if key in _DEVICES else (value,) * num_workers
        for key, value in common.items()
    }
    each = [_given(one, name) for one in per_worker(own, num_workers, name)]
    return tuple(
        _options(base, {key: values[i] for key, values in spread.items()} | given)
        for i, given in enumerate(each)
    )


def changed_options(base: RolloutOptions, own: Any) -> RolloutOptions:
    """Return the common options, changed by a worker's own.

    Args:
        base: the common options.
        own: the worker's own options; any device among them replaces all common devices.

    Raises:
        TypeError: an option cannot differ between workers.
    """
    given = _given(own, "collector_kwargs")
    kept = {"max_frames_per_traj": base.max_frames_per_traj, "num_envs": base.num_envs}
    changed = _options(base, kept | given)
    return changed if given.keys() & {*_DEVICES} else replace(changed, devices=base.devices)


def _options(base: RolloutOptions, given: dict[str, Any]) -> RolloutOptions:
    one, env, policy, storing = (given.pop(name, None) for name in _DEVICES)
    longest = given.get("max_frames_per_traj", -1)
    given["max_frames_per_traj"] = check_count(longest, "max_frames_per_traj", never="no limit")
    given["num_envs"] = check_count(given.get("num_envs", 1), "num_envs")
    if "exploration_type" in given:
        given["exploration_type"] = exploration(given["exploration_type"])
    devices = Devices.of(one, env=env, policy=policy, storing=storing)
    if devices.storing is not None and devices.storing.type == "meta":
        raise ValueError(
            "batches cannot be stored on the device 'meta', where tensors have no values; give "
            "storing_device='cpu', or another that has memory"
        )
    return replace(base, devices=devices, **given)


def _given(own: Any, name: str) -> dict[str, Any]:
    """Return a worker's own options by name.

    Raises:
        TypeError: they are neither `WorkerOptions` nor a mapping, or have an unknown name.
    """
    if isinstance(own, WorkerOptions):
        return own.given()
    given: Mapping[str, Any] = {} if own is None else own
    check_mapping(given, name, "{'max_frames_per_traj': 100}")
    known = [one.name for one in fields(WorkerOptions)]
    if unknown := sorted(set(given) - set(known)):
        raise TypeError(
            f"{name} got {', '.join(map(repr, unknown))}; per worker, type one of "
            f"{', '.join(known)}"
        )
    return dict(given)
