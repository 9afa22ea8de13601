"""The trainer's side: load versions of a sender into vLLM engines."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sync_core import Address, OptionError, PendingSend, Sender, SendReport, SyncError
from sync_core.checks import check_seconds
from sync_plugin_vllm.adapter_update import AdapterDriver
from sync_plugin_vllm.clients import Pause, client_for
from sync_plugin_vllm.driver import CONCLUDING, Driver, EngineStatus, Options
from sync_plugin_vllm.votes import Votes
from sync_plugin_vllm.whole_update import WholeDriver

# With ``all_or_none``, the share of a send's time that is reserved for resuming engines after one
# was late; estimate.
_RESERVE = 0.1

# Worker states for which a send does not wait.
_UNWAITED = ("quarantined", "restarting")


class VllmTarget:
    """Loads versions of a `Sender` into vLLM engines.

    Each rank of each engine is a worker of the sender. A send packs the weights once and updates
    all engines concurrently: each engine stages the version, pauses, loads it, and resumes.

    Args:
        engines: a ``vllm.LLM`` in this process, a Ray actor with its methods, the URL of ``vllm
            serve``, or a list of these. Each engine must be started with
            ``weight_transfer_config=WeightTransferConfig(backend="sync_core")``.
        pause: what happens to a server's requests in progress. ``"keep"``: they continue with the
            new weights, and vLLM attributes each token to the version that made it. ``"wait"``: the
            update waits until they end. ``"abort"``: they end at once.
        verify: whether each rank compares the outputs of its layers with the sent weights after
            each load. If they differ, the engine is ``"bad"``, and the error names the layers. With
            ``adapter``, `connect` compares the base model once.
        all_or_none: whether engines take each step together: all stage the version, then all pause,
            then all load it, then all resume. If one fails before loading, none loads: the others
            fail with `NotLoadedError`, which the sender's ``on_failure`` ignores, and resume with
            their old weights. If an engine cannot load an adapter, the others unload it again.
        adapter: the name of a LoRA adapter, such as ``"policy"``, for a sender with
            ``layers=[lora("adapter")]``. Version 7 is loaded as the adapter ``"policy-v7"``,
            without a pause, and the version before is unloaded. Requests choose the adapter with
            `lora_request`, or on a server by the name ``target.engines[0].adapter``.
        adapter_directory: the directory on the engines' machines for adapter files; None for this
            machine's directory of temporary files.
        timeout: the deadline of each call, in seconds; for a send, of all its steps together.

    Raises:
        OptionError: ``engines`` is not an engine.
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
        self._options = Options(pause, verify, all_or_none, adapter, adapter_directory)
        self._driver: type[Driver] = WholeDriver if adapter is None else AdapterDriver
        self._timeout = check_seconds(timeout)
        self._sender: Sender | None = None
        self._closed = False
        self._forget_sender: Callable[[], object] | None = None
        self._engines: list[Driver] = []
        self._sending = threading.RLock()
        several = engines if isinstance(engines, list | tuple) else [engines]
        for engine in several:
            client = client_for(engine)
            first = self.num_workers
            ids = tuple(range(first, first + client.world_size(self._timeout)))
            self._engines.append(self._driver(client, ids, self._options))

    @property
    def num_workers(self) -> int:
        """The ``num_workers`` of the sender: the ranks of all engines."""
        return sum(len(engine.status.worker_ids) for engine in self._engines)

    @property
    def engines(self) -> tuple[EngineStatus, ...]:
        """The status of each engine, in the given order."""
        return tuple(self._status(engine.status) for engine in self._engines)

    def lora_request(self, index: int = 0) -> Any:
        """Return the ``LoRARequest`` for the newest adapter of an engine.

        Call this before each ``generate``, since the files of unloaded adapters are gone.

        Args:
            index: the index in `engines` of an ``LLM`` or a Ray actor.

        Raises:
            OptionError: the engine is a server, whose requests name the adapter, or no version of
                an adapter was sent yet.
        """
        return self._engines[index].lora_request(index)

    def connect(self, sender: Sender, addresses: Sequence[Address] | None = None) -> None:
        """Connect every rank of every engine to a sender that has a worker for each.

        Args:
            sender: the sender; in a sharded trainer, the sender of the rank that calls `send`.
            addresses: in a sharded trainer, the address from ``join_addresses`` for each worker.

        Raises:
            OptionError: the sender does not have these workers.
            SyncError: an engine has refused; the others are connected.
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
                # After engines have left, an earlier sender had other ids.
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
        """Connect another engine, which receives the next version that is sent.

        Returns:
            The ids of its workers in the sender.

        Raises:
            SyncError: the engine has refused or cannot be reached; nothing was added.
        """
        sender = self._connected()
        client = client_for(engine)
        num_ranks = client.world_size(self._timeout)
        with self._sending:
            ids = tuple(sender.add_worker() for _ in range(num_ranks))
            added = self._driver(client, ids, self._options)
            self._engines.append(added)
            try:
                self._connect([added])
            except BaseException:
                self.remove(len(self._engines) - 1)
                raise
        return ids

    def remove(self, index: int) -> None:
        """Remove an engine, such as one that has died.

        Args:
            index: its index in `engines`.
        """
        sender = self._connected()
        with self._sending:
            removed = self._engines.pop(index)
            for worker_id in set(removed.status.worker_ids) & {*sender.all_worker_ids()}:
                sender.remove_worker(worker_id)

    def send(self, weights: Any = None, *, timeout: float | None = None) -> SendReport:
        """Load a version into all engines, and wait until they generate with it.

        Args:
            weights: see `Sender.send`.
            timeout: the deadline of the whole send, in seconds; None for the target's.

        Returns:
            The result for each rank; `engines` has the status of each engine.

        Raises:
            SendError: some ranks have failed. The other engines have the version or, with
                ``all_or_none``, keep the one before. A ``"bad"`` engine, if it can be paused, makes
                no tokens until another send succeeds.
            SyncError: an engine failed after it had loaded the version, or no engine is connected.
        """
        sender = self._connected()
        seconds = self._timeout if timeout is None else check_seconds(timeout)
        deadline = time.monotonic() + seconds
        with self._sending:
            model = sender.model if weights is None else weights
            described = self._driver.describe(model, verify=False)
            free = [engine for engine in self._engines if engine.is_free()]
            pending = sender.send_async(weights, timeout=seconds)
            try:
                votes = self._votes(pending, deadline - min(CONCLUDING, _RESERVE * seconds))
                for engine in self._engines:
                    if engine in free:
                        engine.begin(partial(engine.update, pending, votes, described, deadline))
                    else:
                        votes.fail(engine.key, engine.failure)
                        engine.fail(pending, engine.failure)
                report = pending.wait()
            except BaseException as error:
                pending.interrupt(error)
                raise
            finally:
                for engine in free:
                    engine.join(deadline)
            _raise_first(self._engines)
            return report

    def _settle(self) -> None:
        """Keep the last known status of the engines when their sender is closed."""
        for engine in self._engines:
            engine.status = self._status(engine.status)
        self._closed = True

    def _status(self, status: EngineStatus) -> EngineStatus:
        """Return the status of an engine, updated with the sender's state of its ranks."""
        if self._sender is None or self._closed or status.state in ("unconnected", "bad"):
            return status
        workers = self._sender.workers
        known = [workers[i] for i in status.worker_ids if i in workers]
        # A rank without weights rejoins its sender as a worker without a version.
        if any(w.state == "lost" or (status.version and not w.version) for w in known):
            return replace(status, state="lost", version=None)
        return status

    def _connect(
        self, engines: Sequence[Driver], addresses: Sequence[Address] | None = None
    ) -> None:
        deadline = time.monotonic() + self._timeout
        sender = self._connected()
        described = self._driver.describe(sender.model, verify=self._options.verify)
        free = [engine for engine in engines if engine.is_free()]
        for engine in free:
            given = [
                sender.address(i) if addresses is None else addresses[i]
                for i in engine.status.worker_ids
            ]
            engine.begin(partial(engine.connect, given, described, deadline))
        for engine in free:
            engine.join(deadline)
        _raise_first(engines)

    def _votes(self, pending: PendingSend, deadline: float) -> Votes:
        """Return the votes on a version, with the engines that the send waits for as members."""
        if not self._options.all_or_none:
            return Votes((), deadline)
        unanswered, statuses = pending.unanswered, self._connected().workers
        waited = {
            worker_id
            for worker_id, status in statuses.items()
            if worker_id in unanswered or status.state not in _UNWAITED
        }
        members = [e.key for e in self._engines if waited.issuperset(e.status.worker_ids)]
        return Votes(members, deadline)

    def _connected(self) -> Sender:
        if self._sender is None:
            raise SyncError("the engines have no sender yet; type target.connect(sender)")
        return self._sender


def _settle(target: weakref.ref[VllmTarget]) -> None:
    if (alive := target()) is not None:
        alive._settle()


def _raise_first(engines: Sequence[Driver]) -> None:
    failures = {e.status.name: e.failure for e in engines if e.failure is not None}
    if failures:
        text = "; ".join(f"{name}: {failure}" for name, failure in failures.items())
        raise SyncError(text) from next(iter(failures.values()))
