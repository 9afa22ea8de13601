"""Collects in a thread of its own, into a replay buffer, while the trainer learns."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sync_core.collector.delivery import Delivery


class Background:
    """A thread that makes batch after batch until it is halted; then it brings in what is left.

    Args:
        delivery: takes the batches.
    """

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._halted = threading.Event()
        self._abandoned = threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether batches are being made in the background."""
        return self._thread is not None and self._thread.is_alive()

    def check(self, *, idle: bool = False) -> None:
        """Raise what went wrong in the background, once.

        Args:
            idle: raise also if it runs.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
        if idle and self.running:
            raise RuntimeError(
                "the collector runs in the background; iterate within `with collector.pause():`, "
                "or do not start() it"
            )

    def start(self) -> None:
        """Begin, unless it runs.

        Raises:
            RuntimeError: there is no replay buffer.
        """
        self.check()
        self._delivery.output.check_buffer()
        if self.running:
            return
        self._halted.clear()
        self._thread = threading.Thread(target=self._run, name="sync-core-collect", daemon=True)
        self._thread.start()

    @contextmanager
    def paused(self, timeout: float) -> Iterator[None]:
        """Come to rest with nothing under way, and go on afterwards; nothing if it does not run.

        Raises:
            TimeoutError: it did not come to rest in time; it still will.
        """
        if not self.running:
            self.check()
            yield
            return
        self._halted.set()
        self._join(timeout)
        if self.running:
            raise TimeoutError(
                f"the batches under way were not in the replay buffer within {timeout:g} s; type "
                "pause(timeout=…) to wait for longer, or give the collector fewer frames_per_batch"
            )
        self.check()
        try:
            yield
        finally:
            if not self._abandoned.is_set():
                self.start()

    def abandon(self) -> None:
        """Make no more batches; those under way are lost."""
        self._abandoned.set()
        self._halted.set()

    def end(self, timeout: float) -> None:
        """Wait for the thread, which was abandoned and whose workers have ended.

        Raises what went wrong in the background before that, unless another error is on its way.
        """
        # A worker that fails ends the collector from within the thread itself.
        if self._thread is not threading.current_thread():
            self._join(timeout)
            if sys.exc_info()[0] is None:
                self.check()

    def _join(self, timeout: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while not self._halted.is_set() and self._delivery.collect_one():
                pass
            while not self._abandoned.is_set() and self._delivery.collect_rest():
                pass
        except BaseException as error:  # the trainer's next call raises it again
            self._error = error
