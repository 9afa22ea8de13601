"""The trainer's side: sends a model's weights to workers, as versions that only grow."""

from __future__ import annotations

import inspect
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial as bind
from typing import TYPE_CHECKING, Any, NoReturn, Self

from torch import Tensor

from sync_core._util import release_with, uninterrupted
from sync_core.address import Address
from sync_core.checks import check_count, check_function, check_seconds, normalize, normalize_one
from sync_core.errors import (
    ClosedError,
    OptionError,
    PausedError,
    PendingSendError,
    PrepareTimeoutError,
    SendError,
)
from sync_core.models.extract import Strategy
from sync_core.models.lookup import resolve
from sync_core.models.registered import check_allowed
from sync_core.report import SendReport, Unwaited
from sync_core.sending.arguments import (
    as_barrier,
    as_id,
    check_handle,
    count_workers,
    with_near_miss,
)
from sync_core.sending.membership import Membership, MembershipEvent
from sync_core.sending.pending import PendingSend, tell
from sync_core.sending.pipeline import Pipeline, Terms
from sync_core.sending.source import Source
from sync_core.sending.unchanged import Repeats, UnsentLog
from sync_core.sending.worker_state import WorkerStatus
from sync_core.stack import PushCounter
from sync_core.transports.roster import Roster
from sync_core.transports.transport import Delivery, SenderTransport
from sync_core.updater import Updater, either
from sync_core.weights.extras import Kinds, attached, checked, kinds_of
from sync_core.weights.layout import Layout
from sync_core.weights.payload import Payload, Update
from sync_core.weights.streamed import NOT_OFFERED, TensorStream, read_to_its_end

if TYPE_CHECKING:
    from sync_core.sending.failure_policy import FailureHandler, OnFailure

_log = logging.getLogger("sync_core")
# The trainer's side may take this long, in seconds, however short the deadline is: a deadline of
# 0.01 s is for workers, and a thread may lose its core for longer than that; estimate.
_LEAST = 0.1


class Sender(Updater):
    """Sends a model's weights to workers.

    Args:
        scheme: the name of an installed scheme, a plugin object, or a chain of schemes that wrap
            others, such as ``"increments::dist"`` or ``Increments("dist", below=0.5)``.
        model: what is sent when `send` is given nothing: a module, a TensorDict, a state_dict,
            a string such as ``"env.transform[0]"``, looked up in ``context`` at every send, or
            a mapping from names to such models, which are one version: all committed, or none.
            None means ``model_id`` in ``context``, or a model registered later. `gathered` and
            other `sync_core.models.ComputedWeights` are computed at every send. Names of tensors
            are without the prefixes of `torch.compile`, `DistributedDataParallel` and
            `DataParallel`, here and in the workers, so that a wrapped model fits a plain one.
        num_workers: how many workers there are; their ids are ``0 … num_workers - 1``. A scheme
            with the capability ``publishes`` needs none.
        workers: handles of the workers, for a scheme that calls into them; with some, such as
            ``"ray"``, also strings such as ``"env.transform[0]"``, looked up in ``context`` once.
        model_id: the model's name.
        context: the object in which string references are looked up.
        layers: names or objects of layers; each changes the update after the one before it, or
            is called with every report (`Reporter`).
        allow_unregistered: modules and tensors that ``model`` trains without registering them, such
            as a critic in a list, and that this sender leaves out: another sender sends them, or
            no worker uses them. Others are refused by name.
        before_read: a function that is called before ``model`` is read, such as one that gathers
            parameters which the next forward would gather; or a context manager, or a function
            that returns one, such as ``optimizer_weights(optimizer)`` of ``sync_plugin_std``: it is
            entered before the model is read, and left when the version was packed. A model whose
            forward pre-hooks may write its parameters is refused without one.
        strategy: how a module is read and written: ``"tensordict"``, its parameters and buffers;
            ``"state_dict"``, with the hooks of its `state_dict`; ``"checkpoint"``, its parameters
            and persistent buffers, under the names that checkpoints and engines have.
        zero_copy: let the workers' parameters be views of what arrives; they are read-only then,
            and after a write to one in place, where that is possible at all, `receive` raises.
        on_failure: what is done about a worker that failed, after the others were updated:
            ``"raise"`` a `SendError`; ``"drop"`` it, and raise where it is the last one;
            ``"quarantine"``, do not wait for it for a time that doubles, though it gets every
            version, until it has committed the newest; or a function of a `WorkerFailure`, or a
            `FailurePolicy`, which decides. ``Restart(group)`` of ``sync_plugin_std`` restarts it.
        on_report: called with the report at the end of every send, also where workers failed;
            what it raises is logged, and changes nothing.
        timeout: deadline of blocking calls, in seconds. A send has it twice: the weights must be
            ready by then, and workers must have committed them so long after they were offered.
        version: the version from which to count: the first send has the next one. A trainer that
            was started again gives the version that it had reached.
        **options: options of the scheme.

    Raises:
        PluginError: the scheme or a layer cannot be found or used.
        OptionError: an option that the scheme does not have.
        ModelError: the model is lazy, empty, or holds something that cannot travel.
        CapacityError: not enough memory for the model.

    Example:
        >>> policy, copy = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> with Sender("thread", policy, num_workers=1) as sender:
        ...     pending = sender.send_async()
        ...     version = Receiver(sender.address(0), copy).receive()
        ...     report = pending.wait()
        >>> version, report.updated, torch.equal(policy.weight, copy.weight)
        (1, (0,), True)
    """

    # Why sends are not allowed now; None where they are.
    _paused: str | None = None

    def __init__(
        self,
        scheme: Any,
        model: Any = None,
        *,
        num_workers: int | None = None,
        workers: Sequence[Any] | None = None,
        model_id: str = "policy",
        context: Any = None,
        layers: Sequence[Any] = (),
        allow_unregistered: Sequence[Any] = (),
        before_read: Any = None,
        strategy: Strategy = "tensordict",
        zero_copy: bool = False,
        on_failure: OnFailure = "raise",
        on_report: Callable[[SendReport], object] | None = None,
        timeout: float = 60.0,
        version: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        timeout = check_seconds(timeout)
        if on_report is not None:
            check_function(on_report, "on_report")
        check_allowed(allow_unregistered)
        self.model_id = model_id
        self._terms = Terms(
            scheme=scheme,
            layers=layers,
            options=options,
            model_id=model_id,
            strategy=strategy,
            zero_copy=zero_copy,
            timeout=timeout,
        )
        self._pipeline = Pipeline(self._terms)
        # Whether a version is for the first worker that comes, too, where there is none.
        self._publishes = "publishes" in self._pipeline.capabilities
        count = count_workers(num_workers, workers, publishes=self._publishes)
        self._members = Membership(range(count), timeout)
        self._handles = dict(enumerate(workers or ()))
        self._called = bool(workers)
        self._context = context
        self._failure_handler = None if on_failure == "raise" else _handler(on_failure)
        self._closers: list[weakref.finalize[..., Any]] = []
        reporters = (*self._pipeline.reporters, on_report)
        self._reporters = {object(): each for each in reporters if each is not None}
        self._barrier = as_barrier(before_read)
        self._source = Source(
            context,
            strategy,
            partial=self._pipeline.leaves_out,
            adapt=self._pipeline.adapt,
            # Workers that act with the same objects lack nothing.
            allowed=None if "same_object" in self.capabilities else allow_unregistered,
            hooked=before_read is not None,
        )
        self._cadence = PushCounter(self._pipeline.stack, model_id)
        self._repeats = Repeats()
        self._unsent = None if "same_object" in self.capabilities else UnsentLog()
        self._version = check_count(version, "version", least=0)
        # The number of a send that this rank of a trainer has failed to begin.
        self._failed = 0
        # Reentrant, as a layer may add a worker.
        self._starting = threading.RLock()
        # Reentrant, as above.
        self._changing = threading.RLock()
        self._pending: PendingSend | None = None
        # Whether others may bring workers, as a pool does; and the report of the send in which
        # the last worker was dropped, until there is another.
        self._has_companion = False
        self._dropped_last = False
        self._deserted: SendReport | None = None
        # A send is being started by the thread that has the lock, to which a signal may come.
        self._begins = False
        # The extras of the first send that had some.
        self._extras: Kinds | None = None
        self._close_members = release_with(self, self._members.close)
        self._settlers: dict[object, Callable[[SendReport], SendReport]] = {}
        self._closed = False
        # The thread that closes, or has closed, this sender.
        self._closer: int | None = None
        self._process = os.getpid()
        if model is None and context is not None:
            model = model_id
        try:
            if self._failure_handler is not None:
                self._failure_handler.check(self)
            if model is not None:
                self.register_model(model)
        except BaseException:
            self.close()
            raise

    def register_model(self, model: Any) -> None:
        """Say what is sent when `send` is given nothing; see the argument ``model``."""
        self._check_open()
        before, self._source.model = self._source.model, model
        try:
            with self._barrier():
                update = self._read()
                if self._pipeline.transport is None:
                    self._open(update, model)
        except BaseException:
            self._source.model = before
            raise

    @property
    def model(self) -> Any:
        """Return what is sent when `send` is given nothing; None where no model is known."""
        return self._source.model

    @property
    def version(self) -> int:
        """The newest version; before the first send, the one from which the sender counts."""
        return self._version

    def advance(self, version: int) -> None:
        """Count on from a version, such as one that reached the workers another way.

        Nothing is sent; the next send has the version after this one.

        Args:
            version: not less than the newest one.

        Raises:
            ValueError: it is less: versions only grow.
            PendingSendError: the same thread is starting a send.

        Example:
            >>> with Sender("none", torch.nn.Linear(4, 2), num_workers=1) as sender:
            ...     sender.advance(7)
            ...     sender.send().version
            8
        """
        version = check_count(version, "version", least=0)
        with self._starting:
            self._check_open()
            self._check_starts_nothing()
            if version < self._version:
                raise ValueError(
                    f"versions only grow: the sender is at version {self._version}, got {version}"
                )
            self._version = version

    @property
    def timeout(self) -> float:
        """The deadline of a send, in seconds, where the call names none."""
        return self._terms.timeout

    @property
    def scheme(self) -> str:
        """The name of the scheme."""
        return self._pipeline.scheme

    @property
    def capabilities(self) -> frozenset[str]:
        """The capabilities of the scheme."""
        return self._pipeline.capabilities

    @property
    def calls_workers(self) -> bool:
        """True if the sender calls its workers by handles; else they connect by their addresses."""
        return self._called

    def all_worker_ids(self) -> tuple[int, ...]:
        """The ids of the workers."""
        return self._members.ids

    @property
    def workers(self) -> Mapping[int, WorkerStatus]:
        """Return the status of each worker, by id."""
        return self._members.statuses

    def subscribe(self, callback: Callable[[MembershipEvent], object]) -> Callable[[], None]:
        """Subscribe to changes of workers' states.

        Args:
            callback: called with each event, in order, in a thread of the sender's and without
                locks; what it raises is logged.

        Returns:
            A function that ends the subscription.
        """
        check_function(callback, "callback")
        return self._members.subscribe(callback)

    def on_report(self, callback: Callable[[SendReport], object]) -> Callable[[], object]:
        """Call a function with the report at the end of every send, also where workers failed.

        Args:
            callback: called in the thread that ends the send; what it raises is logged.

        Returns:
            A function that ends the calls.
        """
        return self._register(self._reporters, callback)

    def on_close(self, callback: Callable[[], object]) -> Callable[[], object]:
        """Call a function once when the sender is closed or forgotten, or its process ends.

        Args:
            callback: called without arguments, before the transport closes. It must not keep the
                sender alive, and is called again where Ctrl-C interrupts it; what it raises is
                logged.

        Returns:
            A function that prevents the call.

        Example:
            >>> with Sender("none", torch.nn.Linear(4, 2), num_workers=1) as sender:
            ...     forget = sender.on_close(lambda: print("closed"))
            closed
        """
        check_function(callback, "callback")
        self._check_open()
        with uninterrupted():
            release = release_with(self, callback)
            self._closers = [*(each for each in self._closers if each.alive), release]
        if self._closed:
            release()  # another thread has closed the sender meanwhile
        return release.detach

    @contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """For ``with``: make each send an error while the model holds other weights.

        Args:
            reason: why, for the error.

        Example:
            >>> model = torch.nn.Linear(4, 2)
            >>> with Sender("none", model, num_workers=1) as sender:
            ...     with sender.paused("the reference is in the module"):
            ...         sender.send()
            Traceback (most recent call last):
            sync_core.errors.PausedError: no version is sent now: the reference is in the module
        """
        before, self._paused = self._paused, reason
        try:
            yield
        finally:
            self._paused = before

    def settle_failures(self, callback: Callable[[SendReport], SendReport]) -> Callable[[], object]:
        """Let a function act on workers that failed, before ``on_failure`` decides about them.

        Args:
            callback: called with the report of a send that some workers failed, or that has not
                waited for workers that join, in the thread that ends the send. It returns the
                report, where the `WorkerResult.remedy` of a worker says what was done about it;
                what it raises is logged.

        Returns:
            A function that ends the calls.
        """
        return self._register(self._settlers, callback)

    def _register(self, callbacks: dict[object, Any], callback: object) -> Callable[[], object]:
        check_function(callback, "callback")
        self._check_open()
        entry = object()
        callbacks[entry] = callback
        return bind(callbacks.pop, entry, None)

    def address(self, worker_id: int | None = None) -> Address:
        """The address that worker ``worker_id`` gives to its `Receiver`; it pickles.

        Args:
            worker_id: the worker; None for any reader, where the scheme has the capability
                ``publishes`` and the sender has no workers.

        Raises:
            UnknownWorkerError: no such worker.
            OptionError: no worker is given.
            ModelError: the sender knows no model yet.
        """
        if worker_id is None and "publishes" in self.capabilities and not self._members.ids:
            self._check_open()
            return self._pipeline.address(0)
        if worker_id is None:
            raise OptionError(
                "sender.address() needs the id of a worker, such as sender.address(0); for workers "
                "that come and go type Pool(sender).address(), with: from sync_plugin_scale "
                "import Pool"
            )
        worker_id = normalize_one(worker_id, self._members.ids)
        self._check_open()
        return self._pipeline.address(worker_id)

    def address_template(self) -> Address:
        """The address that all workers have in common, with the id -1, for a companion.

        A companion replaces the endpoint by one that a receiver resolves: see `IndirectEndpoint`.
        Its token is that of no worker; what resolves the endpoint finds the worker's.

        Raises:
            ModelError: the sender knows no model yet.
        """
        self._check_open()
        endpoint = self._pipeline.address(0).endpoint
        return self._pipeline.make_address(worker_id=-1, endpoint=endpoint)

    def side_channel(self, layout: Layout, places: int) -> SenderTransport:
        """Make one more transport of the same scheme, for a companion, which closes it.

        Its method `address` returns, for each place, a whole `Address`, which pickles; a receiver
        gets its end from `Address.connect`. From now on a send to all workers is published also
        where there is no worker, so that the first one that is added gets that version.

        Args:
            layout: the layout of what travels; its names begin with
                `sync_core.transports.RESERVED_PREFIX`.
            places: how many receivers there may be at a time; their ids are ``0 … places - 1``.

        Raises:
            OptionError: the scheme cannot serve workers that come later.
            ModelError: the sender knows no model yet.

        Example:
            >>> from contextlib import closing
            >>> layout = Layout.of_kinds([("__sync__.note", torch.float32, (1,))])
            >>> with Sender("thread", torch.nn.Linear(4, 2), num_workers=1) as sender:
            ...     channel = sender.side_channel(layout, places=1)
            ...     end = channel.address(0).connect(timeout=5.0)
            ...     with closing(channel), closing(end) as receiver:
            ...         deliveries = channel.send(Payload(1, layout, [torch.ones(1)]), [0])
            ...         receiver.receive(5.0).tensors[0].item()
            1.0
        """
        self._check_open()
        channel = self._pipeline.side_channel(layout, places)
        self._publishes = self._has_companion = True
        self._deserted = None
        return channel

    def send(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        version: int | None = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> SendReport:
        """Send the weights as a new version, and wait until every worker has committed it.

        Args:
            weights: a module, a TensorDict, a state_dict, a string reference, or a mapping from
                names to these, or `sync_core.models.ComputedWeights`, such as ``Stream(specs,
                tensors)`` of ``sync_plugin_std``; None for the sender's model.
            worker_ids: one worker or several; None for all. No ids: nothing is sent.
            timeout: deadline in seconds, of the weights and then of the workers: see `Sender`; None
                for the sender's.
            weights_dict: the weights of several models by name, instead of ``weights``.
            version: the version's number, such as the trainer's step; None for the next one.
            extras: small tensors beside the weights, such as a step or a temperature, for
                `Receiver.extras`. Names, dtypes and shapes are those of the first send that has
                some; a send may have none.

        Raises:
            SendError: some workers failed, the others have the new version; or ``on_failure`` has
                dropped the last worker, and none was added since.
            PrepareTimeoutError: the weights were not ready in time; no worker was given them.
            PendingSendError: another send is pending.
            LayoutMismatchError: the weights do not fit the model; nothing was sent.
            UnknownWorkerError: no such worker; nothing was sent.
            ValueError: the version is not newer than the last one; nothing was sent.
        """
        if weights_dict is not None:
            weights = either(weights, weights_dict)
        begun: list[PendingSend] = []
        try:
            return self.begin(
                weights, worker_ids, timeout, begun, version=version, extras=extras
            ).wait()
        except BaseException as error:
            interrupt(begun, error)
            raise

    def send_async(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        version: int | None = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> PendingSend:
        """Like `send`, but do not wait. The weights were read when this returns.

        Raises:
            SendError: the scheme's transport raised; the error is chained. For others see `send`.
        """
        begun: list[PendingSend] = []
        try:
            weights = either(weights, weights_dict)
            return self.begin(weights, worker_ids, timeout, begun, version=version, extras=extras)
        except BaseException as error:
            interrupt(begun, error)
            raise

    def due(self, worker_ids: Iterable[int]) -> tuple[int, ...]:
        """Count a send to each worker, and return those that no layer holds back; see `begin`."""
        return self._cadence.due(worker_ids, self._version)

    def begin(
        self,
        weights: Any,
        worker_ids: int | Iterable[int] | None,
        timeout: float | None,
        begun: list[PendingSend],
        *,
        counted: bool = False,
        version: int | None = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> PendingSend:
        """Start a send that is one of several, such as those of a `sync_plugin_std.SendGroup`.

        Args:
            weights: see `send`.
            worker_ids: see `send`.
            timeout: see `send`.
            begun: the send is appended when it has begun. The caller calls `PendingSend.interrupt`
                of each send in it where an exception comes, Ctrl-C included.
            counted: whether `due` has counted this send.
            version: see `send`.
            extras: see `send`.
        """
        started = time.perf_counter()
        seconds = self._terms.timeout if timeout is None else check_seconds(timeout)
        with self._starting:
            self._check_ready()
            if counted:
                self._repeats.keep_quiet()
            number = self._next_version(version)
            self._begins = True
            try:
                with self._barrier():
                    pending, to_all = self._begin(
                        weights,
                        worker_ids,
                        seconds,
                        started,
                        counted=counted,
                        version=number,
                        extras=extras,
                    )
                    begun.append(pending)
                    self._pending = pending
                    if to_all is not None:
                        # While the workers commit it.
                        pending.unchanged = self._repeats.look(to_all)
                        pending.equals = self._repeats.equals
            except BaseException:
                if "joined" in self.capabilities:
                    # Other ranks of the trainer count alone, and may have sent it.
                    self._failed = number
                raise
            finally:
                self._begins = False
            if self._closed:
                # By another thread, which did not see it yet.
                pending.abandon(Roster.CLOSED)
        if pending.undelivered:
            pending.wait()
        return pending

    def _begin(
        self,
        given: Any,
        worker_ids: int | Iterable[int] | None,
        seconds: float,
        started: float,
        *,
        counted: bool,
        version: int,
        extras: Mapping[str, Tensor] | None,
    ) -> tuple[PendingSend, Payload | None]:
        """Start a send; return the version, too, where that goes to all workers."""
        with self._changing:
            # Not while a worker is known to the transport alone.
            everyone = addressed = self._members.ids
        if worker_ids is not None:
            addressed = normalize(worker_ids, everyone)
        update = self._source.read(given, self._pipeline.agreed)
        stream = update.source if isinstance(update.source, TensorStream) else None
        with nullcontext() if stream is None else read_to_its_end(stream):
            reading, limit = time.perf_counter() - started, max(seconds, _LEAST)
            if stream is not None:
                stream.limit = limit - reading
            transport = self._pipeline.transport or self._open(update, given)
            opened = time.perf_counter()
            due = addressed
            if self._pipeline.skips and not counted:
                due = self._cadence.due(addressed, self._version)
            sends = bool(due) or (self._publishes and worker_ids is None and not everyone)
            if extras:
                update.extras = checked(extras, self._extras)
                self._extras = kinds_of(update.extras)
            if (sends and self._pipeline.prepares) or self._pipeline.leaves_out:
                update = self._pipeline.prepare(
                    update,
                    version,
                    due,
                    self._source,
                    bind(self._members.acknowledged, due),
                    by_hand=given is not None and given is not self._source.model,
                    skipped=not sends,
                )
            prepared = time.perf_counter()
            payload: Payload | None = None
            deliveries: dict[int, Delivery] = {}
            unwaited: dict[int, Unwaited] = {}
            if sends:
                self._version = version
                spent = reading + prepared - opened
                if spent > limit:
                    raise self._not_ready(reading, spent, limit)
                if stream is not None:
                    stream.limit = limit - spent + stream.seconds
                payload = Payload(version, *attached(update))
                deliveries = self._pipeline.send(payload, due)
                unwaited = self._members.sent(version, deliveries)
            offered = time.perf_counter()
            pending = PendingSend(
                self._version,
                deliveries,
                () if due is addressed else [i for i in addressed if i not in due],
                started=started,
                timeout=seconds,
                offered=offered,
                wait=transport.wait,
                scheme=self._pipeline.scheme,
                model_id=self.model_id,
                finish=self._end,
                unwaited=unwaited,
                prepare_seconds=prepared - started,
                publish_seconds=offered - prepared,
                packing=None if payload is None else payload.packing,
            )
        return pending, payload if len(due) == len(everyone) else None

    def _not_ready(self, reading: float, spent: float, limit: float) -> PrepareTimeoutError:
        slowest, name = max(
            (reading, "reading the model"),
            self._pipeline.stack.slowest() if self._pipeline.prepares else (0.0, ""),
        )
        return PrepareTimeoutError(
            f"version {self._version} of {self.model_id!r} was ready after {spent:.1f} s, and its "
            f"deadline is {limit:g} s; {name} took {slowest:.1f} s. {NOT_OFFERED}"
        )

    def snapshot(self) -> Mapping[str, Tensor]:
        """A copy of the model's weights as a send would read them now, in the CPU's memory."""
        with self._barrier():
            return super().snapshot()

    def check(self, weights: Any = None) -> None:
        """Raise what `send` would raise about these weights, and send nothing."""
        self._check_open()
        with self._barrier():
            self._read(weights)

    def _read(self, weights: Any = None) -> Update:
        return self._source.read(weights, self._pipeline.agreed)

    def wait_async(self, timeout: float | None = None) -> SendReport:
        """Wait for the pending send; see `PendingSend.wait`.

        Raises:
            PendingSendError: none is pending.
        """
        self._check_process()
        pending = self._pending
        if pending is None or pending.ended:
            raise PendingSendError("no send is pending; call send_async() first")
        return pending.wait(timeout)

    def add_worker(
        self, worker_id: int | None = None, *, worker: Any = None, joining: bool = False
    ) -> int:
        """Serve one more worker, which gets the newest version as soon as it can be reached.

        Args:
            worker_id: its id; None for the next one that was never used.
            worker: its handle, if the sender was given ``workers``.
            joining: whether sends wait for it only once it has committed that version or a newer
                one; until then `SendReport.joining` names it. For workers that come unasked, such
                as those of a pool: one that never answers delays a send by 0.25 s at most. Before
                the first version went to all, sends wait for every worker.

        Raises:
            OptionError: a handle where the others have none, or none where they have one.
            PendingSendError: the same thread is starting a send.
            ValueError: there is such a worker already, or that is not an id.
        """
        self._check_open()
        check_handle(worker, needed=self._called)
        # Either the send that another thread has begun is for this worker too, or it goes to all
        # before there is this worker, which then gets it as one that joins late.
        with self._starting, self._changing:
            self._check_starts_nothing()
            worker_id = self._members.next_id if worker_id is None else as_id(worker_id)
            if worker_id in self._members:
                raise ValueError(f"there is a worker {worker_id} already")
            try:
                self._members.add(worker_id, joining=joining)
                if self._pipeline.transport is not None:
                    self._pipeline.transport.add_worker(worker_id, self._find_worker(worker))
            except BaseException:
                if worker_id in self._members:
                    self._members.remove(worker_id)
                raise
            if worker is not None:
                self._handles[worker_id] = worker
            self._deserted = None
        return worker_id

    def remove_worker(self, worker_id: int) -> None:
        """Stop serving a worker.

        Raises:
            UnknownWorkerError: no such worker.
        """
        self._check_open()
        worker_id = normalize_one(worker_id, self._members.ids)
        # Another worker with this id is added before all of that, or after it.
        with self._changing:
            self._members.remove(worker_id)
            self._cadence.forget(worker_id)
            self._handles.pop(worker_id, None)
            if self._pipeline.transport is not None:
                self._pipeline.transport.remove_worker(worker_id)

    def _drop(self, worker_id: int) -> None:
        with self._changing:
            try:
                self.remove_worker(worker_id)
            finally:  # also where on_failure has removed it
                self._dropped_last = not self._members.ids and not self._has_companion

    def close(self) -> None:
        """End a pending send and release everything; receivers learn that the sender is gone.

        In a process that was forked from the sender's, this does nothing. After Ctrl-C, call it
        again: the same thread then continues.
        """
        if os.getpid() != self._process or self._closer not in (None, threading.get_ident()):
            return
        self._closer = threading.get_ident()
        self._closed = True
        pending = self._pending
        steps: list[Callable[[], object]] = [*self._closers]
        if pending is not None:
            steps.insert(0, bind(pending.abandon, Roster.CLOSED))
        for step in steps:
            try:
                step()
            except Exception:
                _log.exception("%r raised while the sender was being closed", step)
        self._close_members()
        self._pipeline.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Sender stays in the process that made it; "
            "give workers their addresses: sender.address(worker_id)"
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"workers={len(self.workers)}"
        return f"<Sender {self.scheme!r} of {self.model_id!r}: {state}, version={self._version}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ClosedError(
                f"this Sender belongs to process {self._process}, from which this one (process "
                f"{os.getpid()}) was forked; make another here, Sender(…), or give this process "
                "an address before it is forked: sender.address(worker_id)"
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise ClosedError("the sender is closed")

    def _check_starts_nothing(self) -> None:
        """Raise `PendingSendError` in the thread that is starting a send; `_starting` is held."""
        if self._begins:
            raise PendingSendError(
                "this call came while the same thread was starting a send, such as from a signal "
                "handler or a layer; set a flag there, and call it when the send has returned"
            )

    def _check_ready(self) -> None:
        if self._closed or os.getpid() != self._process:
            self._check_open()
        if self._begins:
            self._check_starts_nothing()
        if self._paused is not None:
            raise PausedError(f"no version is sent now: {self._paused}")
        # One that has ended may be left here by Ctrl-C.
        if self._pending is not None and not self._pending.ended:
            raise PendingSendError("a send is pending; call wait_async() before the next one")
        if self._deserted is not None and not self._members.ids:
            raise SendError(self._deserted)

    def _open(self, update: Update, model: Any) -> SenderTransport:
        workers = tuple(map(self._find_worker, self._handles.values()))
        if self._called and not workers:
            raise OptionError("all workers were removed; type sender.add_worker(worker=…) first")
        try:
            self._pipeline.open(update, model, self._source.found, workers, self._members)
        except OptionError as error:
            if error.unknown not in self._terms.options:
                raise
            arguments = inspect.signature(Sender).parameters.keys() - {"options"}
            raise with_near_miss(error, arguments, self._pipeline.scheme) from None
        return self._pipeline.opened

    def _find_worker(self, handle: Any) -> Any:
        """The handle itself, or what a path leads to in the context."""
        if not isinstance(handle, str) or not self._pipeline.takes_worker_paths:
            return handle
        if self._context is None:
            raise OptionError(
                f"workers has the path {handle!r}, and there is no context to look it up in; type "
                "Sender(…, context=trainer)"
            )
        return resolve(self._context, handle)

    def _next_version(self, given: int | None) -> int:
        """The number of the version that is sent next."""
        if given is None:
            return max(self._version, self._failed) + 1
        version = check_count(given, "version")
        if version <= self._version:
            raise ValueError(f"version is {version}, and version {self._version} was sent already")
        return version

    def _end(self, report: SendReport, *, waited: bool) -> SendReport:
        # Another thread may have begun the next one, also while this one looks.
        pending = self._pending
        if pending is not None and pending.ended and self._pending is pending:
            self._pending = None
        if self._pipeline.skips:
            known = self._members.statuses
            reached = (i for i in report.updated if i in known)
            # Not one that has got the id of a worker which was removed meanwhile.
            self._cadence.reached(i for i in reached if known[i].wanted >= report.version)
        if waited and not report.complete and not self._closed:
            report = self._act_on_failures(report)
        if self._members.may_have_returned:
            returned = self._members.take_returned(report.updated)
            report = report.with_returned(returned) if returned else report
        try:
            if self._post_hooks and not report.failed and not report.no_worker_left:
                self._run_post_hooks()
        finally:
            self._repeats.count(report, self._source.found)
            # A collector has a warning for that.
            if self._unsent is not None and self.collector is None:
                self._unsent.look(self._source.found, self.model_id)
            tell(report, tuple(self._reporters.values()))
        return report

    def _act_on_failures(self, report: SendReport) -> SendReport:
        """Let what was given to `settle_failures`, and then ``on_failure``, act on workers."""
        for settle in tuple(self._settlers.values()) if report.failed or report.joining else ():
            try:
                report = settle(report)
            except Exception:
                _log.exception("a function given to settle_failures raised; on_failure decides")
        if self._failure_handler is not None and report.failed:
            report = self._failure_handler.apply(report, self._members, self._drop, self.address)
            if self._dropped_last:
                report = self._deserted = replace(report, no_worker_left=True)
                self._dropped_last = False
        return report


def interrupt(begun: Iterable[PendingSend], error: BaseException) -> None:
    """End a send that an exception has interrupted, so that the next one works."""
    for pending in begun:
        pending.interrupt(error)


def _handler(on_failure: OnFailure) -> FailureHandler:
    from sync_core.sending.failure_policy import FailureHandler

    return FailureHandler(on_failure)
