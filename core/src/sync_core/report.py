"""The report of a send, and plugins that receive each report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, Literal

from sync_core.errors import SyncError

_version_of = attrgetter("version")

#: Why a send does not wait for a worker: it is in quarantine, is being restarted, or joins.
Unwaited = Literal["quarantine", "restart", "join"]


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """The result of one send for one worker.

    Args:
        version: the version that the worker acknowledged in this send, or None.
        seconds: from the call to the acknowledgement (or to the failure).
        nbytes: bytes delivered.
        stage_seconds: of these, what its transport took to get the version, once it knew of it,
            as the worker measured; 0 where that is nothing, or is not measured.
        commit_seconds: what loading it into the model took, as the worker measured.
        deliver_seconds: from when the send was published until the worker's transport knew of the
            version: until it asked for it. None where the worker's clock is not known
            to be the sender's, as on another host.
        acknowledge_seconds: from the worker's answer until it was here. Where ``deliver_seconds``
            is None, they cannot be separated, and this is all the time after the send
            was published: what of it was neither staging nor commit.
        pause_seconds: how long the version held up the thread in the worker that called
            `receive`, from when it was there until it was answered for, as the worker measured.
        error: why the worker does not have the new version, or None.
        skipped: True when a `skip_update` hook held this worker back; that is not an error.
        remedy: what was done about a worker that failed, or was done before and still holds: it
            was dropped, it is in quarantine, or another is started in its place. The send did not
            wait for the last two if they were so before it began. ``"join"`` is that of a worker
            that has joined and has committed nothing yet, for which no send waits.
        returned: True when the worker has come back from quarantine: it has committed the newest
            version since the last report.
        base: the version on which the increment that brought this one builds; 0 where it came
            whole.
        changed: the share of the version's elements that travelled: 1 where it came whole.

    A worker's times are 0 where the scheme brings no answers back, and where it failed.

    Where ``deliver_seconds`` is known, prepare, publish, deliver, stage, pause and acknowledge
    follow each other. They add up to less than ``seconds`` where a version that was staged waited
    for `receive`, and to more where a worker began to stage while the rest was being published.
    """

    version: int | None
    seconds: float
    nbytes: int
    error: SyncError | None = None
    skipped: bool = False
    remedy: Literal["drop"] | Unwaited | None = None
    returned: bool = False
    stage_seconds: float = 0.0
    commit_seconds: float = 0.0
    deliver_seconds: float | None = None
    acknowledge_seconds: float = 0.0
    pause_seconds: float = 0.0
    base: int = 0
    changed: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON; ``error`` is its message."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"error": None if self.error is None else str(self.error)}


@dataclass(frozen=True, slots=True)
class SendReport:
    """The result of one send.

    Args:
        version: the version sent; the newest one before it when no worker was sent it.
        seconds: from the call to its end.
        workers: a result for each worker that was addressed, by id.
        scheme: the name of the scheme.
        model_id: the model's name.
        prepare_seconds: of these, until it was known what to send: the model was read, and the
            layers had changed it.
        publish_seconds: until the transport's `send` returned: the weights were packed, and
            published or on their way. The trainer may change them from then on.
        pack_seconds: what copying the weights into the memory that they travel in took. It is part
            of ``publish_seconds``, but where a scheme sends the first parts while it packs the
            others it may be longer. 0 where nothing is packed.
        unchanged: whether the weights are, byte for byte, those of the last version that was
            compared. None where that is not known: of the first version; of a send that was not to
            all workers; of weights that are not in the CPU's memory when they leave; where sampled
            bytes are equal for the first time since they changed, as all bytes are compared from
            the next send on; and, once weights have changed 8 times in succession, of a send
            within 10 ms after the last one.
        equals: an older version, not the last one, whose weights are the same, as far as a sample
            of 4 KB tells; 0 where none is known.
        no_worker_left: True where ``on_failure`` has dropped the last worker in this send, which
            raises `SendError` then.
    """

    version: int
    seconds: float
    workers: Mapping[int, WorkerResult]
    scheme: str = ""
    model_id: str = ""
    prepare_seconds: float = 0.0
    publish_seconds: float = 0.0
    pack_seconds: float = 0.0
    unchanged: bool | None = None
    equals: int = 0
    no_worker_left: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes delivered to all workers together."""
        return sum(result.nbytes for result in self.workers.values())

    @property
    def complete(self) -> bool:
        """Return whether every addressed worker has committed the new version."""
        return {*map(_version_of, self.workers.values())} <= {self.version}

    @property
    def updated(self) -> tuple[int, ...]:
        """The workers that committed the new version."""
        return tuple(i for i, result in self.workers.items() if result.version == self.version)

    @property
    def skipped(self) -> tuple[int, ...]:
        """The workers that a `skip_update` hook held back."""
        return tuple(i for i, result in self.workers.items() if result.skipped)

    @property
    def failed(self) -> dict[int, WorkerResult]:
        """The workers that should have the new version and do not."""
        return {i: r for i, r in self.workers.items() if r.error is not None and r.remedy is None}

    @property
    def dropped(self) -> tuple[int, ...]:
        """The workers that failed and that the sender serves no longer."""
        return self._with_remedy("drop")

    @property
    def quarantined(self) -> tuple[int, ...]:
        """The workers that failed and that sends do not wait for; they get versions as before."""
        return self._with_remedy("quarantine")

    @property
    def restarted(self) -> tuple[int, ...]:
        """The workers that failed and in whose place others are started."""
        return self._with_remedy("restart")

    @property
    def joining(self) -> tuple[int, ...]:
        """The workers that joined and have committed nothing yet; no send waits for these."""
        return self._with_remedy("join")

    @property
    def returned(self) -> tuple[int, ...]:
        """The workers that have come back from quarantine since the last report."""
        return tuple(i for i, result in self.workers.items() if result.returned)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON; ``workers`` is a list, with ``worker_id``.

        Example:
            >>> report = SendReport(1, 0.5, {0: WorkerResult(1, 0.4, 40)}, scheme="shm")
            >>> report.as_dict()["workers"][0]["worker_id"]
            0
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        workers = [{"worker_id": i} | result.as_dict() for i, result in self.workers.items()]
        return values | {"workers": workers}

    def with_returned(self, worker_ids: Collection[int]) -> SendReport:
        """The same report, in which these workers have come back from quarantine."""
        workers = {i: replace(r, returned=i in worker_ids) for i, r in self.workers.items()}
        return replace(self, workers=workers)

    def _with_remedy(self, remedy: str) -> tuple[int, ...]:
        return tuple(i for i, result in self.workers.items() if result.remedy == remedy)


class Reporter(ABC):
    """A layer that is called with the report at the end of every send, as ``on_report`` is.

    It need not have any of the hooks. One without stays with its sender, and need not pickle.

    Example:
        >>> class Pauses(Reporter):
        ...     longest = 0.0
        ...     def __call__(self, report):
        ...         pauses = [result.pause_seconds for result in report.workers.values()]
        ...         self.longest = max([self.longest, *pauses])
        >>> with Sender("none", torch.nn.Linear(4, 2), num_workers=1, layers=[Pauses()]) as sender:
        ...     sender.send().updated
        (0,)
    """

    @abstractmethod
    def __call__(self, report: SendReport) -> object:
        """Take a report; what is raised is logged, and changes nothing."""
