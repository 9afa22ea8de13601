"""Liveness of processes in a cluster: a sender learns of their ends by Ray, without polling."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OwnerDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


class LivenessActor:
    """An asynchronous actor whose method `waits` never returns.

    The result of a call belongs to the process that made the call. When that process ends, Ray
    fails the result wherever it is waited for, within milliseconds.
    """

    async def waits(self) -> None:
        """Never return."""
        await asyncio.Event().wait()


def start(actor_class: type, *args: Any) -> Any:
    """Start an asynchronous actor on this node, so that it lives as long as the sender.

    Args:
        actor_class: its class.
        args: arguments of the class.
    """
    node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor: Any = ray.remote(actor_class)
    options = actor.options(num_cpus=0, scheduling_strategy=node, max_concurrency=10_000)
    return options.remote(*args)


def make_token(actor: Any) -> list[Any]:
    """Return a token of this process, for `on_end` in another one.

    Args:
        actor: a `LivenessActor`.
    """
    # In a list, since Ray replaces a reference by its value.
    return [actor.waits.remote()]


def release(token: list[Any]) -> None:
    """End the use of a token, in the process that made it."""
    # The sender may have ended its actor.
    with suppress(RayError):
        ray.cancel(token[0])


def on_end(token: list[Any], callback: Callable[[], None]) -> None:
    """Call a function, in a thread of Ray's, once the process that made a token has ended."""

    def ended(future: Any) -> None:
        # Others are those of a token that was released, and of an actor that was ended.
        if isinstance(future.exception(), OwnerDiedError):
            callback()

    token[0].future().add_done_callback(ended)


def _close_inherited() -> None:
    """Close the connection to the raylet in a process that was forked from one that uses Ray.

    Ray notices the death of a process by the end of that connection. A forked process cannot use
    Ray. The descriptor's number stays in use, since Ray may still write to it at the exit.
    """
    default, collecting = socket.getdefaulttimeout(), gc.isenabled()
    # To free a reference of Ray's may wait for a lock that another thread had at the fork.
    gc.disable()
    # Otherwise a socket object would make what this process shares with its parent non-blocking.
    socket.setdefaulttimeout(None)
    with suppress(OSError):
        for entry in list(Path("/proc/self/fd").iterdir()):
            if _is_raylet(int(entry.name)):
                with Path(os.devnull).open("r+b", buffering=0) as null:
                    os.dup2(null.fileno(), int(entry.name), inheritable=False)
    socket.setdefaulttimeout(default)
    if collecting:
        gc.enable()


def _is_raylet(descriptor: int) -> bool:
    """Return whether a descriptor is a connection to a raylet, by the path of its socket."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return False  # another kind of file
    try:
        name = connection.getpeername() if connection.family == socket.AF_UNIX else None
    except OSError:
        return False  # not connected
    finally:
        connection.detach()
    return isinstance(name, str) and Path(name).name.startswith("raylet")


os.register_at_fork(after_in_child=_close_inherited)
