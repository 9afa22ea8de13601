"""Brings versions of a sender into one engine, in its own thread.

`VllmTarget` has a `Driver` for each engine: a `sync_plugin_vllm.whole_update.WholeDriver` or a
`sync_plugin_vllm.adapter_update.AdapterDriver`, which know the steps.
"""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from sync_core import Address, Delivery, OptionError, PendingSend, SyncError, WorkerError
from sync_plugin_vllm.clients import Client, Pause
from sync_plugin_vllm.votes import AsleepError, NotLoadedError, Step, Votes

State: TypeAlias = Literal["unconnected", "current", "behind", "bad", "lost"]

#: What ends a send, such as resuming an engine, may take, also after the deadline, in seconds;
#: estimate. An engine with whole weights must not stay paused.
CONCLUDING = 5.0

# How long the answer of a rank may take after its call has ended without one, in seconds; estimate.
_ANSWERING = 1.0

#: The names of adapters, which are parts of names in vLLM and of paths.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


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
        pause_seconds: how long it was paused for the last update; 0 where it was not, and for
            adapters.
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


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `VllmTarget` by which versions are loaded."""

    pause: Pause = "keep"
    verify: bool = False
    all_or_none: bool = False
    adapter: str | None = None
    adapter_directory: str | None = None

    def __post_init__(self) -> None:
        if self.pause not in ("keep", "wait", "abort"):
            raise OptionError(f"pause must be 'keep', 'wait' or 'abort', not {self.pause!r}")
        for name in ("verify", "all_or_none"):
            if not isinstance(value := getattr(self, name), bool):
                raise OptionError(f"{name} must be True or False, got {value!r}")
        adapter, parent = self.adapter, self.adapter_directory
        if adapter is not None and not (isinstance(adapter, str) and _NAME.fullmatch(adapter)):
            raise OptionError(
                "adapter must be a name of letters, digits, '.', '_' and '-', such as 'policy', "
                f"got {adapter!r}"
            )
        if parent is not None and not (isinstance(parent, str) and Path(parent).is_absolute()):
            raise OptionError(
                "adapter_directory must be an absolute path on the machines of the engines, got "
                f"{parent!r}"
            )


class OthersFailedError(SyncError):
    """Another engine has failed, and none loads the version."""


class Driver(ABC):
    """One engine, and the thread of its last call.

    Args:
        client: the engine.
        worker_ids: its ranks, by their ids in the sender.
        options: how versions are loaded.
    """

    def __init__(self, client: Client, worker_ids: tuple[int, ...], options: Options) -> None:
        self.status = EngineStatus(client.name, worker_ids)
        #: Why the last call failed; None if it did not.
        self.failure: Exception | None = None
        #: Whether its ranks were asked to load a version, and have not all answered that they did.
        self.torn = False
        self.thread: threading.Thread | None = None
        self._client = client
        self._options = options
        # Whether the status is that of the last call; changed with the status, under the lock.
        self._concluded = True
        self._lock = threading.Lock()

    @classmethod
    def describe(cls, model: Any, *, verify: bool) -> dict[str, Any]:
        """Return what ranks must know of the sender's model: fields of ``SyncCoreInitInfo``."""
        del model, verify
        return {}

    def lora_request(self, index: int) -> Any:
        """See `VllmTarget.lora_request`."""
        raise OptionError(
            f"the engine {index} gets whole versions, and no adapter; type VllmTarget(…, adapter=…)"
        )

    @abstractmethod
    def _bring(
        self,
        deliveries: Sequence[Delivery],
        described: dict[str, Any],
        votes: Votes,
        deadline: float,
    ) -> None:
        """Bring a version into the engine; all ranks have answered when it returns."""

    def _refuse(self, reason: Exception) -> None:
        """Have the ranks refuse what they have staged, where that has to be asked for."""
        del reason

    @abstractmethod
    def _conclude(self, version: int, failure: Exception | None) -> None:
        """Set the status, and end the update.

        Args:
            version: the version.
            failure: why not all ranks have it; None if they do.
        """

    @property
    def key(self) -> str:
        """The name of the target in a vote; engines in one process share theirs."""
        return f"{self.status.name} (workers {', '.join(map(str, self.status.worker_ids))})"

    def set(self, **changes: Any) -> None:
        """Change the status, which is that of the last call from now on."""
        with self._lock:
            self.status = replace(self.status, **changes)
            self._concluded = True

    def is_free(self) -> bool:
        """Return whether the call before has ended; else that is its failure."""
        if self.thread is not None and self.thread.is_alive():
            self.failure = SyncError("the call before has not returned")
            return False
        self.failure, self._concluded = None, False
        return True

    def begin(self, work: Callable[[], None]) -> None:
        """Start a call in a thread."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                self.failure = error

        self.thread = threading.Thread(target=run, name="sync-vllm", daemon=True)
        self.thread.start()

    def join(self, deadline: float) -> None:
        """Wait for the call, and note what is known of the engine if it is late, or has not begun.

        An interrupt may come before it begins.
        """
        if self.thread is not None and self.thread.ident is not None:
            self.thread.join(max(0.0, deadline - time.monotonic()))
            if self.thread.is_alive():
                self.failure = TimeoutError("did not return before the deadline")
        with self._lock:
            if not self._concluded and self.status.state != "unconnected":
                self.status = replace(self.status, state="bad" if self.torn else "behind")
            if self.failure is not None and self.status.error is None:
                self.status = replace(self.status, error=self.failure)

    def connect(
        self, addresses: Sequence[Address], described: dict[str, Any], deadline: float
    ) -> None:
        """Connect each rank to the sender."""
        texts = [address.to_json() for address in addresses]
        info = {"addresses": texts, "verify": self._options.verify, **described}
        self._client.init(info, left(deadline))
        if self.torn:
            self.set(state="bad", version=None, error=None)
        else:
            self.set(state="behind", version=0, error=None)

    def update(
        self, pending: PendingSend, votes: Votes, described: dict[str, Any], deadline: float
    ) -> None:
        """Bring one version into the engine; what ranks have answered decides whether it has it."""
        ids = self.status.worker_ids
        deliveries = [pending.deliveries[i] for i in ids if i in pending.deliveries]
        torn, failure = self.torn, None
        try:
            if len(deliveries) < len(ids):
                raise SyncError("the sender has dropped some of its ranks; type target.remove(…)")
            # Such as ranks that have died, or were connected to another sender.
            _raise_refusal(deliveries, WorkerError)
            self._bring(deliveries, described, votes, deadline)
        except OthersFailedError as others:
            for delivery in deliveries:
                message = f"{self.status.name} did not load version {pending.version}: {others}"
                delivery.fail(NotLoadedError(delivery.worker_id, message))
        except Exception as error:
            failure = error
            votes.fail(self.key, error)
            self._refuse(error)
            self.fail(pending, error)
        errors = [delivery.error for delivery in deliveries if delivery.error is not None]
        if len(deliveries) == len(ids) and not errors:
            self.torn, failure = False, None
        else:
            failure = errors[0] if errors else failure
            if all(d.answer is not None and d.answer.model_state == "kept" for d in deliveries):
                self.torn = torn
        votes.pass_on("loaded", self.key)
        self._conclude(pending.version, failure)

    def fail(self, pending: PendingSend, reason: object) -> None:
        """End the deliveries to an engine that will not answer."""
        for worker_id in self.status.worker_ids:
            if worker_id in pending.deliveries and not pending.deliveries[worker_id].ended:
                error = WorkerError(worker_id, f"{self.status.name}: {reason}")
                pending.deliveries[worker_id].fail(error)

    def _agree(self, votes: Votes, step: Step) -> None:
        """Take a step together with the other engines.

        Raises:
            OthersFailedError: one of them could not.
        """
        if not votes.pass_on(step, self.key):
            raise OthersFailedError(votes.reason)

    def _load(
        self, call: Callable[[], object], deliveries: Sequence[Delivery], deadline: float
    ) -> None:
        """Make the call in which ranks load a version, and wait for their answers to the sender.

        These count where the answer to the call itself is lost.
        """
        try:
            call()
        except Exception:
            until = min(deadline, time.monotonic() + _ANSWERING)
            for delivery in deliveries:
                if not delivery.wait(max(0.0, until - time.monotonic())) or delivery.error:
                    raise
        for delivery in deliveries:
            delivery.wait(left(deadline))

    def _check_staged(self, deliveries: Sequence[Delivery], deadline: float) -> None:
        """Raise if a rank has refused a version, or with ``all_or_none`` has not staged it."""
        _raise_refusal(deliveries, WorkerError)
        if not self._options.all_or_none:
            return
        try:
            self._client.step(left(deadline), step="check", version=deliveries[0].version)
        except Exception:
            for delivery in deliveries:
                if delivery.wait(min(_ANSWERING, left(deadline))):
                    _raise_refusal([delivery], AsleepError)
            raise


def _raise_refusal(deliveries: Sequence[Delivery], kind: type[Exception]) -> None:
    """Raise the error of a delivery that has failed already, if it is of a kind."""
    for delivery in deliveries:
        if delivery.ended and isinstance(delivery.error, kind):
            raise SyncError(str(delivery.error)) from delivery.error


def left(deadline: float) -> float:
    """Seconds until a deadline.

    Raises:
        TimeoutError: it is over.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the deadline is over")
    return seconds
