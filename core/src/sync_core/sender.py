"""The trainer's side: sends a model's weights to workers, as versions that only grow."""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn, Self

from sync_core import registry
from sync_core.address import Address
from sync_core.cadence import Cadence
from sync_core.contexts import SendContext, TransportContext
from sync_core.defaults import Defaults
from sync_core.errors import ClosedError, ModelError, OptionError, PendingSendError
from sync_core.extract import Strategy, check_strategy
from sync_core.models import either, names_of
from sync_core.payload import Payload
from sync_core.pending import PendingSend
from sync_core.report import SendReport
from sync_core.send_log import tell
from sync_core.source import Source
from sync_core.stack import Stack
from sync_core.transport import Delivery, SenderTransport
from sync_core.update import Update
from sync_core.updater import Updater
from sync_core.verify import Verification, Verify
from sync_core.worker_ids import count_workers, normalize


class Sender(Updater):
    """Sends a model's weights to workers.

    Args:
        scheme: the name of an installed scheme, or a plugin object.
        model: what is sent when `send` is given nothing: a module, a TensorDict, a state_dict,
            a string such as ``"env.transform[0]"``, looked up in ``context`` at every send, or
            a mapping from names to such models, which are one version: all committed, or none.
            None means ``model_id`` in ``context``, or a model registered later.
        num_workers: how many workers there are; their ids are ``0 … num_workers - 1``.
        workers: handles of the workers, for a scheme that calls into them.
        model_id: the model's name.
        context: the object in which string references are looked up.
        layers: names or objects of layers; each changes the update after the one before it.
        strategy: how a module is read and written: ``"tensordict"`` or ``"state_dict"``.
        zero_copy: let the workers' parameters be views of what arrives; they are read-only then,
            and after a write to one in place, where that is possible at all, `receive` raises.
        partial: accept updates that lack some of the model's tensors.
        on_failure: ``"raise"`` a `SendError` after the other workers were updated, or ``"drop"``
            the worker that failed and carry on without it.
        verify: ``"checksum"``: checksums travel with the weights, and a worker applies nothing
            that does not match them. ``"readback"``: also, after the commit, the worker reads its
            model and compares it with what was written, and the sender with what it sent where no
            layer changes values. Needs ``pip install "sync-core[verify]"``, here and there.
        on_report: called with the report at the end of every send, also where workers failed;
            what it raises is logged, and changes nothing.
        timeout: deadline of blocking calls, in seconds.
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
        strategy: Strategy = "tensordict",
        zero_copy: bool = False,
        partial: bool = False,
        on_failure: Literal["raise", "drop"] = "raise",
        verify: Verify | None = None,
        on_report: Callable[[SendReport], object] | None = None,
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        if on_failure not in ("raise", "drop"):
            raise ValueError(f"on_failure must be 'raise' or 'drop', not {on_failure!r}")
        if isinstance(layers, str):
            raise OptionError(f"layers is a list: layers=[{layers!r}]")
        if workers is not None and not isinstance(workers, Sequence):
            raise OptionError(f"workers is a list: workers=[{workers!r}]")
        check_strategy(strategy)
        if zero_copy and (partial or strategy != "tensordict"):
            raise OptionError("zero_copy needs whole updates and strategy='tensordict'")
        super().__init__()
        self.model_id = model_id
        self._scheme = scheme
        self._layers = tuple(layers)
        self._options = options
        self._strategy: Strategy = strategy
        self._zero_copy = zero_copy
        self._partial = partial
        self._verify: Verify | None = verify
        self._on_report = on_report
        self._on_failure = on_failure
        self._timeout = timeout
        self._worker_ids = list(range(count_workers(num_workers, workers)))
        self._handles = dict(enumerate(workers or ()))
        self._next_worker_id = len(self._worker_ids)
        self._backend = registry.find("sync.schemes", scheme)
        if zero_copy and "zero_copy" not in self._backend.capabilities:
            raise OptionError(f"{self._backend.describe()} cannot zero_copy; leave that out")
        found = [registry.find("sync.layers", layer) for layer in layers]
        self._verification = Verification(verify, self._backend, found, strategy)
        self._stack = Stack(Defaults(strategy), self._backend, self._verification.layers)
        self._source = Source(context, strategy, partial=partial)
        self._cadence = Cadence(self._stack, model_id)
        self._token = secrets.token_hex(16)
        self._version = 0
        self._starting = threading.Lock()
        self._pending: PendingSend | None = None
        self._transport: SenderTransport | None = None
        self._make_address: Callable[..., Address]
        self._close_transport: Callable[[], Any] | None = None
        self._closed = False
        if model is None and context is not None:
            model = model_id
        if model is not None:
            self.register_model(model)

    def register_model(self, model: Any) -> None:
        """Say what is sent when `send` is given nothing; see the argument ``model``."""
        self._source.model = model
        self._start(self._source.read(), model)

    @property
    def version(self) -> int:
        """The newest version sent; 0 before the first."""
        return self._version

    def all_worker_ids(self) -> tuple[int, ...]:
        """The ids of the workers."""
        return tuple(self._worker_ids)

    def address(self, worker_id: int) -> Address:
        """The address that worker ``worker_id`` gives to its `Receiver`; it pickles.

        Raises:
            UnknownWorkerError: no such worker.
            ModelError: the sender knows no model yet.
        """
        (worker_id,) = normalize(worker_id, self._worker_ids)
        transport = self._started()
        return self._make_address(worker_id=worker_id, endpoint=transport.address(worker_id))

    def send(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> SendReport:
        """Send the weights as a new version, and wait until every worker has committed it.

        Args:
            weights: a module, a TensorDict, a state_dict, a string reference, or a mapping from
                names to these; None for the sender's model.
            worker_ids: one worker or several; None for all. No ids: nothing is sent.
            timeout: deadline in seconds; None for the sender's.
            weights_dict: the weights of several models by name, instead of ``weights``.

        Raises:
            SendError: some workers failed; the others have the new version.
            PendingSendError: another send is pending.
            LayoutMismatchError: the weights do not fit the model; nothing was sent.
            UnknownWorkerError: no such worker; nothing was sent.
        """
        pending = self.send_async(weights, worker_ids, timeout=timeout, weights_dict=weights_dict)
        try:
            return pending.wait()
        finally:
            pending.abandon()

    def send_async(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> PendingSend:
        """Like `send`, but do not wait. The weights were read when this returns."""
        started = time.perf_counter()
        with self._starting:
            self._check_ready()
            addressed = normalize(worker_ids, self._worker_ids)
            given = either(weights, weights_dict)
            update = self._source.read(given)
            self._start(update, given)
            due = self._cadence.due(addressed, self._version)
            if due:
                update = self._prepare(update, self._version + 1, due)
            prepared = time.perf_counter()
            deliveries = self._deliver(update, due) if due else {}
            self._pending = PendingSend(
                self._version,
                deliveries,
                [worker_id for worker_id in addressed if worker_id not in due],
                started=started,
                timeout=self._timeout if timeout is None else timeout,
                finish=self._end,
                check=self._verification.check(),
                prepare_seconds=prepared - started,
                publish_seconds=time.perf_counter() - prepared,
            )
            return self._pending

    def check(self, weights: Any = None) -> None:
        """Raise what `send` would raise about these weights, and send nothing."""
        self._check_open()
        self._source.read(weights)

    def wait_async(self, timeout: float | None = None) -> SendReport:
        """Wait for the pending send; see `PendingSend.wait`.

        Raises:
            PendingSendError: none is pending.
        """
        pending = self._pending
        if pending is None:
            raise PendingSendError("no send is pending; call send_async() first")
        return pending.wait(timeout)

    def add_worker(self, worker_id: int | None = None, *, worker: Any = None) -> int:
        """Serve one more worker, which gets the newest version as soon as it can be reached.

        Args:
            worker_id: its id; None for the next one that was never used.
            worker: its handle, if the sender was given ``workers``.

        Raises:
            OptionError: a handle where the others have none, or none where they have one.
        """
        self._check_open()
        if (worker is None) is bool(self._handles):
            raise OptionError(
                "the sender calls its workers by their handles: add_worker(worker=…)"
                if worker is None
                else "the workers connect by their addresses; leave worker= out"
            )
        if worker_id is None:
            worker_id = self._next_worker_id
        if worker_id in self._worker_ids:
            raise ValueError(f"there is a worker {worker_id} already")
        self._next_worker_id = max(self._next_worker_id, worker_id + 1)
        if self._transport is not None:
            self._transport.add_worker(worker_id, worker)
        self._worker_ids.append(worker_id)
        if worker is not None:
            self._handles[worker_id] = worker
        return worker_id

    def remove_worker(self, worker_id: int) -> None:
        """Stop serving a worker.

        Raises:
            UnknownWorkerError: no such worker.
        """
        self._check_open()
        (worker_id,) = normalize(worker_id, self._worker_ids)
        self._worker_ids.remove(worker_id)
        self._handles.pop(worker_id, None)
        if self._transport is not None:
            self._transport.remove_worker(worker_id)

    def close(self) -> None:
        """End a pending send and release everything; receivers learn that the sender is gone."""
        if self._closed:
            return
        self._closed = True
        if self._pending is not None:
            self._pending.abandon()
        if self._close_transport is not None:
            self._close_transport()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Sender stays in the process that made it; "
            "give workers their addresses: sender.address(worker_id)"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the sender is closed")

    def _check_ready(self) -> None:
        self._check_open()
        if self._pending is not None:
            raise PendingSendError("a send is pending; call wait_async() before the next one")

    def _started(self) -> SenderTransport:
        self._check_open()
        if self._transport is None:
            raise ModelError("the sender has no model; give it one, or call register_model()")
        return self._transport

    def _start(self, update: Update, model: Any) -> None:
        """Make the transport, now that it is known what will travel."""
        if self._transport is not None:
            return
        # No method: the transport keeps it, and must not keep this sender alive.
        self._make_address = partial(
            Address,
            scheme=self._scheme,
            layers=self._layers,
            options=self._options,
            model_id=self.model_id,
            token=self._token,
            strategy=self._strategy,
            zero_copy=self._zero_copy,
            partial=self._partial,
            verify=self._verify,
            timeout=self._timeout,
            layout=update.layout,
        )
        if self._stack.implements("prepare_weights"):
            update = self._prepare(Update(update.layout, update.tensors), 0, ())
        self._transport = self._stack.create_sender_transport(
            TransportContext(
                side="sender",
                scheme=self._backend.name,
                model_id=self.model_id,
                models=names_of(model),
                token=self._token,
                timeout=self._timeout,
                zero_copy=self._zero_copy,
                options=self._options,
                worker_ids=tuple(self._worker_ids),
                workers=tuple(self._handles.values()),
                layout=update.layout,
                make_address=self._make_address,
            )
        )
        self._close_transport = weakref.finalize(self, self._transport.close)

    def _prepare(self, update: Update, version: int, worker_ids: tuple[int, ...]) -> Update:
        context = SendContext(model_id=self.model_id, version=version, worker_ids=worker_ids)
        return self._stack.prepare_weights(update, context)

    def _deliver(self, update: Update, worker_ids: tuple[int, ...]) -> dict[int, Delivery]:
        self._version += 1
        payload = Payload(self._version, update.layout, update.tensors)
        return dict(self._started().send(payload, worker_ids))

    def _end(self, report: SendReport, *, waited: bool) -> SendReport:
        report = replace(report, scheme=self._backend.name, model_id=self.model_id)
        report = self._finish(report, waited=waited)
        tell(report, self._on_report)
        return report

    def _finish(self, report: SendReport, *, waited: bool) -> SendReport:
        self._pending = None
        self._cadence.reached(report.updated)
        if report.failed and self._on_failure == "drop" and waited:
            for worker_id in report.failed.keys() & set(self._worker_ids):
                self.remove_worker(worker_id)
            report = report.with_failed_dropped()
        if not report.failed:
            self._run_post_hooks()
        return report
