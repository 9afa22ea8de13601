"""Detect the end of processes in a cluster through Ray, without polling."""

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

    The result of a call belongs to the calling process. When that process ends, Ray fails the
    result for all that wait for it, within milliseconds.
    """

    async def waits(self) -> None:
        """Never return."""
        await asyncio.Event().wait()


def start(actor_class: type, *args: Any) -> Any:
    """Start an asynchronous actor on the sender's node, so that both fail together.

    Args:
        actor_class: its class.
        args: the class's arguments.
    """
    node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor: Any = ray.remote(actor_class)
    options = actor.options(num_cpus=0, scheduling_strategy=node, max_concurrency=10_000)
    return options.remote(*args)


def make_token(actor: Any) -> list[Any]:
    """Return a token of this process, for `on_end` in another process.

    Args:
        actor: a `LivenessActor`.
    """
    # In a list, since Ray would replace a bare reference by its value.
    return [actor.waits.remote()]


def release(token: list[Any]) -> None:
    """Release a token, in the process that made it."""
    # The sender may already have ended its actor.
    with suppress(RayError):
        ray.cancel(token[0])


def on_end(token: list[Any], callback: Callable[[], None]) -> None:
    """Call a function, on one of Ray's threads, when the process that made a token has ended."""

    def ended(future: Any) -> None:
        # Other errors mean that the token was released or that the actor was ended.
        if isinstance(future.exception(), OwnerDiedError):
            callback()

    token[0].future().add_done_callback(ended)


def _close_inherited() -> None:
    """Close the connection to the raylet in a process forked from one that uses Ray.

    The raylet notices the death of a process by the end of this connection, so a forked child,
    which cannot use Ray anyway, must close it. The descriptor's number stays in use, since Ray may
    write to it at exit.
    """
    default, collecting = socket.getdefaulttimeout(), gc.isenabled()
    # Freeing a Ray reference could wait for a lock that another thread held at the fork.
    gc.disable()
    # With a default timeout, a socket object would make the shared descriptor non-blocking for the
    # parent too.
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
    """Return whether a descriptor is a raylet connection, judged by its socket's path."""
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
