"""Cases for schemes whose sender calls its workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest
from torch import Tensor

from sync_core import Sender, SendError, SendReport, WorkerState
from sync_plugin_std import select
from sync_testing.expectations import REPORT, VALUES
from sync_testing.schemes.delivery import DeliveryCases
from sync_testing.schemes.faults import FaultCases
from sync_testing.schemes.increments import IncrementCases
from sync_testing.schemes.models import fill, make_policy
from sync_testing.schemes.pool import SharedGroup, Start, Workers
from sync_testing.schemes.worker import Worker


class CalledWorkers(Workers):
    """Workers that commit when the sender calls them.

    Args:
        sender: the sender.
        pool: the pool.
        introduce: see `CalledSchemeConformance`.
        handles: the entries of ``workers`` that the sender was given.
    """

    def __init__(
        self,
        sender: Sender,
        pool: SharedGroup,
        introduce: Callable[[Worker], Any],
        handles: Iterable[Any],
    ) -> None:
        self._introduce = introduce
        self._handles = dict(enumerate(handles))
        self._seen: dict[int, int] = {}
        self._waiting = ThreadPoolExecutor()
        super().__init__(sender, pool)

    def connect(self, *worker_ids: int, make: Callable[[], Any] | None = None) -> None:
        """Let the sender call workers that were replaced."""
        assert make is None
        for worker_id in worker_ids:
            handle = self.pool.call(worker_id, self._introduce)
            if handle != self._handles[worker_id]:
                self._handles[worker_id] = handle
                self.sender.remove_worker(worker_id)
                self.sender.add_worker(worker_id, worker=handle)

    def submit(self, worker_id: int, timeout: float | None = None) -> Future[Any]:
        """Wait on a thread until the worker has the version that it was last called for."""
        return self._waiting.submit(self._arrived, worker_id, timeout or 20.0)

    def send(
        self,
        weights: Any = None,
        worker_ids: Iterable[int] | None = None,
        *,
        extras: Mapping[str, Tensor] | None = None,
    ) -> SendReport:
        """Send; the workers need to do nothing."""
        return self.sender.send(weights, worker_ids, extras=extras)

    def end(self) -> None:
        """Wait for the waiting threads to end."""
        self._waiting.shutdown()

    def _arrived(self, worker_id: int, timeout: float) -> int | None:
        deadline = time.monotonic() + timeout
        seen = self._seen.get(worker_id, 0)
        while time.monotonic() < deadline:
            status = self.sender.workers[worker_id]
            if seen < status.version == status.wanted:
                self._seen[worker_id] = status.version
                return status.version
            time.sleep(0.002)
        return None


class CalledSchemeConformance(DeliveryCases, FaultCases, IncrementCases):
    """Conformance tests of a scheme that calls its workers: inherit beside `SchemeConformance`.

    These are the cases of delivery, faults and increments for a sender with ``workers``. Cases in
    which a worker decides when to receive are skipped.

    Attributes:
        scheme: the name of an installed scheme, or a plugin object.
        options: options of the sender; its ``model_id`` must be the path to the ``model`` of the
            object that the worker group hosts.
        group: the name or the class of the worker group; None for the group that `Collector` uses
            for this scheme.

    Example:
        >>> class TestMyScheme(CalledSchemeConformance):  # doctest: +SKIP
        ...     scheme = "my_scheme"
        ...     options = {"model_id": "hosted.model"}
        ...     @staticmethod
        ...     def introduce(worker): return my_library.this_process()
    """

    called: ClassVar[bool] = True

    @staticmethod
    def introduce(worker: Any) -> Any:
        """Return the entry of ``workers`` for this worker; runs in the worker.

        Args:
            worker: the object that the group hosts; its attribute ``model`` is updated.

        Returns:
            The entry with which the sender calls this worker.
        """
        raise NotImplementedError

    @classmethod
    def serve(
        cls,
        ends: ExitStack,
        pool: SharedGroup,
        model: Any,
        num_workers: int,
        *,
        make: Callable[[], Any] | None,
        **options: Any,
    ) -> Workers:
        """Make a sender that calls the workers of the pool."""
        assert make is None
        handles = [pool.call(i, cls.introduce) for i in range(num_workers)]
        scheme = options.pop("scheme", cls.scheme)
        sender = Sender(scheme, model, workers=handles, **{**cls.options, **options})
        workers = CalledWorkers(sender, pool, cls.introduce, handles)
        ends.callback(workers.end)
        ends.enter_context(sender)
        return workers

    def test_a_model_that_was_replaced_gets_everything(self, start: Start) -> None:
        policy = make_policy(1.0)
        workers = start(policy, layers=[select("*")])
        workers.send()
        workers.pool.call(0, Worker.rebuild)
        fill(policy, 2.0)
        first, *rest = policy.named_parameters()
        with pytest.raises(SendError) as failure:
            workers.send(dict([first]))
        assert failure.value.report.updated == (1,), (
            "a model that has replaced another one holds nothing of the versions before"
        )
        assert workers.sender.workers[0].state is WorkerState.BEHIND, (
            "a worker must not be current where its model lacks anything"
        )
        assert workers.send(dict(rest)).updated == (0, 1), REPORT
        assert workers.values() == [{2.0}] * 2, VALUES
