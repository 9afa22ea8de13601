"""Options of the workers of a collector: common ones, and those of single workers."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypedDict

import torch
from tensordict.nn import InteractionType

from sync_collector.devices import Devices
from sync_collector.exploration import exploration
from sync_collector.options import per_worker
from sync_collector.rollout import RolloutOptions
from sync_core.checks import check_count, check_mapping

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
            meant = f"did you mean {near[0]!r}?" if near else _OTHER_OPTIONS
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
