"""The interface of transports: both sides, deliveries, answers and notices."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from sync_core.errors import (
    ApplyError,
    LoadError,
    ModelState,
    WorkerError,
    WorkerLostError,
    failure_named,
)
from sync_core.printable import printable

if TYPE_CHECKING:
    from sync_core.transports.roster import Publication, Roster
    from sync_core.weights.payload import Payload, Update

_log = logging.getLogger("sync_core")


@dataclass(frozen=True, slots=True)
class Notice:
    """News of a worker, for `TransportContext.notify`.

    A transport reports each of these once; the results of its deliveries are known without it.

    Args:
        kind: ``"connected"``, a receiver has taken the worker's place, and has no version yet;
            ``"lost"``, the worker is gone; ``"acknowledged"``, it has committed a version for
            which there is no delivery: the one that it got when it joined, or an old one.
        version: the version, where one was acknowledged.
        reason: one sentence, where the worker is lost.
    """

    kind: Literal["connected", "lost", "acknowledged"]
    version: int = 0
    reason: str = ""


def unheard(worker_id: int, notice: Notice) -> None:
    """Ignore the notice."""
    del worker_id, notice


_OUTCOMES: Mapping[ModelState, str] = {
    "kept": "could not apply version {}; it keeps the one it had",
    "new": "has version {}, and something raised after that was loaded",
    "bad": "could not apply version {}; its model is known bad",
}
_LONGEST_FAILURE = 64


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Answer:
    """A worker's answer about one version.

    A transport that sends messages carries `to_message`, and need not know what is in it.

    Args:
        version: the version.
        error: why it was not committed; None when it was.
        failure: the word for that error, of `WorkerError.failure`.
        model_state: what the model holds after that error; see `WorkerError.model_state`.
        stage_seconds: from the moment at which the worker's transport knew of the version to
            the one at which it had all of it; 0 where the transport does not measure that.
        commit_seconds: what loading it into the model took.
        pause_seconds: how long the thread that called `receive` was held after the version was
            there: loading, and what `Receiver` was given as ``on_commit``.
        known_at: when the worker's transport knew of the version, by the clock ``clock``.
        answered_at: when the worker answered, by the same clock.
        clock: which clock that is, by a name that the core gives it; None for one
            that is not known to be shared, and for a worker that reports no time.
        request: what the worker wants of a sharded sender, with an error: it has committed nothing.

    Example:
        >>> answer = Answer(version=3, commit_seconds=0.25)
        >>> Answer.from_message(answer.to_message()) == answer
        True
    """

    version: int
    error: str | None = None
    failure: str = ApplyError.failure
    model_state: ModelState = "kept"
    stage_seconds: float = 0.0
    commit_seconds: float = 0.0
    pause_seconds: float = 0.0
    known_at: float | None = None
    answered_at: float | None = None
    clock: str | None = None
    request: str | None = None

    @classmethod
    def refusal(
        cls, version: int, error: BaseException, *, loaded: bool = False, bad: bool = False
    ) -> Self:
        """The answer of a worker that could not commit a version because of ``error``.

        Args:
            version: the version.
            error: what was raised.
            loaded: whether the model has the version all the same.
            bad: whether the model may hold parts of the version.
        """
        kind = type(error) if isinstance(error, WorkerError) and error.failure else ApplyError
        if bad and kind.model_state != "bad":
            kind = LoadError
        state = kind.model_state
        if loaded and state == "kept":
            state = "new"
        text = f"{type(error).__name__}: {error}"
        if error.__traceback__ is not None or error.__cause__ is not None:
            # Logs show the first line.
            shown = "".join(traceback.format_exception(error)).rstrip()
            text = text.partition("\n")[0] + "\n" + shown
        return cls(version=version, error=printable(text), failure=kind.failure, model_state=state)

    def to_message(self) -> dict[str, Any]:
        """The answer as a mapping of numbers and strings, which JSON and pickle can hold."""
        message = {name: getattr(self, name) for name in _FITS}
        if self.error is not None:
            message["error"] = printable(self.error)
        return message

    @classmethod
    def from_message(cls, message: object) -> Self:
        """The answer that `to_message` made; what else a newer worker tells is left out.

        Raises:
            ValueError: it is invalid; the message names the wrong entry.
        """
        given = message if isinstance(message, Mapping) else {}
        values = {name: given[name] for name in _FITS if name in given}
        for name, value in {"version": None, **values}.items():
            if not _FITS[name](value):
                raise ValueError(f"an answer cannot have {name}={value!r:.80}")
        return cls(**values)

    def to_error(self, worker_id: int) -> WorkerError | None:
        """Return the error for the worker's result; None when the version was committed."""
        if self.error is None:
            return None
        outcome = _OUTCOMES[self.model_state].format(self.version)
        kind = failure_named(self.failure) or ApplyError
        error = kind(worker_id, f"{outcome}: {self.error}")
        error.model_state = self.model_state
        return error


# No version, and no number of seconds, is as large.
_BEYOND = 1 << 63


def _is_version(value: object) -> bool:
    return type(value) is int and 0 <= value < _BEYOND


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_failure(value: object) -> bool:
    # Also one of a plugin that only the worker has.
    return isinstance(value, str) and len(value) <= _LONGEST_FAILURE


def _is_state(value: object) -> bool:
    return isinstance(value, str) and value in _OUTCOMES


def _is_duration(value: object) -> bool:
    # Compared and not converted, as an integer may have more digits than any float.
    return type(value) in (int, float) and 0 <= value < _BEYOND  # type: ignore[operator]


def _is_moment(value: object) -> bool:
    return value is None or _is_duration(value)


# What each field of an answer may hold.
_FITS: Mapping[str, Callable[[object], bool]] = {
    "version": _is_version,
    "error": _is_text,
    "failure": _is_failure,
    "model_state": _is_state,
    "stage_seconds": _is_duration,
    "commit_seconds": _is_duration,
    "pause_seconds": _is_duration,
    "known_at": _is_moment,
    "answered_at": _is_moment,
    "clock": _is_text,
    "request": _is_text,
}


class Delivery:
    """One version on its way to one worker; it ends once, with an answer or an error.

    Args:
        worker_id: the worker.
        version: the version.
        nbytes: the size of what is delivered, in bytes.

    Attributes:
        base: the version that an increment builds on; 0 for a whole version.
        changed: the share of the version that it brings.

    Example:
        >>> delivery = Delivery(worker_id=0, version=3, nbytes=1024)
        >>> delivery.acknowledge()
        >>> delivery.wait(timeout=0), delivery.error
        (True, None)
    """

    def __init__(self, worker_id: int, version: int, nbytes: int) -> None:
        self.worker_id = worker_id
        self.version = version
        self.nbytes = nbytes
        self.base = 0
        self.changed = 1.0
        self.error: WorkerError | None = None
        self.answer: Answer | None = None
        #: Whether it has ended, and when (`time.perf_counter`).
        self.ended = False
        #: The last answer, also one that came after the end.
        self.latest: Answer | None = None
        self.ended_at: float | None = None
        #: Return a clause about a late worker, for the report.
        self.remark = ""
        #: Return whether the worker may have the version, or get it, once the delivery has failed;
        #: None where the transport does not know.
        self.may_be_held: Callable[[], bool] | None = None
        # Reentrant, as the garbage collector may close a receiver in a thread that holds it.
        self._lock = threading.RLock()
        # Taken until the watchers were called. Not an Event, whose methods are written in
        # Python: Ctrl-C inside of them would leave its lock taken, and whatever ends the delivery
        # would wait for ever.
        self._running = threading.Lock()
        self._running.acquire()
        #: Whether the watchers were called at the end.
        self.told = False
        self._watchers: tuple[Callable[[Delivery, WorkerError | None], None], ...] = ()
        #: Called at the end, after the watchers, by the thread that ends it, for a transport whose
        #: `SenderTransport.wait` does not wait for the deliveries one by one.
        self.on_end: Callable[[], None] | None = None

    def acknowledge(self, answer: Answer | None = None) -> None:
        """The worker has answered: it has committed the version, or says why it could not.

        Args:
            answer: what it said; None where the transport knows of the commit and no more.
        """
        error = None
        if answer is not None and answer.error is not None:
            error = answer.to_error(self.worker_id)
        self._end(error, answer)

    def settle(self, message: object) -> None:
        """The worker has answered by a message, which `Answer.to_message` made in it.

        A message that is not an answer breaks the protocol: the worker is lost.
        One about another version changes nothing.
        """
        try:
            answer = Answer.from_message(message)
        except ValueError as error:
            self.fail(WorkerLostError(self.worker_id, f"does not answer as agreed: {error}"))
            return
        if answer.version == self.version:
            self.acknowledge(answer)

    def fail(self, error: WorkerError) -> None:
        """The worker does not have the version, and will not get it by this delivery."""
        self._end(error, None)

    def wait(self, timeout: float | None) -> bool:
        """Wait until it has ended and its watchers were called, at most ``timeout`` seconds.

        Returns:
            Whether it has ended; its watchers may still be running where the timeout was over.
        """
        limit = -1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        if not self.told and self._running.acquire(timeout=limit):
            self._running.release()
        return self.ended

    def watch(self, watcher: Callable[[Delivery, WorkerError | None], None]) -> None:
        """Notify ``watcher`` of every outcome, also of one after the end, which changes nothing.

        Args:
            watcher: called with this delivery and the error, if any; it must not block, as
                `wait` returns only after it.
        """
        with self._lock:
            self._watchers = *self._watchers, watcher
            ended = self.ended
        if ended:
            watcher(self, self.error)

    def _end(self, error: WorkerError | None, answer: Answer | None) -> None:
        with self._lock:
            self.latest = answer or self.latest
            first = not self.ended
            if first:
                self.error, self.answer = error, answer
                self.ended_at = time.perf_counter()
                self.ended = True
            watchers = self._watchers
        try:
            for watcher in watchers:
                watcher(self, error)
        finally:
            if first:
                self.told = True
                self._running.release()
                if self.on_end is not None:
                    self.on_end()


def wait_for_each(deliveries: Sequence[Delivery], timeout: float) -> None:
    """Wait until these deliveries have ended, one after the other, at most ``timeout`` seconds."""
    limit = time.perf_counter() + timeout
    # The one that was offered its version last is likely to answer last: fewer wake-ups.
    for delivery in reversed(deliveries):
        delivery.wait(max(0.0, limit - time.perf_counter()))


class _Making(threading.local):
    """The transports that are being made by `closed_if_it_fails`, in this thread."""

    transports: list[SenderTransport] | None = None


_making = _Making()


class closed_if_it_fails:  # noqa: N801 - it is used as `contextlib.suppress` is
    """For ``with``: an exception, such as Ctrl-C, closes each transport that the block has made.

    Also one whose constructor had not returned, and no name had been given.
    """

    def __enter__(self) -> None:
        self._before, _making.transports = _making.transports, []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        made, _making.transports = _making.transports, self._before
        if error is None:
            return
        for transport in reversed(made or ()):
            # Its constructor may not have come to what is closed here.
            with suppress(Exception):
                transport.close()


def _forget_old(transport: SenderTransport, before: set[Publication]) -> None:
    for publication in before - transport.roster.owed():
        try:
            transport.forget(publication)
        except Exception as error:
            _log.warning("version %d could not be deleted: %r", publication.version, error)


class SenderTransport(ABC):
    """The sender's side of a transport; one serves all workers of a sender.

    A transport makes a `roster`, writes `address`, `publish`, `offer` and `close`, and reports to
    the roster what it hears. A transport with its own table of workers writes `send`, `add_worker`
    and `remove_worker` instead of `publish` and `offer`, and needs no roster.

    Methods are called by one thread at a time. A worker that joins late or comes back is given,
    without a further call of `send`, the newest version that was meant for it or for all.
    """

    #: Decides what each worker is owed: ``Roster(context.worker_ids, context.notify)``.
    roster: Roster

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Register the transport with an enclosing `closed_if_it_fails`."""
        del args, options
        transport = super().__new__(cls)
        if _making.transports is not None:
            _making.transports.append(transport)
        return transport

    @abstractmethod
    def address(self, worker_id: int) -> Any:
        """Return the endpoint by which a worker reaches this transport; it must pickle.

        Addresses have a JSON form too if it consists of strings, numbers, lists and dicts, or is
        an instance of a dataclass of such values that the scheme declares as ``endpoint_type``.
        An ``endpoint_type`` may be any type; receivers refuse an endpoint of another one.
        """

    def publish(self, payload: Payload) -> Publication:
        """Put a version once, and return when the payload's tensors, the trainer's, were read."""
        raise NotImplementedError(f"{type(self).__name__} defines neither publish nor send")

    def offer(self, publication: Publication, worker_ids: Sequence[int]) -> None:
        """Let workers know of a version, without waiting for them.

        These are the workers of a send that are owed it, also lost ones; or one that was added or
        has connected, perhaps in another thread.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither offer nor send")

    def forget(self, publication: Publication) -> None:  # noqa: B027 - memory needs no call
        """Delete a version that no worker is owed any more; `close` deletes what is left."""

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> Mapping[int, Delivery]:
        """Start delivering a version to some workers, without waiting for them.

        A worker that is known to be dead gets a failed delivery at once. Without workers, the
        version is for those that join later.
        """
        publication = self.publish(payload)
        before = self.roster.all_owed()
        deliveries = self.roster.publish(publication, worker_ids)
        try:
            self.offer(publication, [i for i in worker_ids if self.roster.wanted(i) is publication])
        except BaseException:
            self.roster.withdraw(publication, before)
            raise
        finally:
            _forget_old(self, {publication, *before.values()})
        return deliveries

    def wait(self, deliveries: Sequence[Delivery], timeout: float) -> None:
        """Wait until these deliveries of a `send` have ended, at most ``timeout`` seconds.

        Called by the thread that waits for a send, while others may call the other methods. A
        transport overrides it to read answers in that thread, so that no other has to run.
        """
        wait_for_each(deliveries, timeout)

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, whose handle is ``worker``, and offer it what went to all."""
        del worker
        owed = self.roster.add(worker_id)
        if owed is not None:
            self.offer(owed, [worker_id])

    def connected(self, worker_id: int, reader: object) -> bool:
        """Do as `Roster.connected`, and offer the version that the worker is owed."""
        known = self.roster.connected(worker_id, reader)
        if known and (owed := self.roster.wanted(worker_id)) is not None:
            self.offer(owed, [worker_id])
        return known

    def remove_worker(self, worker_id: int) -> None:
        """Stop serving a worker and forget it."""
        before = self.roster.owed()
        self.roster.remove(worker_id)
        _forget_old(self, before)

    @abstractmethod
    def close(self) -> None:
        """Release everything; receivers learn that the sender is gone. Closing again is allowed."""


class ReceiverTransport(ABC):
    """A receiver's side of a transport.

    Methods are called by one thread at a time; but while one is in `receive`, another may call
    `acknowledge`, `leave` or `wake`, or release a payload. A receiver that is given another model
    makes a second transport from the same endpoint, and closes the first one after that.
    """

    @abstractmethod
    def receive(self, timeout: float) -> Payload | None:
        """The newest version that this worker has not seen, or None when ``timeout`` is over.

        Args:
            timeout: seconds to wait for one; with 0 it answers at once.

        Raises:
            SenderLostError: the sender has closed or died.
        """

    @abstractmethod
    def acknowledge(self, answer: Answer) -> None:
        """Report the result of a version to the sender, for `Delivery.acknowledge`."""

    def wake(self) -> None:  # noqa: B027 - what does not wait need not be woken
        """Let `receive` return, or raise `SenderLostError`, soon: now, and whenever it is called.

        Called before `close` when another thread waits in the receiver.
        """

    def on_arrival(self, callback: Callable[[], None]) -> bool:
        """Have a function called whenever a version may have come, from now on.

        By a thread of the transport, which may wait for it, and while another is in `receive`. The
        function calls `receive` itself if it is a good moment, and raises nothing; otherwise
        another thread does so later, and has to find the version.

        Returns:
            Whether this transport does so; if it is False, as here, nothing
            knows without asking.
        """
        del callback
        return False

    def delivered(self, version: int) -> int:
        """Return the number under which the innermost transport brought the newest version.

        It is the version, but where a transport that wraps another numbers what that carries.

        Args:
            version: the version that the model has.
        """
        return version

    def prepare(self, weights: Any) -> Update | None:
        """Return weights that `Receiver.apply_weights` was given, as layers change them on the way.

        Returns:
            None, as here: layers take no part, and the weights are written as they are.
        """
        del weights
        return None

    def leave(self, reason: str) -> None:  # noqa: B027 - some senders need not be notified
        """Notify the sender that this receiver is about to close, and why; `close` follows.

        The sender then fails what this worker has not answered, and what is sent to it until
        another receiver connects, with this reason. Without it, a send waits for its deadline.

        Args:
            reason: a clause such as ``"closed its receiver"``.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. Closing again is allowed."""
