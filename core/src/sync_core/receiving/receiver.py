"""The worker's side: receives versions of the weights and commits them to a model."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, Self

from torch import Tensor

from sync_core import registry
from sync_core._util import Exclusive, clock_id, uninterrupted
from sync_core.address import Address, IndirectEndpoint
from sync_core.checks import check_count, check_function, check_seconds
from sync_core.errors import AddressError, ClosedError, PayloadError, SenderLostError, SyncError
from sync_core.models.lookup import same
from sync_core.receiving.connection import Connection, refuse
from sync_core.receiving.target import Target
from sync_core.stack import Load
from sync_core.transports.transport import Answer
from sync_core.updater import Updated
from sync_core.weights.copying import outside_inference_mode
from sync_core.weights.extras import check_base, of_user
from sync_core.weights.payload import Payload

_log = logging.getLogger("sync_core")
_IS_CLOSED = "the receiver is closed"
# The least time in which a worker that was removed joins again, in seconds; an estimate.
_JOINING = 5.0


class Receiver(Updated):
    """Receives the weights of one model in one worker.

    Args:
        address: what `Sender.address` gave for this worker.
        model: what the weights are committed to: a module, a TensorDict or a state_dict, all
            written in place; a string such as ``"env.value_net"``, looked up in ``context`` at
            every commit; a mapping from names to such models, all of which are committed or
            none; or, for a scheme that loads weights itself, whatever it loads into. None for a
            model that is registered later.
        context: the object in which string references are looked up.
        timeout: deadline of blocking calls, in seconds; None for the sender's.
        background: with a scheme whose weights take time to come, receive them in a thread,
            which only stages the newest version; `receive` commits it, in the thread that calls.
        on_commit: called with every version that was committed, before the sender learns that
            it was, and when `extras` are its own; should it raise, that is reported instead. It is
            for workers that pass weights on, and acknowledge them once they have arrived.
        load: the worker's own way of loading, such as an engine's ``load_weights``: a function of
            an iterable of names and tensors, which are good only during the call. It is called
            once a version is staged whole, and layers have checked it and undone what
            they do. ``model`` may be left out then, and is not compared with the sender's. Should
            the function raise, the model may hold parts of the version: the sender counts the
            worker as bad, and sends it a whole version next. So it does where the function
            returns what shows that tensors were left out: a set, list or tuple of the names it
            took, as ``load_weights`` of vLLM's models does, or what `load_state_dict` returns,
            with ``unexpected_keys``. Names are compared only if all that it returned were sent:
            an engine with fused tensors returns names of its own. An empty set says that none
            was taken. Tied tensors count under any of their names; frequencies of rotary
            embeddings (``inv_freq``), and buffers of ``model`` that are not persistent, may be
            left out. None, and whatever else it returns, says nothing.
        consolidate: whether the first version of a megabyte or more may move a module's tensors
            into one block of memory, in which later versions take one copy: a half to a third of
            the time. Say True only where nothing reads the tensors by their addresses, as
            compiled code and engines may. Memory that was not allocated by torch, or that
            something else holds, stays where it is.
        version: the version that the model has already, such as that of a checkpoint. A sender
            whose count is not beyond it, as after a restart without `Sender(version=…)`, is
            refused, and learns why.

    Raises:
        AddressError: not an address, or one that cannot be reached from here.
        LayoutMismatchError: the model does not fit the sender's; names, dtypes and shapes of
            both are in the message.
        ModelError: the model is lazy, empty, or cannot be written to.
        SenderLostError: the sender is gone.
    """

    def __init__(
        self,
        address: Address,
        model: Any = None,
        *,
        context: Any = None,
        timeout: float | None = None,
        background: bool = False,
        on_commit: Callable[[int], object] | None = None,
        load: Load | None = None,
        consolidate: bool = False,
        version: int = 0,
    ) -> None:
        if not isinstance(address, Address):
            # Of the type alone: a text may be an address with its token.
            raise AddressError(
                f"address must be an Address, got a {type(address).__name__}; type "
                "sender.address(worker_id), or Address.from_json(text)"
            )
        if on_commit is not None:
            check_function(on_commit, "on_commit")
        if load is not None:
            check_function(load, "load")
        timeout = address.timeout if timeout is None else check_seconds(timeout)
        # With this address a removed worker joins again.
        self._shared: Address | None = None
        if isinstance(address.endpoint, IndirectEndpoint):
            self._shared = address
            address = address.endpoint.resolve(address, timeout)
        self._timeout = timeout
        self._on_commit = on_commit
        self._on_arrival: Callable[[], object] | None = None
        self._first_version = check_count(version, "version", least=0)
        self._refused = 0
        # Connections that were replaced, and end once no thread waits in them.
        self._outdated: list[Connection] = []
        # Why it was closed; empty while it is open.
        self._closed = ""
        self._process = os.getpid()
        # No other thread may close what a thread waits for.
        self._exclusive = Exclusive()
        # Held for shorter: another thread may ask for a snapshot while one waits for a version.
        self._writing = Exclusive()
        self._background = background
        self._make_target = partial(Target, context=context, load=load, consolidate=consolidate)
        self._loads = load is not None
        # The argument of a scheme's `resolve`, for each model.
        self._given = address
        self._connect(self._target_for(*self._resolve(model)), self._first_version)

    @property
    def version(self) -> int:
        """The version that the model has; 0 before the first commit."""
        connection = self._connection
        return connection.version if connection.successor is None else 0

    @property
    def extras(self) -> Mapping[str, Tensor]:
        """The extras of the version that the model has: what `Sender.send` was given as ``extras``.

        ``on_commit`` and what follows `receive` read those of the version just committed; a layer
        reads ``update.extras``.

        Example:
            >>> import sync_core
            >>> model, copy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
            >>> with sync_core.Sender("thread", model, num_workers=1) as sender:
            ...     receiver = Receiver(sender.address(0), copy)
            ...     pending = sender.send_async(extras={"temperature": torch.tensor(0.7)})
            ...     receiver.receive(), receiver.extras
            (1, {'temperature': tensor(0.7000)})
        """
        connection = self._connection
        return connection.extras if connection.successor is None else {}

    @property
    def delivered(self) -> int:
        """The number under which the transport brought what the model has.

        It is `version`, but under a scheme that wraps another: see `ReceiverTransport.delivered`.
        It is 0 where a string reference leads to another module than the one that has `version`.
        """
        connection = self._connection
        if connection.target.model_was_replaced():
            return 0
        return connection.transport.delivered(self.version)

    @property
    def worker_id(self) -> int:
        """The id of this worker, which the sender has chosen where workers share an address."""
        return self._target.address.worker_id

    @property
    def refused(self) -> int:
        """The last version that arrived and was refused, as the sender knows; or 0."""
        return self._refused

    @property
    def model_id(self) -> str:
        """The model's name."""
        return self._target.address.model_id

    def register_model(self, model: Any) -> None:
        """Say what the weights are committed to; see the argument ``model``.

        Where that is another model than before, `version` is 0, this worker is no longer current
        for the sender, and the newest version comes again.

        Raises:
            LayoutMismatchError: the model does not fit the sender's; the one before stays.
            SenderLostError: the sender is gone.
        """
        target = self._target
        if target.model is None or same(model, target.model):
            target.register(model)
            return
        self._check_open()
        target = self._make_target(*self._resolve(model))
        with self._writing.lock:
            self._connection.successor = target
            if self._exclusive.acquire(0):
                try:
                    self._connect_anew()
                    self._end_outdated()
                finally:
                    self._exclusive.release()
            elif self._exclusive.waiting:
                outdated = self._connection.transport
                self._connect_anew()
                outdated.wake()

    def receive(self, timeout: float | None = None) -> int | None:
        """Commit the newest version, if there is one that the model does not have.

        Args:
            timeout: seconds to wait for one; 0 looks and returns; None for the receiver's own
                deadline.

        Returns:
            The version committed, or None when there was no newer one in time.

        Raises:
            SenderLostError: the sender has closed or died; the model keeps its version.
            ClosedError: the receiver is closed, or another thread closes it meanwhile.
            SyncError: the weights could not be committed. The model keeps its version, unless
                it was a layer or ``on_commit`` that raised after they were loaded: see `version`.
                The sender learns which.
        """
        deadline = time.monotonic() + (self._timeout if timeout is None else check_seconds(timeout))
        if not self._exclusive.acquire(deadline - time.monotonic()):
            return None
        try:
            if self._stage(deadline) is None:
                return None
            try:
                self.load()
                return self.confirm()
            except BaseException as error:
                self.reject(error)
                raise
        finally:
            self._exclusive.release()

    def stage(self, timeout: float | None = None) -> int | None:
        """Fetch what `receive` would commit, and keep it; see `sync_plugin_std.receive_together`.

        A version that was staged before is dropped: a sender may wait for its answer.

        Returns:
            The version that is staged now, or None when there was no newer one in time.
        """
        deadline = time.monotonic() + (self._timeout if timeout is None else check_seconds(timeout))
        if not self._exclusive.acquire(deadline - time.monotonic()):
            return None
        try:
            return self._stage(deadline)
        finally:
            self._exclusive.release()

    def _stage(self, deadline: float) -> int | None:
        self._check_open()
        if self._connection.staged is not None:
            self.reject(SyncError("a newer version was asked for before this one was committed"))
        connection = self._connection
        if connection.successor is None and connection.target.model_was_replaced():
            with self._writing.lock:
                target = self._target
                connection.successor = self._make_target(target.address, target.model)
        connection.target.defaults.loaded = False
        payload = self._next(deadline)
        while payload is not None and not self._accepts(payload):
            payload = self._next(deadline)
        if payload is None:
            self._check_open()
            return None
        return payload.version

    def _accepts(self, payload: Payload) -> bool:
        """Return whether a payload is newer than the model, and brings all that the model lacks."""
        connection = self._connection
        if payload.version <= connection.version:
            connection.staged = None
            payload.release()
            if payload.version == connection.version > self._first_version:
                # It has joined again: the sender cannot know that this worker has it.
                self._answer(connection, Answer(version=payload.version))
            elif payload.version <= self._first_version:
                error = SyncError(
                    f"version {payload.version} is not beyond version {self._first_version}, which "
                    "the model had when the receiver was made; type Sender(…, version="
                    f"{self._first_version}) in a trainer that was started again, or "
                    "Receiver(…, version=0) to accept any version"
                )
                self._answer(connection, Answer.refusal(payload.version, error))
            return False
        try:
            check_base(payload, connection.version)
        except PayloadError as error:
            self.reject(error)
        return connection.staged is not None

    @property
    def staged(self) -> int:
        """The version that is staged, or else the one that the model has."""
        payload = self._connection.staged
        return self.version if payload is None else payload.version

    def load(self) -> None:
        """Write what is staged into the model; to be followed by `confirm` or `reject`."""
        connection = self._connection
        with self._writing.lock:
            if connection.staged is not None:
                connection.load_began = time.perf_counter()
                connection.target.write(connection.staged, connection.version)
                connection.load_ended = time.perf_counter()

    def reject(self, error: BaseException) -> None:
        """Drop what is staged, and tell the sender why."""
        connection = self._connection
        payload, connection.staged = connection.staged, None
        if payload is None:
            return
        self._refused, target = payload.version, connection.target
        bad, loaded = target.take_damage(), target.defaults.loaded
        answer = Answer.refusal(payload.version, error, loaded=loaded, bad=bad)
        if answer.model_state == "bad":
            connection.version = 0
        elif answer.model_state == "new":
            connection.version = payload.version
            connection.extras = of_user(target.extras)
        target.refused(payload)
        self._answer(connection, answer)

    def confirm(self) -> int:
        """Make what was loaded the model's version, and tell the sender so."""
        connection = self._connection
        payload, target = connection.staged, connection.target
        if payload is None:
            return self.version
        try:
            with uninterrupted():
                connection.version, connection.staged = payload.version, None
                connection.extras = of_user(target.extras)
                target.committed(payload)
            if self._on_commit is not None:
                self._on_commit(payload.version)
        except BaseException as error:
            if connection.staged is not None:
                raise  # by Ctrl-C, before it was confirmed: it is still to be rejected
            answer = Answer.refusal(payload.version, error, loaded=True)
            if answer.model_state == "bad":
                connection.version = 0
            self._answer(connection, answer)
            raise
        now = time.perf_counter()
        answer = Answer(
            version=payload.version,
            stage_seconds=payload.stage_seconds,
            commit_seconds=connection.load_ended - connection.load_began,
            pause_seconds=now - connection.load_began,
            known_at=payload.known_at,
            answered_at=now,
            clock=None if payload.known_at is None else clock_id(),
        )
        self._answer(connection, answer)
        return payload.version

    def snapshot(self) -> Mapping[str, Tensor] | None:
        """A copy of the model's weights; None where the scheme alone knows how to load them."""
        with self._writing.lock:
            return self._target.snapshot()

    def apply_weights(self, weights: Any) -> None:
        """Commit weights given by hand; the version stays what it is.

        Args:
            weights: a module, a TensorDict, a state_dict, or a mapping from names to these.

        Raises:
            LayoutMismatchError: they do not fit the model; nothing was written.
        """
        prepared = self._connection.transport.prepare(weights)
        with self._writing.lock:
            self._target.write_by_hand(weights, prepared)

    def on_arrival(self, callback: Callable[[], object]) -> bool:
        """Have a function called whenever a version may have come, from now on.

        It is called in a thread of the scheme's, at any time. It is for workers that know whether
        the model is in use, and call `receive` with a timeout of 0 if it is not.

        Args:
            callback: what is called; what it raises is logged.

        Returns:
            Whether the scheme does that here; where it does not, only `receive` finds out.
        """
        check_function(callback, "callback")
        self._on_arrival = callback
        # A weak reference: a receiver that its owner forgets leaves its sender.
        told = self._connection.transport.on_arrival(partial(_tell, weakref.ref(self)))
        if not told:
            self._on_arrival = None
        return told

    def close(self) -> None:
        """Leave the sender. The model keeps what it has, in its own memory.

        Where another thread waits in `receive`, that raises `ClosedError` at once.
        """
        self._close("closed its receiver")

    def _close(self, reason: str) -> None:
        self._closed = self._closed or reason
        with self._exclusive.last(self._connection.transport.wake):
            self._end_outdated()
            self._connection.end(self._closed)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Receiver stays in the process that made it; pickle the address that it was given, "
            "and make another one there: Receiver(address, model)"
        )

    def __repr__(self) -> str:
        state = "closed, " if self._closed else ""
        scheme = registry.find(registry.SCHEMES, self._target.address.scheme).name
        return (
            f"<Receiver {scheme!r} of {self.model_id!r}: {state}worker_id={self.worker_id}, "
            f"version={self.version}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        cause = "" if error is None else f" after {type(error).__name__}: {error}"
        self._close(f"closed its receiver{cause}")

    @property
    def _target(self) -> Target:
        """The target of the model that was registered last."""
        connection = self._connection
        return connection.successor or connection.target

    def _resolve(self, model: Any) -> tuple[Address, Any]:
        """Return the address to connect to, and what is written, as the scheme adapts both."""
        address = self._given
        resolve = getattr(registry.find(registry.SCHEMES, address.scheme).object, "resolve", None)
        if resolve is None:
            return address, model
        address, found = resolve(address, None if self._loads else model, self._timeout)
        return address, model if self._loads else found

    def _target_for(self, address: Address, model: Any) -> Target:
        """Return what writes into a model; if it cannot, the sender learns that at once."""
        try:
            return self._make_target(address, model)
        except Exception as error:
            refuse(address, self._timeout, error)
            raise

    def _connect(
        self, target: Target, version: int = 0, extras: Mapping[str, Tensor] | None = None
    ) -> None:
        """Connect to the sender, as a worker whose model has a version already, or 0."""
        self._connection = Connection(
            self, target, self._timeout, version, extras or {}, background=self._background
        )
        if self._on_arrival is not None:
            self.on_arrival(self._on_arrival)

    def _connect_anew(self) -> None:
        """Connect once more, as a worker that has no version, if its model is another one.

        The connection before ends after that, so that the sender does not count this worker as
        lost.
        """
        before = self._connection
        if before.successor is not None:
            self._connect(before.successor)
            self._outdated.append(before)

    def _end_outdated(self) -> None:
        while self._outdated:
            self._outdated.pop().end(self._closed or "was given another model")

    def _join_again(self, lost: SenderLostError, deadline: float) -> None:
        """Have the sender admit this worker once more; else close, and raise how it was lost."""
        left = self.worker_id
        try:
            if self._shared is None:
                raise lost
            seconds = min(self._timeout, max(deadline - time.monotonic(), _JOINING))
            self._given = self._shared.endpoint.resolve(self._shared, seconds)
            self._connection.end("joins again")
            with self._writing.lock:
                before = self._target
                target = self._target_for(self._given, before.model)
                # So that another model at the end of a reference is noticed.
                target.found = before.found
                self._connect(target, self.version, self.extras)
        except SyncError as error:
            self.close()
            raise lost from (None if error is lost else error)
        _log.warning("worker %d joins again as worker %d: %s", left, self.worker_id, lost)
        if self._closed:
            # By another thread, meanwhile.
            self._connection.end(self._closed)
            raise ClosedError(_IS_CLOSED) from lost

    def _next(self, deadline: float) -> Payload | None:
        """Stage the next version, if one comes in time, and return it."""
        while True:
            connection = self._connection
            try:
                with self._writing.lock:
                    if connection.successor is not None:
                        self._connect_anew()
                    connection = self._connection
                    self._exclusive.waiting = True
                if self._outdated:
                    self._end_outdated()
                try:
                    # Kept at once: after Ctrl-C it is rejected, and its memory is given back.
                    # Memory that a transport allocates may become that of parameters, or of later
                    # versions.
                    connection.staged = outside_inference_mode(
                        connection.transport.receive, max(0.0, deadline - time.monotonic())
                    )
                finally:
                    with self._writing.lock:
                        self._exclusive.waiting = False
            except SenderLostError as error:
                if self._closed:
                    raise ClosedError(_IS_CLOSED) from error
                # Unless another model was registered meanwhile, and its connection is there.
                if connection is self._connection:
                    self._join_again(error, deadline)
                continue
            if connection is self._connection:
                return connection.staged

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(_IS_CLOSED)
        if os.getpid() != self._process:
            # It would take versions that are meant for the receiver in the other process.
            raise ClosedError(
                f"this Receiver belongs to process {self._process}, from which this one (process "
                f"{os.getpid()}) was forked; give this process another address before it is "
                "forked, and make the Receiver here: Receiver(address, model)"
            )

    def _answer(self, connection: Connection, answer: Answer) -> None:
        """Answer about what a connection brought, unless another model has come meanwhile.

        For that one, the version comes again.
        """
        if connection.successor is not None:
            with self._writing.lock:
                self._connect_anew()
            return
        with suppress(SenderLostError):  # it needs no answer; the next receive() says so
            connection.transport.acknowledge(answer)


def _tell(reference: weakref.ref[Receiver]) -> None:
    receiver = reference()
    try:
        if receiver is not None and receiver._on_arrival is not None:
            receiver._on_arrival()
    except Exception:
        _log.exception("the on_arrival callback of a receiver raised an error")
