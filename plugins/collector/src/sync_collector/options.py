"""Checks what a collector was given before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from sync_core import OptionError
from sync_core.checks import check_count
from sync_core.workers import WorkerGroup


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
        raise TypeError(f"{said} the class {kind}, and no policy of that class; type {kind}(…)")
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
    if value not in ("raise", "restart"):
        raise ValueError(f"on_worker_failure is {value!r}; give 'raise' or 'restart'")
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
            "there are no weights to send by itself: the workers' policies come from "
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
