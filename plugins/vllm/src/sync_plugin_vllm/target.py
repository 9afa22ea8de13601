"""The trainer's side: brings versions of a sender into vLLM engines."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

from sync_core import (
    Address,
    Delivery,
    OptionError,
    PendingSend,
    Sender,
    SendReport,
    SyncError,
    WorkerError,
)
from sync_core.checks import check_seconds
from sync_plugin_vllm.adapter_model import AdapterDescription, base_samples, describe_adapter
from sync_plugin_vllm.adapter_update import AdapterSlot, check_directory, check_name, request_for
from sync_plugin_vllm.clients import Client, Pause, client_for
from sync_plugin_vllm.votes import AsleepError, NotLoadedError, Votes

State: TypeAlias = Literal["unconnected", "current", "behind", "bad", "lost"]

#: The label of outputs of an engine that has loaded a part of a version.
BAD = "bad"

#: What labelling an engine and resuming it may each take, also after the deadline, in seconds;
#: estimate. An engine with whole weights must not stay paused.
_CONCLUDING = 5.0

# How long the answer of a rank that has refused a version may take, once its refusal is known by
# another way, in seconds; estimate.
_ANSWERING = 1.0

# The share of a send's time in which engines are resumed, after one of ``all_or_none`` was late;
# estimate.
_RESERVE = 0.1

# The states of workers for which a send does not wait.
_UNWAITED = ("quarantined", "restarting")


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """An engine as the trainer knows it.

    Args:
        name: its URL, or the kind of object that it is.
        worker_ids: its ranks, by their ids in the sender.
        state: ``"unconnected"``, no rank is connected to the sender; ``"current"``, all ranks have
            the newest version; ``"behind"``, all keep an older one, or none was sent yet;
            ``"bad"``, a rank may hold parts of a version, or ranks hold different ones;
            ``"lost"``, a rank has lost its weights by ``sleep(level=2)``, or its sender by dying.
        version: the version that it generates with; 0 for the weights that it had when it was
            connected, None while it is bad or lost.
        pause_seconds: how long it was paused for the last update; 0 for adapters.
        error: why the last update failed, or None.
        adapter: the name of the adapter that requests shall use, such as ``"policy-v7"``; None
            before the first, and without ``adapter``.
    """

    name: str
    worker_ids: tuple[int, ...] = ()
    state: State = "unconnected"
    version: int | None = 0
    pause_seconds: float = 0.0
    error: Exception | None = None
    adapter: str | None = None


class _OthersFailedError(SyncError):
    """Another engine has failed, and none loads the version."""


@dataclass(slots=True)
class _Engine:
    """An engine, and the thread of its last call."""

    client: Client
    status: EngineStatus
    #: Its adapters; None where whole versions are sent.
    slot: AdapterSlot | None = None
    paused: bool = False
    #: When it was paused for the last update (`time.perf_counter`).
    pause_began: float = 0.0
    #: Whether an update was started, and not finished for all that is known.
    unfinished: bool = False
    #: Whether its ranks were asked to load a version, and have not all answered that they did.
    torn: bool = False
    thread: threading.Thread | None = None
    failure: Exception | None = None

    @property
    def key(self) -> str:
        """The name of the target in a vote; engines in one process share theirs."""
        return f"{self.status.name} (workers {', '.join(map(str, self.status.worker_ids))})"

    def set(self, **changes: Any) -> None:
        """Change the status."""
        self.status = replace(self.status, **changes)


class VllmTarget:
    """Sends versions of a `Sender` into vLLM engines.

    Each rank of each engine is a worker of the sender. A send packs the weights once, and drives
    all engines at the same time: each stages the version, is paused, loads it, and is resumed.

    Args:
        engines: a ``vllm.LLM`` in this process, a Ray actor with its methods, or the URL of
            ``vllm serve``; or several of them. Each was given
            ``weight_transfer_config=WeightTransferConfig(backend="sync_core")``.
        pause: the fate of requests that a server is working on: ``"keep"``, they continue with
            the new weights, and vLLM attributes each token to the version that made it;
            ``"wait"``, they end first; ``"abort"``, they end at once.
        verify: whether each rank compares, after each load, what its layers compute with what was
            sent. A version that fails is not confirmed: the engine is ``"bad"``, and the error
            names the layers. With ``adapter`` the base model is compared once, by `connect`.
        all_or_none: whether engines take each step together: all have staged the version, then
            all are paused, then all load it, then all are resumed. If one does not come as far as
            to load, none loads: they fail with `NotLoadedError`, which ``on_failure`` of the
            sender ignores, and are resumed with the weights that they have.
        adapter: the name of an adapter of LoRA, such as ``"policy"``, for a sender with
            ``layers=[lora("adapter")]``. Version 7 is loaded as the adapter ``"policy-v7"``, and
            requests name it: by `lora_request`, or to a server by the name in
            ``target.engines[0].adapter``. The one before is unloaded. Engines are not paused.
        adapter_directory: the directory of the engines' machines in which they write adapters;
            None for that of this machine's temporary files.
        timeout: deadline of every call, in seconds; a send has one for all its steps.

    Raises:
        OptionError: that is not an engine.
        SyncError: an engine cannot be reached.

    Example:
        A trainer that sends to a server and to an engine in its own process::

            target = VllmTarget(["http://localhost:8000", llm])
            sender = Sender("dist", model, num_workers=target.num_workers, strategy="checkpoint")
            target.connect(sender)
            report = target.send()
    """

    def __init__(
        self,
        engines: Any,
        *,
        pause: Pause = "keep",
        verify: bool = False,
        all_or_none: bool = False,
        adapter: str | None = None,
        adapter_directory: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        if pause not in ("keep", "wait", "abort"):
            raise OptionError(f"pause must be 'keep', 'wait' or 'abort', not {pause!r}")
        for name, given in (("verify", verify), ("all_or_none", all_or_none)):
            if not isinstance(given, bool):
                raise OptionError(f"{name} must be True or False, got {given!r}")
        self._adapter = None if adapter is None else check_name(adapter)
        self._directory = check_directory(adapter_directory)
        self._pause = pause
        self._verify = verify
        self._all_or_none = all_or_none
        self._timeout = check_seconds(timeout)
        self._sender: Sender | None = None
        self._closed = False
        self._forget_sender: Callable[[], object] | None = None
        self._engines: list[_Engine] = []
        self._sending = threading.RLock()
        several = engines if isinstance(engines, list | tuple) else [engines]
        for engine in several:
            client = client_for(engine)
            first = self.num_workers
            ids = tuple(range(first, first + client.world_size(self._timeout)))
            self._engines.append(self._engine(client, ids))

    def _engine(self, client: Client, worker_ids: tuple[int, ...]) -> _Engine:
        slot = None
        if self._adapter is not None:
            slot = AdapterSlot(client, self._adapter, self._directory)
        return _Engine(client, EngineStatus(client.name, worker_ids), slot)

    @property
    def num_workers(self) -> int:
        """The ranks of all engines: how many workers the sender needs."""
        return sum(len(engine.status.worker_ids) for engine in self._engines)

    @property
    def engines(self) -> tuple[EngineStatus, ...]:
        """The status of each engine, in the order in which they were given."""
        return tuple(self._status(engine.status) for engine in self._engines)

    def lora_request(self, index: int = 0) -> Any:
        """Return the ``LoRARequest`` by which requests use the newest adapter of an engine.

        Ask for it before each ``generate``: the files of adapters that were unloaded are gone.

        Args:
            index: the position of the engine in `engines`; an ``LLM``, or a Ray actor.

        Raises:
            OptionError: the engine is a server, whose requests name the adapter; or no version of
                an adapter was sent.
        """
        slot = self._engines[index].slot
        if slot is None:
            raise OptionError(
                "the target sends whole versions, and no adapter; type VllmTarget(…, adapter=…)"
            )
        return request_for(slot)

    def connect(self, sender: Sender, addresses: Sequence[Address] | None = None) -> None:
        """Connect every rank of every engine to a sender, which has a worker for each.

        Args:
            sender: the sender; of a sharded trainer, that of the rank that calls `send`.
            addresses: of a sharded trainer, what ``join_addresses`` made for each worker.

        Raises:
            OptionError: the sender has other workers.
            SyncError: an engine refused; the others are connected.
        """
        with self._sending:
            ids = tuple(range(self.num_workers))
            if sender.all_worker_ids() != ids:
                raise OptionError(
                    f"the engines have {len(ids)} ranks, and the sender has the workers "
                    f"{sender.all_worker_ids()}; type Sender(…, num_workers=target.num_workers)"
                )
            first = 0
            for engine in self._engines:
                # Not the ids of the sender before, where engines have left.
                end = first + len(engine.status.worker_ids)
                engine.set(worker_ids=ids[first:end])
                first = end
            if addresses is not None and len(addresses) != len(ids):
                raise OptionError(
                    f"addresses has {len(addresses)} addresses, and the engines {len(ids)} ranks; "
                    "give one for each worker of the sender, in the order of their ids"
                )
            if self._forget_sender is not None:
                self._forget_sender()
            self._sender, self._closed = sender, False
            self._forget_sender = sender.on_close(partial(_settle, weakref.ref(self)))
            self._connect(self._engines, addresses)

    def add(self, engine: Any) -> tuple[int, ...]:
        """Connect an engine that joins later; it has the weights that are sent next.

        Returns:
            The ids of its workers in the sender.

        Raises:
            SyncError: it refused, or cannot be reached; nothing was added.
        """
        sender = self._connected()
        client = client_for(engine)
        num_ranks = client.world_size(self._timeout)
        with self._sending:
            ids = tuple(sender.add_worker() for _ in range(num_ranks))
            added = self._engine(client, ids)
            self._engines.append(added)
            try:
                self._connect([added])
            except BaseException:
                self.remove(len(self._engines) - 1)
                raise
        return ids

    def remove(self, index: int) -> None:
        """Forget an engine, such as one that has died.

        Args:
            index: its position in `engines`.
        """
        sender = self._connected()
        with self._sending:
            removed = self._engines.pop(index)
            for worker_id in set(removed.status.worker_ids) & {*sender.all_worker_ids()}:
                sender.remove_worker(worker_id)

    def send(self, weights: Any = None, *, timeout: float | None = None) -> SendReport:
        """Send a version into all engines, and wait until they generate with it.

        Args:
            weights: see `Sender.send`.
            timeout: deadline of all of it, in seconds; None for the target's.

        Returns:
            A result for each rank; `engines` has one for each engine.

        Raises:
            SendError: some ranks failed; the other engines have the version, or with
                ``all_or_none`` keep the one before. An engine that is ``"bad"`` now makes no
                tokens before a send has healed it, where it can be paused.
            SyncError: an engine has the version, and failed afterwards; or none is connected.
        """
        sender = self._connected()
        seconds = self._timeout if timeout is None else check_seconds(timeout)
        deadline = time.monotonic() + seconds
        with self._sending:
            described = self._describe(sender.model if weights is None else weights)
            pending = sender.send_async(weights, timeout=seconds)
            votes = self._votes(pending, deadline - min(_CONCLUDING, _RESERVE * seconds))
            begun = []
            for engine in self._engines:
                update = partial(self._update, engine, pending, votes, described, deadline)
                if self._begin(engine, update):
                    begun.append(engine)
                else:
                    votes.fail(engine.key, engine.failure)
                    _fail(engine, pending, engine.failure)
            try:
                report = pending.wait()
            except BaseException as error:
                pending.interrupt(error)
                raise
            finally:
                self._join(begun, deadline)
            _raise_first(self._engines)
            return report

    def _describe(self, weights: Any) -> AdapterDescription | None:
        """Return the description of the adapter that is sent; None for whole versions."""
        return None if self._adapter is None else describe_adapter(weights)

    def _settle(self) -> None:
        """Keep what is known of the engines, as their sender is closed."""
        for engine in self._engines:
            engine.status = self._status(engine.status)
        self._closed = True

    def _status(self, status: EngineStatus) -> EngineStatus:
        """The status of an engine, given what the sender knows of its ranks by now."""
        if self._sender is None or self._closed or status.state in ("unconnected", "bad"):
            return status
        workers = self._sender.workers
        known = [workers[i] for i in status.worker_ids if i in workers]
        # A rank without weights joins its sender again, as a worker that has no version.
        if any(w.state == "lost" or (status.version and not w.version) for w in known):
            return replace(status, state="lost", version=None)
        return status

    def _connect(
        self, engines: Sequence[_Engine], addresses: Sequence[Address] | None = None
    ) -> None:
        deadline = time.monotonic() + self._timeout
        sender = self._connected()
        for engine in engines:
            given = [
                sender.address(i) if addresses is None else addresses[i]
                for i in engine.status.worker_ids
            ]
            self._begin(engine, partial(self._init, engine, given, deadline))
        self._join(engines, deadline)
        _raise_first(engines)

    def _init(self, engine: _Engine, addresses: Sequence[Address], deadline: float) -> None:
        texts = [address.to_json() for address in addresses]
        info: dict[str, Any] = {"addresses": texts, "verify": self._verify}
        described = self._describe(self._connected().model)
        if described is not None:
            info["adapter"] = asdict(described)
            if self._verify:
                info["base"] = base_samples(self._connected().model)
        engine.client.init(info, _left(deadline))
        if engine.torn:
            engine.set(state="bad", version=None, error=None)
        else:
            engine.set(state="behind", version=0, error=None)

    def _votes(self, pending: PendingSend, deadline: float) -> Votes:
        """The votes about a version, of those engines for which the send waits."""
        if not self._all_or_none:
            return Votes((), deadline)
        unanswered, statuses = pending.unanswered, self._connected().workers
        waited = {
            worker_id
            for worker_id, status in statuses.items()
            if worker_id in unanswered or status.state not in _UNWAITED
        }
        members = [e.key for e in self._engines if waited.issuperset(e.status.worker_ids)]
        return Votes(members, deadline)

    def _update(
        self,
        engine: _Engine,
        pending: PendingSend,
        votes: Votes,
        described: AdapterDescription | None,
        deadline: float,
    ) -> None:
        """Bring one version into one engine."""
        version = pending.version
        deliveries = [
            pending.deliveries[i] for i in engine.status.worker_ids if i in pending.deliveries
        ]
        torn, engine.pause_began = engine.torn, time.perf_counter()
        failure: Exception | None = None
        try:
            if len(deliveries) < len(engine.status.worker_ids):
                raise SyncError("the sender has dropped some of its ranks; type target.remove(…)")
            if engine.slot is None or described is None:
                self._bring(engine, version, deliveries, votes, deadline)
            else:
                self._bring_adapter(engine, deliveries, votes, described, deadline)
        except _OthersFailedError as others:
            _not_loaded(engine, deliveries, others)
        except Exception as error:
            failure = error
            votes.fail(engine.key, error)
            _fail(engine, pending, error)
        errors = [delivery.error for delivery in deliveries if delivery.error is not None]
        complete = len(deliveries) == len(engine.status.worker_ids)
        if complete and not errors:
            failure = None
            engine.torn = False
        else:
            failure = errors[0] if errors else failure
            if all(d.answer is not None and d.answer.model_state == "kept" for d in deliveries):
                engine.torn = torn
        votes.pass_on("loaded", engine.key)
        if engine.slot is not None:
            self._conclude_adapter(engine, engine.slot, version, failure)
            return
        self._conclude(engine, version, failure)
        engine.set(pause_seconds=time.perf_counter() - engine.pause_began)

    def _bring(
        self,
        engine: _Engine,
        version: int,
        deliveries: Sequence[Delivery],
        votes: Votes,
        deadline: float,
    ) -> None:
        """Stage a version, pause the engine, and load it."""
        client = engine.client
        if engine.unfinished:
            # It fails where the engine has not come as far as to start it.
            with suppress(Exception):
                client.finish(_left(deadline))
        engine.unfinished = True
        client.start(_left(deadline))
        _raise_refusal(deliveries)
        if self._all_or_none:
            _check(client, version, deliveries, deadline)
        if not votes.pass_on("staged", engine.key):
            raise _OthersFailedError(votes.reason)
        engine.pause_began = time.perf_counter()
        if not engine.paused:
            # One that its user has paused, or woken up in part, is not resumed here.
            engine.paused = not client.is_paused(_left(deadline))
            client.pause(self._pause, _left(deadline))
        if not votes.pass_on("paused", engine.key):
            raise _OthersFailedError(votes.reason)
        # With all_or_none all engines load now, even where the deadline is close.
        seconds = deadline - time.monotonic()
        seconds = max(_CONCLUDING, seconds) if self._all_or_none else _left(deadline)
        engine.torn = True
        client.update(version, seconds)
        for delivery in deliveries:
            delivery.wait(_left(deadline))
        client.finish(_left(deadline))
        engine.unfinished = False

    def _bring_adapter(
        self,
        engine: _Engine,
        deliveries: Sequence[Delivery],
        votes: Votes,
        described: AdapterDescription,
        deadline: float,
    ) -> None:
        """Stage a version of an adapter, and load it while the engine generates."""
        assert engine.slot is not None
        slot, version = engine.slot, deliveries[0].version
        slot.client.step(_left(deadline), step="stage")
        _raise_refusal(deliveries)
        if self._all_or_none:
            slot.client.step(_left(deadline), step="check", version=version)
        for step in ("staged", "paused"):
            if not votes.pass_on(step, engine.key):
                raise _OthersFailedError(votes.reason)
        slot.load(version, described, partial(_left, deadline))
        for delivery in deliveries:
            delivery.wait(_left(deadline))

    def _conclude(self, engine: _Engine, version: int, failure: Exception | None) -> None:
        """Set the status of an engine, label its outputs, and resume it unless it is torn."""
        engine.set(error=failure)
        try:
            if engine.torn:
                engine.set(state="bad", version=None)
                engine.client.label(BAD, _CONCLUDING)
            elif failure is not None:
                engine.set(state="behind")
            else:
                engine.set(state="current", version=version)
                engine.client.label(str(version), _CONCLUDING)
        finally:
            if engine.paused and not engine.torn:
                engine.client.resume(_CONCLUDING)
                engine.paused = False

    def _begin(self, engine: _Engine, work: Callable[[], None]) -> bool:
        """Start the next work of an engine in a thread; not before the one before it has ended."""
        if engine.thread is not None and engine.thread.is_alive():
            engine.failure = SyncError("the call before has not returned")
            return False
        engine.failure = None

        def run() -> None:
            try:
                work()
            except Exception as error:
                engine.failure = error

        engine.thread = threading.Thread(target=run, name="sync-vllm", daemon=True)
        engine.thread.start()
        return True

    def _join(self, engines: Sequence[_Engine], deadline: float) -> None:
        for engine in engines:
            assert engine.thread is not None
            engine.thread.join(max(0.0, deadline - time.monotonic()))
            if engine.thread.is_alive():
                engine.failure = TimeoutError("did not return before the deadline")
                if engine.status.state != "unconnected":
                    engine.set(state="bad" if engine.torn else "behind")
            if engine.failure is not None and engine.status.error is None:
                engine.set(error=engine.failure)

    def _conclude_adapter(
        self, engine: _Engine, slot: AdapterSlot, version: int, failure: Exception | None
    ) -> None:
        """Set the status of an engine, and unload the adapters that it needs no longer."""
        if failure is not None:
            engine.set(state="behind", error=failure)
            return
        assert slot.current is not None
        engine.set(state="current", version=version, error=None, adapter=slot.current.name)
        slot.retire(_CONCLUDING)

    def _connected(self) -> Sender:
        if self._sender is None:
            raise SyncError("the engines have no sender yet; type target.connect(sender)")
        return self._sender


def _settle(target: weakref.ref[VllmTarget]) -> None:
    if (alive := target()) is not None:
        alive._settle()


def _fail(engine: _Engine, pending: PendingSend, reason: object) -> None:
    """End the deliveries to an engine that will not answer."""
    for worker_id in engine.status.worker_ids:
        if worker_id in pending.deliveries and not pending.deliveries[worker_id].ended:
            error = WorkerError(worker_id, f"{engine.status.name}: {reason}")
            pending.deliveries[worker_id].fail(error)


def _not_loaded(engine: _Engine, deliveries: Sequence[Delivery], reason: Exception) -> None:
    """Have an engine drop the version that it has staged, since others have not."""
    for delivery in deliveries:
        message = f"{engine.status.name} did not load version {delivery.version}: {reason}"
        delivery.fail(NotLoadedError(delivery.worker_id, message))
    # Else the next send finishes it.
    with suppress(Exception):
        if engine.slot is not None:
            engine.client.step(_CONCLUDING, step="drop", reason=str(reason))
            return
        engine.client.finish(_CONCLUDING)
        engine.unfinished = False


def _check(client: Client, version: int, deliveries: Sequence[Delivery], deadline: float) -> None:
    """Raise unless all ranks have staged a version; `AsleepError` says so where it is the cause."""
    try:
        client.check(version, _left(deadline))
    except Exception:
        for delivery in deliveries:
            if delivery.wait(min(_ANSWERING, _left(deadline))):
                _raise_refusal([delivery], AsleepError)
        raise


def _raise_refusal(deliveries: Sequence[Delivery], kind: type[Exception] = WorkerError) -> None:
    """Raise the error of a delivery that has failed already, if it is of a kind."""
    for delivery in deliveries:
        if delivery.ended and isinstance(delivery.error, kind):
            raise SyncError(str(delivery.error)) from delivery.error


def _left(deadline: float) -> float:
    """Seconds until a deadline.

    Raises:
        TimeoutError: it is over.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline is over")
    return left


def _raise_first(engines: Sequence[_Engine]) -> None:
    failures = {e.status.name: e.failure for e in engines if e.failure is not None}
    if failures:
        text = "; ".join(f"{name}: {failure}" for name, failure in failures.items())
        raise SyncError(text) from next(iter(failures.values()))
