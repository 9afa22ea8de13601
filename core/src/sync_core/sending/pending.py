"""A send that was started: its deliveries, its deadline, its report; and the log of sends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Protocol

from sync_core._util import Stopwatch, clock_id
from sync_core.checks import check_seconds
from sync_core.errors import SendError, TransportError, WorkerError, WorkerTimeoutError
from sync_core.report import SendReport, Unwaited, WorkerResult
from sync_core.transports.transport import Answer, Delivery, wait_for_each

_logger = logging.getLogger("sync_core")
_error_of = attrgetter("error")
# How long a send waits for workers that join, in seconds: the answer to an earlier version may be
# on its way. An estimate: ray's takes up to 0.25 s, those of others some milliseconds.
_JOINING = 0.25


def tell(report: SendReport, reporters: Iterable[Callable[[SendReport], object]]) -> None:
    """Log a send that has ended, and call the reporters.

    The level is INFO when it succeeded, WARNING when a worker failed.
    """
    errors = [*filter(None, map(_error_of, report.workers.values()))]
    level = logging.WARNING if errors else logging.INFO
    if _logger.isEnabledFor(level):
        _log_send(report, level, [str(error).partition("\n")[0] for error in errors])
    for reporter in reporters:
        try:
            reporter(report)
        except Exception:
            _logger.exception("%r raised about the report of version %d", reporter, report.version)


def _log_send(report: SendReport, level: int, failures: Sequence[str]) -> None:
    """Log the result of a send.

    The same values are attributes of the record, each with ``sync_`` before its name. Of phases
    that each worker has, it is the longest; ``deliver_seconds`` is left out where no worker's clock
    is known to be this one.
    """
    values = _fields(report)
    text = " ".join(f"{name}={_written(value)}" for name, value in values.items())
    if failures:
        text += f" errors={'; '.join(failures)!r}"
    extra = {f"sync_{name}": value for name, value in values.items()}
    _logger.log(level, "send %s", text, extra=extra | {"sync_errors": failures})


def _fields(report: SendReport) -> dict[str, str | int | float]:
    """A report as single values."""
    workers = report.workers.values()
    delivered = [r.deliver_seconds for r in workers if r.deliver_seconds is not None]
    return {
        "scheme": report.scheme,
        "model_id": report.model_id,
        "version": report.version,
        "workers": len(workers),
        "updated": len(report.updated),
        "skipped": len(report.skipped),
        "failed": len(report.failed),
        "dropped": len(report.dropped),
        "quarantined": len(report.quarantined),
        "restarted": len(report.restarted),
        "joining": len(report.joining),
        "nbytes": report.nbytes,
        "seconds": report.seconds,
        "prepare_seconds": report.prepare_seconds,
        "publish_seconds": report.publish_seconds,
        "pack_seconds": report.pack_seconds,
        **({"deliver_seconds": max(delivered)} if delivered else {}),
        "stage_seconds": max((r.stage_seconds for r in workers), default=0.0),
        "commit_seconds": max((r.commit_seconds for r in workers), default=0.0),
        "acknowledge_seconds": max((r.acknowledge_seconds for r in workers), default=0.0),
        "pause_seconds": max((r.pause_seconds for r in workers), default=0.0),
    }


def _written(value: str | float) -> str:
    return f"{value:.6f}" if isinstance(value, float) else str(value)


class Finish(Protocol):
    """A callback at the end of a send."""

    def __call__(self, report: SendReport, *, waited: bool) -> SendReport: ...


class PendingSend:
    """A send that was started and not yet waited for.

    Args:
        version: the version sent.
        deliveries: one for each worker.
        skipped: the workers that a hook held back.
        started: when the send was called (`time.perf_counter`).
        timeout: seconds after ``offered`` by which every worker must have answered.
        finish: called once with the report before it is returned or raised, and with whether
            the workers were given the time that they had.
        offered: when all of the version was on its way to the workers; None for ``started``.
        wait: waits until deliveries have ended, or seconds are over.
        unwaited: workers that get the version, and are not waited for; and why.
        prepare_seconds: see `SendReport`.
        publish_seconds: see `SendReport`.
        packing: how long packing took so far.
        scheme: the name of the scheme, for the report.
        model_id: the model's name, for the report.
    """

    def __init__(
        self,
        version: int,
        deliveries: Mapping[int, Delivery],
        skipped: Sequence[int],
        *,
        started: float,
        timeout: float,
        finish: Finish,
        offered: float | None = None,
        wait: Callable[[Sequence[Delivery], float], None] = wait_for_each,
        unwaited: Mapping[int, Unwaited] = MappingProxyType({}),
        prepare_seconds: float = 0.0,
        publish_seconds: float = 0.0,
        packing: Stopwatch | None = None,
        scheme: str = "",
        model_id: str = "",
    ) -> None:
        self.version = version
        self._deliveries = deliveries
        self._waited = deliveries
        if unwaited:
            self._waited = {i: d for i, d in deliveries.items() if i not in unwaited}
        self._skipped = skipped
        self._unwaited = unwaited
        self._started = started
        # The time that the trainer took before is not charged to the workers.
        self._offered = started if offered is None else offered
        self._timeout = timeout
        self._wait = wait
        self._finish = finish
        self._prepare_seconds = prepare_seconds
        self._publish_seconds = publish_seconds
        self._packing = packing or Stopwatch()
        self._scheme, self._model_id = scheme, model_id
        #: See `SendReport`; which the sender sets.
        self.unchanged: bool | None = None
        self.equals = 0
        self._report: SendReport | None = None
        # The callbacks at the end may ask for the report.
        self._ending = threading.RLock()

    @property
    def ended(self) -> bool:
        """Return whether the send was waited for, or given up."""
        return self._report is not None

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The workers of this send."""
        return tuple(self._deliveries)

    @property
    def deliveries(self) -> Mapping[int, Delivery]:
        """The delivery to each worker of this send, for what drives workers to answer it."""
        return MappingProxyType(dict(self._deliveries))

    @property
    def unwaited(self) -> Mapping[int, Unwaited]:
        """The workers of this send that are not waited for; and why."""
        return self._unwaited

    @property
    def nbytes(self) -> int:
        """Return how much each of them gets, in bytes."""
        return max((delivery.nbytes for delivery in self._deliveries.values()), default=0)

    @property
    def undelivered(self) -> bool:
        """Return whether the transport raised, so that the version went to no worker."""
        for delivery in self._deliveries.values():
            if isinstance(delivery.error, TransportError):
                return True
        return False

    @property
    def unanswered(self) -> Mapping[int, Delivery]:
        """The deliveries waited for, by worker, that have not ended."""
        return {i: d for i, d in self._waited.items() if not d.wait(0)}

    def done(self) -> bool:
        """Return whether every worker has answered, or the send was waited for already."""
        return self.ended or all(d.wait(0) for d in self._waited.values())

    def wait(self, timeout: float | None = None) -> SendReport:
        """Wait until every worker has committed the version, and end the send.

        A worker that has not answered by then counts as failed; should it answer later, that is
        not taken for an answer to another send. Waiting again gives the same outcome. Ctrl-C ends
        the send, so that the next one works.

        Args:
            timeout: seconds from now; None for what is left of the send's own deadline, which
                began when the version was offered to the workers.

        Raises:
            SendError: some workers failed, the others have the version; or ``on_failure`` has
                dropped the last worker.
        """
        seconds = None if timeout is None else check_seconds(timeout)
        try:
            if self._report is None:
                limit = self._offered + self._timeout
                if seconds is not None:
                    limit = time.perf_counter() + seconds
                waited = tuple(self._waited.values())
                self._wait(waited, max(0.0, limit - time.perf_counter()))
                for delivery in waited:
                    # A transport may see the end before the worker's state is noted.
                    if delivery.ended and not delivery.told:
                        delivery.wait(max(0.0, limit - time.perf_counter()))
                if "join" in self._unwaited.values():
                    joining = [
                        self._deliveries[i] for i, r in self._unwaited.items() if r == "join"
                    ]
                    limit = min(limit, self._offered + _JOINING)
                    self._wait(joining, max(0.0, limit - time.perf_counter()))
            report = self._end(waited=True)
        except BaseException as interrupt:
            self.interrupt(interrupt)
            raise
        if not report.complete and (report.failed or report.no_worker_left):
            causes = [result.error.__cause__ for result in report.workers.values() if result.error]
            error = SendError(report)
            error.__cause__ = next(filter(None, causes), None)
            raise error
        return report

    def wait_for(self, deliveries: Sequence[Delivery], seconds: float) -> None:
        """Wait until some deliveries of this send have ended, or seconds are over."""
        self._wait(deliveries, seconds)

    def abandon(self, reason: str | None = None) -> None:
        """End the send now; a worker that has not answered counts as failed, but is not dropped.

        Args:
            reason: why, for the report; None where the workers are late.
        """
        self._end(waited=False, reason=reason)

    def interrupt(self, error: BaseException) -> None:
        """End the send now, since an exception interrupted it; see `abandon`."""
        self.abandon(
            f"the send was interrupted by {type(error).__name__} before the worker confirmed "
            f"version {self.version}"
        )

    def end(self, *, waited: bool) -> SendReport:
        """End the send now, and return its report also where workers failed.

        Args:
            waited: whether workers had the time that they were given; only then does ``on_failure``
                decide about those that failed.
        """
        return self._end(waited=waited)

    def _end(self, *, waited: bool, reason: str | None = None) -> SendReport:
        with self._ending:
            if self._report is None:
                # Ended once, even if Ctrl-C comes during notifications.
                self._report = self._make_report(reason)
                self._report = self._finish(self._report, waited=waited)
            return self._report

    def _make_report(self, reason: str | None) -> SendReport:
        now = time.perf_counter()
        for worker_id, delivery in self._waited.items():
            if not delivery.ended:
                late = self._late(worker_id, delivery, now - self._offered)
                delivery.fail(WorkerError(worker_id, reason) if reason else late)
        results: dict[int, WorkerResult] = {}
        for worker_id, delivery in self._deliveries.items():
            results[worker_id] = self._result(delivery, now)
        for worker_id, remedy in self._unwaited.items():
            delivery = self._deliveries[worker_id]
            if delivery.error is not None or not delivery.wait(0):
                results[worker_id] = WorkerResult(None, 0.0, 0, delivery.error, remedy=remedy)
        for worker_id in self._skipped:
            results[worker_id] = WorkerResult(None, 0.0, 0, skipped=True)
        return SendReport(
            self.version,
            now - self._started,
            dict(sorted(results.items())),
            scheme=self._scheme,
            model_id=self._model_id,
            prepare_seconds=self._prepare_seconds,
            publish_seconds=self._publish_seconds,
            pack_seconds=self._packing.seconds,
            unchanged=self.unchanged,
            equals=self.equals,
        )

    def _late(self, worker_id: int, delivery: Delivery, seconds: float) -> WorkerTimeoutError:
        remark = f" ({delivery.remark})" if delivery.remark else ""
        return WorkerTimeoutError(
            worker_id,
            f"did not confirm version {self.version} within {seconds:.1f} s; is it alive, and does "
            f"it call receive() or, if the sender calls it, take calls in time?{remark}",
        )

    def _result(self, delivery: Delivery, now: float) -> WorkerResult:
        error = delivery.error
        ended = delivery.ended_at or now
        answer = delivery.answer or Answer(version=self.version)
        deliver, acknowledge = self._transit(answer, ended)
        return WorkerResult(
            version=None if error else self.version,
            seconds=ended - self._started,
            nbytes=0 if error else delivery.nbytes,
            error=error,
            stage_seconds=answer.stage_seconds,
            commit_seconds=answer.commit_seconds,
            deliver_seconds=deliver,
            acknowledge_seconds=acknowledge,
            pause_seconds=answer.pause_seconds,
            base=delivery.base,
            changed=delivery.changed,
        )

    def _transit(self, answer: Answer, ended: float) -> tuple[float | None, float]:
        """Return how long the version took to the worker, if that is known, and its answer back."""
        published = self._started + self._prepare_seconds + self._publish_seconds
        known, answered = answer.known_at, answer.answered_at
        # The order is looked at too: a virtual machine that was copied has the same clock by name.
        if (
            answer.clock is not None
            and answer.clock == clock_id()
            and known is not None
            and answered is not None
            and self._started <= known <= answered <= ended
        ):
            # A worker may begin before all of it is published.
            return max(0.0, known - published), ended - answered
        rest = ended - published - answer.stage_seconds - answer.commit_seconds
        return None, max(0.0, rest)
