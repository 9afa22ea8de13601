"""Collects on its own thread into a replay buffer while the trainer learns."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sync_collector.delivery import BatchDelivery
from sync_core import WorkerTimeoutError


class BackgroundCollection:
    """A thread that makes batches until it is stopped, then collects the batches under way.

    Args:
        delivery: takes the batches.
        look: called before each batch.
    """

    def __init__(self, delivery: BatchDelivery, look: Callable[[], object]) -> None:
        self._delivery = delivery
        self._look = look
        self._lock = threading.RLock()
        # Whether batches are wanted, and whether the thread makes them. The thread decides under
        # the lock to end, so that no wake-up is lost.
        self._wanted = self._runs = False
        # The number of pauses. The last one to end resumes the thread, unless an error has ended
        # it.
        self._pauses = 0
        self._goes_on = True
        self._abandoned = False
        self._ended = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Return whether the thread is collecting."""
        return self._runs

    def check(self, *, idle: bool = False) -> None:
        """Raise the error of the thread, once.

        Args:
            idle: raise also if the thread runs.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
        if idle and self.running and not self._abandoned:
            raise RuntimeError(
                "the collector runs in the background; iterate within `with collector.pause():`, "
                "or do not start() it"
            )

    def start(self) -> None:
        """Start the thread, unless it runs.

        Raises:
            RuntimeError: there is no replay buffer, or workers are updated automatically.
        """
        self.check()
        self._delivery.check_background()
        self._begin()

    @contextmanager
    def paused(self, timeout: float) -> Iterator[None]:
        """For ``with``: the thread has no batch under way, if it runs; it continues afterwards.

        Raises:
            TimeoutError: it did not stop in time, and continues.
        """
        with self._lock:
            idle = not self._runs and not self._pauses
            if not idle:
                self._pauses += 1
                self._wanted = False
        if idle:
            self.check()
            yield
            return
        try:
            self._join(timeout)
            if self.running:
                raise TimeoutError(
                    f"the batches under way were not in the replay buffer within {timeout:g} s; "
                    "type pause(timeout=…) to wait for longer, or give the collector fewer "
                    "frames_per_batch"
                )
            self.check()
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                if not self._pauses and self._goes_on:
                    self._begin()

    def abandon(self) -> None:
        """Make no more batches; batches under way are lost."""
        self._abandoned = True
        with self._lock:
            self._wanted = False

    def end(self, timeout: float) -> None:
        """Wait for the thread to end, after `abandon` and after its workers have ended; once.

        Raises the thread's earlier error, unless another error is being raised.
        """
        # A worker's failure ends the collector from within this thread.
        if not self._ended and self._thread is not threading.current_thread():
            self._ended = True
            self._join(timeout)
            if sys.exc_info()[0] is None:
                self.check()

    def _join(self, timeout: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def _begin(self) -> None:
        with self._lock:
            self._wanted = not self._abandoned
            if self._wanted and not self._runs:
                self._runs = self._goes_on = True
                self._thread = threading.Thread(
                    target=self._run, name="sync-core-collect", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        more = True
        while more:
            try:
                more = self._make()
            except BaseException as error:  # the trainer's next call raises it again
                self._error = error
                # A late batch does not end the thread; any other error does.
                self._goes_on = isinstance(error, WorkerTimeoutError)
                more = False
            with self._lock:
                more = self._runs = more and self._wanted

    def _make(self) -> bool:
        """Make batches while they are wanted; return whether more may follow."""
        more = True
        while self._wanted and more:
            self._look()
            more = self._took(self._delivery.collect_one)
        while not self._abandoned and self._took(self._delivery.collect_rest):
            pass
        return more

    def _took(self, take: Callable[[], bool]) -> bool:
        """Take a batch. If it is late, keep waiting; the trainer's next call reports it."""
        try:
            return take()
        except WorkerTimeoutError as error:
            self._error = error
            return True
