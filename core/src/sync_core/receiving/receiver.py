"""The worker's side: receives versions of the weights and commits them to a model."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Any, NoReturn, Self

from torch import Tensor

from sync_core import registry
from sync_core._util import Exclusive, clock_id, uninterrupted
from sync_core.address import Address, IndirectEndpoint
from sync_core.checks import check_count, check_function, check_seconds
from sync_core.errors import AddressError, ClosedError, PayloadError, SenderLostError, SyncError
from sync_core.models.lookup import same
from sync_core.receiving.target import LentPayload, Target
from sync_core.registry import Plugin
from sync_core.stack import Defaults, Load, PluginStack
from sync_core.transports.transport import Answer, ReceiverTransport
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
        self._on_arrival: Callable[[], object] = _nothing
        self._first_version = check_count(version, "version", least=0)
        self._version, self._refused = self._first_version, 0
        self._staged: Payload | None = None
        # The transport that brought what came last, which alone is answered about it.
        self._asked: ReceiverTransport | None = None
        # Another model was registered while a thread commits, which then connects once more.
        self._replaced = False
        # The finalizers of connections that were replaced.
        self._outdated: list[weakref.finalize[..., Any]] = []
        self._extras: Mapping[str, Tensor] = {}
        self._load_began = self._load_ended = 0.0
        self._closed = False
        self._process = os.getpid()
        # No other thread may close what a thread waits for.
        self._exclusive = Exclusive()
        # Held for shorter: another thread may ask for a snapshot while one waits for a version.
        self._writing = Exclusive()
        self._background = background
        self._reasons: list[str] = []
        self._make_target = partial(Target, context=context, load=load, consolidate=consolidate)
        self._loads = load is not None
        # The argument of a scheme's `resolve`, for each model.
        self._given = address
        self._connect(*self._resolve(model))

    @property
    def version(self) -> int:
        """The version that the model has; 0 before the first commit."""
        return self._version

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
        return self._extras

    @property
    def delivered(self) -> int:
        """The number under which the transport brought what the model has.

        It is `version`, but under a scheme that wraps another: see `ReceiverTransport.delivered`.
        It is 0 where a string reference leads to another module than the one that has `version`.
        """
        if self._target.model_was_replaced():
            return 0
        return self._transport.delivered(self._version)

    @property
    def worker_id(self) -> int:
        """The id of this worker, which the sender has chosen where workers share an address."""
        return self._address.worker_id

    @property
    def refused(self) -> int:
        """The last version that arrived and was refused, as the sender knows; or 0."""
        return self._refused

    @property
    def model_id(self) -> str:
        """The model's name."""
        return self._address.model_id

    def register_model(self, model: Any) -> None:
        """Say what the weights are committed to; see the argument ``model``.

        Where that is another model than before, `version` is 0, this worker is no longer current
        for the sender, and the newest version comes again.

        Raises:
            LayoutMismatchError: the model does not fit the sender's; the one before stays.
            SenderLostError: the sender is gone.
        """
        before = self._target.model
        if before is None or same(model, before):
            self._target.register(model)
            return
        self._check_open()
        address, model = self._resolve(model)
        with self._writing.lock:
            self._target.register(model)
            self._address, self._version, self._replaced = address, 0, True
            if self._exclusive.acquire(0):
                try:
                    self._connect_anew()
                    self._leave_outdated()
                finally:
                    self._exclusive.release()
            elif self._exclusive.waiting:
                outdated = self._transport
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
        if self._staged is not None:
            self.reject(SyncError("a newer version was asked for before this one was committed"))
        self._replaced |= self._target.model_was_replaced()
        self._target.loaded = False
        self._next(deadline)
        while self._staged is not None and not self._accepts(self._staged):
            self._next(deadline)
        if self._staged is None:
            self._check_open()
            return None
        return self._staged.version

    def _accepts(self, payload: Payload) -> bool:
        """Return whether a payload is newer than the model, and brings all that the model lacks."""
        if payload.version <= self._version:
            self._staged = None
            payload.release()
            if payload.version == self._version > self._first_version:
                # It has joined again: the sender cannot know that this worker has it.
                self._answer(Answer(version=payload.version))
            elif payload.version <= self._first_version:
                error = SyncError(
                    f"version {payload.version} is not beyond version {self._first_version}, which "
                    "the model had when the receiver was made; type Sender(…, version="
                    f"{self._first_version}) in a trainer that was started again, or "
                    "Receiver(…, version=0) to accept any version"
                )
                self._answer(Answer.refusal(payload.version, error))
            return False
        try:
            check_base(payload, self._version)
        except PayloadError as error:
            self.reject(error)
        return self._staged is not None

    @property
    def staged(self) -> int:
        """The version that is staged, or else the one that the model has."""
        return self._version if self._staged is None else self._staged.version

    def load(self) -> None:
        """Write what is staged into the model; to be followed by `confirm` or `reject`."""
        with self._writing.lock:
            if self._staged is not None:
                self._load_began = time.perf_counter()
                self._target.write(self._staged, self._version)
                self._load_ended = time.perf_counter()

    def reject(self, error: BaseException) -> None:
        """Drop what is staged, and tell the sender why."""
        payload, self._staged = self._staged, None
        if payload is None:
            return
        self._refused = payload.version
        bad, loaded = self._target.take_damage(), self._target.loaded
        answer = Answer.refusal(payload.version, error, loaded=loaded, bad=bad)
        if answer.model_state == "bad":
            self._version = 0
        elif answer.model_state == "new":
            self._version = payload.version
            self._extras = of_user(self._target.extras)
        self._target.refused(payload)
        self._answer(answer)

    def confirm(self) -> int:
        """Make what was loaded the model's version, and tell the sender so."""
        payload = self._staged
        if payload is None:
            return self._version
        try:
            with uninterrupted():
                self._version, self._staged = payload.version, None
                self._extras = of_user(self._target.extras)
                self._target.committed(payload)
            if self._on_commit is not None:
                self._on_commit(payload.version)
        except BaseException as error:
            if self._staged is not None:
                raise  # by Ctrl-C, before it was confirmed: it is still to be rejected
            answer = Answer.refusal(payload.version, error, loaded=True)
            if answer.model_state == "bad":
                self._version = 0
            self._answer(answer)
            raise
        now = time.perf_counter()
        self._answer(
            Answer(
                version=payload.version,
                stage_seconds=payload.stage_seconds,
                commit_seconds=self._load_ended - self._load_began,
                pause_seconds=now - self._load_began,
                known_at=payload.known_at,
                answered_at=now,
                clock=None if payload.known_at is None else clock_id(),
            )
        )
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
        prepared = self._transport.prepare(weights)
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
        told = self._transport.on_arrival(partial(_tell, weakref.ref(self)))
        if not told:
            self._on_arrival = _nothing
        return told

    def close(self) -> None:
        """Leave the sender. The model keeps what it has, in its own memory.

        Where another thread waits in `receive`, that raises `ClosedError` at once.
        """
        self._close("closed its receiver")

    def _close(self, reason: str) -> None:
        self._closed = True
        self._reasons.append(reason)
        with self._exclusive.last(self._transport.wake):
            if self._staged is not None:
                self._staged.release()
                self._staged = None
            self._leave_outdated()
            self._leave()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Receiver stays in the process that made it; pickle the address that it was given, "
            "and make another one there: Receiver(address, model)"
        )

    def __repr__(self) -> str:
        state = "closed, " if self._closed else ""
        scheme = registry.find(registry.SCHEMES, self._address.scheme).name
        return (
            f"<Receiver {scheme!r} of {self.model_id!r}: {state}worker_id={self.worker_id}, "
            f"version={self._version}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        cause = "" if error is None else f" after {_describe(error)}"
        self._close(f"closed its receiver{cause}")

    def _resolve(self, model: Any) -> tuple[Address, Any]:
        """Return the address to connect to, and what is written, as the scheme adapts both."""
        address = self._given
        resolve = getattr(registry.find(registry.SCHEMES, address.scheme).object, "resolve", None)
        if resolve is None:
            return address, model
        address, found = resolve(address, None if self._loads else model, self._timeout)
        return address, model if self._loads else found

    def _connect(self, address: Address, model: Any) -> None:
        """Make the ends of an address: what reads it, and what writes into the model."""
        self._address = address
        timeout = self._timeout
        backend = registry.find(registry.SCHEMES, address.scheme)
        try:
            self._target: Target = self._make_target(address, backend)
            if model is not None:
                self._target.register(model)
        except Exception as error:
            _refuse(address, backend, timeout, error)
            raise
        self._transport: ReceiverTransport = self._target.stack.create_receiver_transport(
            address.transport_context(backend.name, timeout, background=self._background)
        )
        self._leave = weakref.finalize(
            self, _leave, self._transport, self._target.lease, self._reasons, self._process
        )
        self._leave.atexit = False
        if self._on_arrival is not _nothing:
            self.on_arrival(self._on_arrival)

    def _connect_anew(self) -> None:
        """Connect once more, as a worker that has no version: its model is another one.

        The connection before ends after that, so that the sender does not count this worker as
        lost.
        """
        leave = self._leave
        self._connect(self._address, self._target.model)
        self._outdated.append(leave)
        self._version, self._replaced = 0, False
        if self._staged is not None:
            # It comes again, for the other model.
            self._staged.release()
            self._staged = None

    def _leave_outdated(self) -> None:
        while self._outdated:
            self._outdated.pop()()

    def _join_again(self, lost: SenderLostError, deadline: float) -> None:
        """Have the sender admit this worker once more; else close, and raise how it was lost."""
        before = self.worker_id
        try:
            if self._shared is None:
                raise lost
            seconds = min(self._timeout, max(deadline - time.monotonic(), _JOINING))
            address = self._shared.endpoint.resolve(self._shared, seconds)
            self._reasons.append("joins again")
            self._leave()
            self._reasons.clear()
            model, found = self._target.model, self._target.found
            self._given = address
            self._connect(address, model)
            # So that another model at the end of a reference is noticed.
            self._target.found = found
        except SyncError as error:
            self.close()
            raise lost from (None if error is lost else error)
        _log.warning("worker %d joins again as worker %d: %s", before, self.worker_id, lost)
        if self._closed:
            # By another thread, meanwhile.
            self._leave()
            raise ClosedError(_IS_CLOSED) from lost

    def _next(self, deadline: float) -> None:
        """Keep the next version as what is staged, if one comes in time."""
        while True:
            try:
                self._wait(deadline)
            except SenderLostError as error:
                if self._closed:
                    raise ClosedError(_IS_CLOSED) from error
                # Unless another model was registered meanwhile, and its transport is there.
                if self._replaced or self._asked is self._transport:
                    self._join_again(error, deadline)
                continue
            if self._asked is self._transport:
                return

    def _wait(self, deadline: float) -> None:
        with self._writing.lock:
            if self._replaced:
                self._connect_anew()
            self._asked = self._transport
            self._exclusive.waiting = True
        if self._outdated:
            self._leave_outdated()
        try:
            # Kept at once: after Ctrl-C it is rejected, and its memory is given back. Memory that a
            # transport allocates may become that of parameters, or of later versions.
            self._staged = outside_inference_mode(
                self._asked.receive, max(0.0, deadline - time.monotonic())
            )
        finally:
            with self._writing.lock:
                self._exclusive.waiting = False

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

    def _answer(self, answer: Answer) -> None:
        if self._replaced:
            with self._writing.lock:
                self._connect_anew()
        if self._asked is not self._transport:
            return  # another model has come meanwhile, for which the version comes again
        try:
            self._transport.acknowledge(answer)
        except SenderLostError:
            return  # it needs no answer; the next receive() says that it has gone


def _refuse(address: Address, backend: Plugin, timeout: float, error: Exception) -> None:
    """Connect only to let the sender know, at once, why this worker cannot receive."""
    stack = PluginStack(Defaults(address.strategy), backend)
    context = address.transport_context(backend.name, timeout)
    # The caller gets the reason, and not that the sender could not be reached.
    with suppress(Exception), closing(stack.create_receiver_transport(context)) as transport:
        payload = transport.receive(0.0)
        if payload is not None:
            payload.release()
            transport.acknowledge(Answer.refusal(payload.version, error))
        transport.leave(f"refused to receive: {_describe(error)}")


def _nothing() -> None:
    return


def _tell(reference: weakref.ref[Receiver]) -> None:
    receiver = reference()
    if receiver is None:
        return
    try:
        receiver._on_arrival()
    except Exception:
        _log.exception("the on_arrival callback of a receiver raised an error")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _leave(
    transport: ReceiverTransport, lease: LentPayload, reasons: list[str], process: int
) -> None:
    lease.end()
    try:
        # Not for a process that was forked from the receiver's.
        if os.getpid() == process:
            transport.leave(reasons[0] if reasons else "dropped its receiver without closing it")
    finally:
        transport.close()
