"""The failure policy that restarts workers in the group that runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sync_core import Address, FailurePolicy, OptionError, Sender, WorkerFailure, WorkerGroup
from sync_core.checks import check_function


@dataclass(frozen=True, slots=True)
class Restart(FailurePolicy):
    """Restarts workers that fail: ``Sender(…, on_failure=Restart(group))``.

    Args:
        group: the worker group in which the workers run; worker ``i`` of the sender is its worker
            ``i``.
        on_restart: run in the worker started again, ``on_restart(hosted, address)``, to make its
            `Receiver`; None where the group's factory does.

    Raises:
        OptionError: ``group`` is not a worker group, or cannot restart its workers.

    Example:
        >>> import torch
        >>> from sync_core import Receiver, Sender
        >>> from sync_plugin_std.workers import ThreadGroup
        >>> class Worker:
        ...     def __init__(self, worker_id):
        ...         self.model = torch.nn.Linear(4, 2)
        ...
        ...     def connect(self, address):
        ...         self.receiver = Receiver(address, self.model)
        >>> policy = torch.nn.Linear(4, 2)
        >>> with ThreadGroup(Worker, 1) as group:
        ...     restart = Restart(group, Worker.connect)
        ...     with Sender("thread", policy, num_workers=1, on_failure=restart) as sender:
        ...         group.call(0, Worker.connect, sender.address(0)).result()
    """

    group: WorkerGroup
    on_restart: Callable[[Any, Address], object] | None = None

    def __post_init__(self) -> None:
        if self.on_restart is not None:
            check_function(self.on_restart, "on_restart")
        if not isinstance(self.group, WorkerGroup):
            raise OptionError(
                f"group={self.group!r} is not a worker group; give the one that runs the workers, "
                "such as sync_plugin_std.workers.ProcessGroup(…)"
            )
        if "restart" not in self.group.capabilities:
            raise OptionError(f"group={type(self.group).__name__} cannot restart its workers")

    def check(self, sender: Sender) -> None:
        """Refuse a sender that calls its workers, or that is one of several of a version."""
        if "joined" in sender.capabilities:
            raise OptionError(
                "every rank of a sharded trainer would start the worker again; leave Restart out, "
                "type on_failure='quarantine', and start the worker again with its joined address"
            )
        if sender.calls_workers:
            raise OptionError(
                "a worker that is started again has a new handle, so Restart is for workers that "
                "connect by their addresses; leave workers= out, or replace such a worker by "
                "sender.remove_worker(i) and sender.add_worker(i, worker=…)"
            )

    def __call__(self, failure: WorkerFailure) -> Callable[[], object]:
        """Return a function that restarts the worker."""
        return partial(self._restart, failure)

    def _restart(self, failure: WorkerFailure) -> None:
        self.group.restart(failure.worker_id)
        if self.on_restart is not None:
            address = failure.address()
            call = self.group.call(failure.worker_id, self.on_restart, address)
            call.result(address.timeout)
