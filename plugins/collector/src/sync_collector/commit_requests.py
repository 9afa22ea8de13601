"""Lets workers commit what was sent to them: those at rest look for it only when asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from sync_collector.collector_worker import Host
from sync_collector.worker_pool import Crew
from sync_core import PendingSend, WorkerError

# How long a worker at rest waits for weights that come later than the call that announces them.
_PATIENCE = 0.1
# How long a worker that commits by itself is given to, in seconds, before it is asked as well.
_UNASKED = 0.02
# How often the driver looks whether a worker has to be asked again.
_GLANCE = 0.002


class Prompts:
    """Asks the workers of one send after the other.

    Args:
        crew: the workers.
        busy: whether a worker is at work on a batch.
    """

    def __init__(self, crew: Crew, busy: Callable[[int], bool]) -> None:
        self._crew = crew
        self._busy = busy
        self._calls: dict[int, Future[bool]] = {}
        # The workers that commit what comes while they rest, and until when those that do so now
        # are not asked.
        self._attentive: set[int] = set()
        self._unasked: dict[int, float] = {}

    def learn(self, worker_id: int, *, attentive: bool) -> None:
        """Know of a worker whether it commits what comes while it rests; see `Host.connect`."""
        (self._attentive.add if attentive else self._attentive.discard)(worker_id)

    def begin(self, pending: PendingSend, *, all_workers: bool) -> None:
        """Ask the workers at rest that do not commit by themselves.

        Or all, where nobody may be there to ask the others later.
        """
        unanswered = pending.unanswered
        at_rest = {i for i in unanswered if not self._busy(i)}
        until = time.monotonic() + _UNASKED
        self._unasked = {} if all_workers else dict.fromkeys(at_rest & self._attentive, until)
        asked = unanswered if all_workers else at_rest - self._attentive
        self._calls = {i: self._ask(i, pending) for i in asked}

    def leave_out(self) -> None:
        """Ask nobody: what workers are asked for next says that they need what was sent."""
        self._calls, self._unasked = {}, {}

    def see_through(self, pending: PendingSend, timeout: float) -> None:
        """Wait until every worker has answered, or so many seconds are over.

        A worker in the middle of a batch commits between two steps; one at rest when it is asked.
        """
        deadline = time.monotonic() + timeout
        while (unanswered := pending.unanswered) and time.monotonic() < deadline:
            for worker_id, delivery in unanswered.items():
                call = self._calls.get(worker_id)
                if call is None:
                    unasked_until = self._unasked.get(worker_id, 0.0)
                    if not self._busy(worker_id) and time.monotonic() >= unasked_until:
                        self._calls[worker_id] = self._ask(worker_id, pending)
                    continue
                if not call.done():
                    continue
                error = call.exception()
                if error is None:
                    if not call.result():
                        self._calls[worker_id] = self._ask(worker_id, pending)
                # What the worker itself has to say may still be on its way, and says more.
                elif isinstance(error, WorkerError) and not delivery.wait(_PATIENCE):
                    delivery.fail(error)
            # The one that was offered its version last is likely to answer last.
            unanswered[max(unanswered)].wait(_GLANCE)

    def _ask(self, worker_id: int, pending: PendingSend) -> Future[bool]:
        """Let a worker commit now if it is at rest; if not, as soon as its batch is made.

        It will have done so before that, but for weights that came with its last step.
        """
        patience = 0.0 if self._busy(worker_id) else _PATIENCE
        return self._crew.request(worker_id, Host.reach, pending.sent_version, patience)
