"""The arguments of a collector: checked before anything is started, and spread over its workers."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypedDict

import torch
from tensordict.nn import InteractionType
from torch import nn

from sync_collector.devices import Devices
from sync_collector.policies import exploration
from sync_collector.rollout import RolloutOptions
from sync_core import OptionError, Sender, WorkerGroup
from sync_core.checks import check_count, check_mapping


def count_workers(num_workers: int | None, create_env_fn: Any) -> int:
    """Return how many workers: as many as asked for, else as there are functions for environments.

    Raises:
        TypeError: no number of them.
        ValueError: none.
    """
    if num_workers is None:
        num_workers = len(create_env_fn) if isinstance(create_env_fn, list | tuple) else 1
    return check_count(num_workers, "num_workers")


def per_worker(value: Any, num_workers: int, name: str) -> tuple[Any, ...]:
    """A value for each worker, from one for all, or from a list or a tuple of them.

    Raises:
        ValueError: a list of another length.

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
    """A function for each worker, from one for all or a list.

    Args:
        value: the function or the list.
        num_workers: how many workers there are.
        name: the argument's, for messages.

    Raises:
        TypeError: something that makes nothing, such as an environment itself.
        ValueError: a list of another length.
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
    """Raise `TypeError` unless something can act as a policy.

    Args:
        policy: what should.
        said: how the message begins.
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
    """Return how many frames a batch has.

    Raises:
        TypeError: no number of them.
        ValueError: none, or a number that cannot be divided among the workers.
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
    """Raise unless a worker group can do what ``on_worker_failure`` asks for."""
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
    """Raise unless a replay buffer is one, and is there if workers are to write to it."""
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
    """After how many batches a worker is updated automatically; -1 for never.

    Raises:
        TypeError: the interval is not an integer.
        ValueError: arguments that do not go together, or nothing to refresh with.
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
    """Return whether a value is an environment or a policy, and no function that makes one."""
    if isinstance(value, type):
        return False
    # Environments share no class; what all of them have is these two methods.
    is_env = callable(getattr(value, "reset", None)) and callable(getattr(value, "step", None))
    return is_env or isinstance(value, nn.Module)


_Device: TypeAlias = torch.device | str | int | None
_Devices: TypeAlias = _Device | Sequence[_Device]

# What does the job of arguments that TorchRL's collectors have.
_ELSEWHERE = {
    "num_collectors": "num_workers=… says how many workers there are",
    "collector_class": (
        "sync=True or False says whether all workers make each batch, and workers='process' or "
        "another worker group where they run"
    ),
    "weight_updater": (
        "scheme='shm' or another scheme, by its name or as an object, updates the workers' weights"
    ),
    "create_env_kwargs": (
        "let the functions have their arguments: functools.partial(make_env, size=3), or a list of "
        "these, one for each worker"
    ),
    "ray_init_config": "write worker_options={'ray_init_config': {…}}",
    "remote_configs": "write worker_options={'remote_configs': {…}}",
    "use_env_creator": "leave it out: functions travel by cloudpickle",
    "no_cuda_sync": "leave it out: there is no such option here",
}
_OTHER_OPTIONS = (
    "options of a scheme, or of its Sender, go into scheme_options={…}, and those of a worker "
    "group into worker_options={…}"
)

_DEVICES = ("device", "env_device", "policy_device", "storing_device")


class WorkerOptions(TypedDict, total=False):
    """Options that may differ between workers; `Collector` takes them for all workers.

    Args:
        max_frames_per_traj: truncate episodes after so many steps, which are counted under
            ``"step_count"``; -1, the default, for never.
        reset_at_each_iter: begin every batch with a reset and new trajectories.
        exploration_type: what a probabilistic policy takes of its distributions: a
            `tensordict.nn.InteractionType` or its name; by default, ``"random"`` samples.
        trust_policy: give the policy the TensorDict, whatever its arguments are called.
        device: the default of each of the following. In `Collector`, a device
            may also be a list, one for each worker.
        env_device: where actions are put; an environment that has a ``to()`` is moved there.
        policy_device: where a worker's policy acts.
        storing_device: where batches are delivered; by default where environment and policy are,
            if both were given the same device.
    """

    max_frames_per_traj: int
    reset_at_each_iter: bool
    exploration_type: InteractionType | str
    trust_policy: bool
    device: _Devices
    env_device: _Devices
    policy_device: _Devices
    storing_device: _Devices


def options_of_workers(
    base: RolloutOptions,
    num_workers: int,
    common: WorkerOptions,
    collector_kwargs: WorkerOptions | Sequence[WorkerOptions] | None = None,
) -> tuple[RolloutOptions, ...]:
    """The options of each worker.

    Args:
        base: what all have, and none can change.
        num_workers: how many there are.
        common: what all have; for devices, a list is one for each.
        collector_kwargs: what comes before that, for all or one for each.

    Raises:
        ValueError: a list of another length, or a value that cannot be.
        TypeError: something that cannot differ between workers.

    Example:
        >>> base = RolloutOptions(frames_per_batch=4)
        >>> both = options_of_workers(base, 2, {}, [{}, {"max_frames_per_traj": 3}])
        >>> [options.max_frames_per_traj for options in both]
        [-1, 3]
    """
    spread = {
        name: per_worker(value, num_workers, name) if name in _DEVICES else (value,) * num_workers
        for name, value in common.items()
    }
    own = per_worker(collector_kwargs, num_workers, "collector_kwargs")
    for given in own:
        check_mapping(given or {}, "collector_kwargs", "{'max_frames_per_traj': 100}")
        _check_names(given or {})
    return tuple(
        _options(base, {name: values[i] for name, values in spread.items()} | dict(given or {}))
        for i, given in enumerate(own)
    )


def changed_options(base: RolloutOptions, given: Mapping[str, Any]) -> RolloutOptions:
    """Return options of one worker, which differ from the common ones.

    Args:
        base: what holds for all that is not given.
        given: the worker's own; any device replaces all of them.

    Raises:
        TypeError: something that cannot differ between workers.
    """
    check_mapping(given, "collector_kwargs", "{'max_frames_per_traj': 100}")
    _check_names(given)
    longest = {"max_frames_per_traj": base.max_frames_per_traj}
    changed = _options(base, {**longest, **given})
    return changed if given.keys() & {*_DEVICES} else replace(changed, devices=base.devices)


def check_arguments(given: Mapping[str, Any], owner: type) -> None:
    """Raise `TypeError` for an argument that neither a collector has nor its workers."""
    known = {*inspect.signature(owner).parameters, *WorkerOptions.__annotations__}
    for name in given.keys() - WorkerOptions.__annotations__.keys():
        meant = _ELSEWHERE.get(name)
        if meant is None:
            near = difflib.get_close_matches(name, known, n=1)
            others = inspect.signature(Sender).parameters.keys() - {"model", "options"}
            of_sender = difflib.get_close_matches(name, others, n=1)
            if near:
                meant = f"did you mean {near[0]!r}?"
            elif of_sender:
                meant = f"did you mean scheme_options={{{of_sender[0]!r}: …}}?"
            else:
                meant = _OTHER_OPTIONS
        raise TypeError(f"{owner.__name__} has no argument {name!r}; {meant}")


def _options(base: RolloutOptions, given: dict[str, Any]) -> RolloutOptions:
    one, env, policy, storing = (given.pop(name, None) for name in _DEVICES)
    longest = given.get("max_frames_per_traj", -1)
    given["max_frames_per_traj"] = check_count(longest, "max_frames_per_traj", never="no limit")
    if "exploration_type" in given:
        given["exploration_type"] = exploration(given["exploration_type"])
    devices = Devices.of(one, env=env, policy=policy, storing=storing)
    if devices.storing is not None and devices.storing.type == "meta":
        raise ValueError(
            "batches cannot be stored on the device 'meta', where tensors have no values; give "
            "storing_device='cpu', or another that has memory"
        )
    return replace(base, devices=devices, **given)


def _check_names(given: Mapping[str, Any]) -> None:
    known = WorkerOptions.__annotations__
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise TypeError(
            f"collector_kwargs got {', '.join(map(repr, unknown))}; what each worker may have of "
            f"its own is {', '.join(known)}"
        )
