"""Load versions of a sender into one engine, on a thread for each engine.

`VllmTarget` has a `Driver` for each engine: a `sync_plugin_vllm.whole_update.WholeDriver` or a
`sync_plugin_vllm.adapter_update.AdapterDriver`, which implement the steps.
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

#: The time for the last step of a send, such as resuming an engine, even after the deadline, in
#: seconds; estimate. An engine with whole weights must not stay paused.
CONCLUDING = 5.0

# How long to wait for a rank's answer after its call has returned, in seconds; estimate.
_ANSWERING = 1.0

#: Valid names of adapters, which become parts of names in vLLM and of paths.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The state of an engine, as known to the trainer.

    Args:
        name: its URL or its type.
        worker_ids: the sender's worker ids of its ranks.
        state: ``"unconnected"``: no rank is connected to the sender. ``"current"``: all ranks have
            the newest version. ``"behind"``: all ranks have an older version, or nothing was sent
            yet. ``"bad"``: a rank may have parts of a version, or ranks have different versions.
            ``"lost"``: a rank has died, or has lost its weights by ``sleep(level=2)``.
        version: the version that it generates with; 0 for the weights it was started with, None
            while it is bad or lost.
        pause_seconds: how long it was paused for the last update; 0 for adapters and if it was not
            paused.
        error: why the last update failed, or None.
        adapter: the name of the adapter for new requests, such as ``"policy-v7"``; None before the
            first one and without ``adapter``.
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
    """The options of `VllmTarget` for loading versions."""

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
    """Another engine has failed, so no engine loads the version."""


class Driver(ABC):
    """Drives one engine, with a thread for each call.

    Args:
        client: the client of the engine.
        worker_ids: the sender's worker ids of its ranks.
        options: the options for loading versions.
    """

    def __init__(self, client: Client, worker_ids: tuple[int, ...], options: Options) -> None:
        self.status = EngineStatus(client.name, worker_ids)
        #: The error of the last call; None if it succeeded.
        self.failure: Exception | None = None
        #: Whether a load was started that not all ranks have confirmed.
        self.torn = False
        self.thread: threading.Thread | None = None
        self._client = client
        self._options = options
        # Whether the status includes the last call; changed together with the status, under the
        # lock.
        self._concluded = True
        self._lock = threading.Lock()

    @classmethod
    def describe(cls, model: Any, *, verify: bool) -> dict[str, Any]:
        """Describe the sender's model for the ranks, as fields of ``SyncCoreInitInfo``."""
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
        """Load a version into the engine; return once all ranks have answered."""

    def _refuse(self, reason: Exception) -> None:
        """Make the ranks refuse the staged version, if they do not do so on their own."""
        del reason

    @abstractmethod
    def _conclude(self, version: int, failure: Exception | None) -> None:
        """Set the status, and end the update.

        Args:
            version: the version.
            failure: why a rank does not have it; None if all have it.
        """

    @property
    def key(self) -> str:
        """The name of the target in a vote; engines of the same process have the same."""
        return f"{self.status.name} (workers {', '.join(map(str, self.status.worker_ids))})"

    def set(self, **changes: Any) -> None:
        """Change the status, which then includes the last call."""
        with self._lock:
            self.status = replace(self.status, **changes)
            self._concluded = True

    def is_free(self) -> bool:
        """Return whether the last call has ended; if not, record that as the failure."""
        if self.thread is not None and self.thread.is_alive():
            self.failure = SyncError("the call before has not returned")
            return False
        self.failure, self._concluded = None, False
        return True

    def begin(self, work: Callable[[], None]) -> None:
        """Start a call on a thread."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                self.failure = error

        self.thread = threading.Thread(target=run, name="sync-vllm", daemon=True)
        self.thread.start()

    def join(self, deadline: float) -> None:
        """Wait for the call, and update the status if the call is late or was never begun.

        An interrupt may come before a call begins.
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
        """Load one version into the engine; the ranks' answers decide whether that succeeded."""
        ids = self.status.worker_ids
        deliveries = [pending.deliveries[i] for i in ids if i in pending.deliveries]
        torn, failure = self.torn, None
        try:
            if len(deliveries) < len(ids):
                raise SyncError("the sender has dropped some of its ranks; type target.remove(…)")
            # For example, a rank has died or was connected to another sender.
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
        """Fail the deliveries to an engine that will not answer."""
        for worker_id in self.status.worker_ids:
            if worker_id in pending.deliveries and not pending.deliveries[worker_id].ended:
                error = WorkerError(worker_id, f"{self.status.name}: {reason}")
                pending.deliveries[worker_id].fail(error)

    def _agree(self, votes: Votes, step: Step) -> None:
        """Take a step together with the other engines.

        Raises:
            OthersFailedError: another engine has failed.
        """
        if not votes.pass_on(step, self.key):
            raise OthersFailedError(votes.reason)

    def _load(
        self, call: Callable[[], object], deliveries: Sequence[Delivery], deadline: float
    ) -> None:
        """Call the engine to load a version, and wait for the ranks' answers to the sender.

        The answers decide, even if the reply to the call itself is lost.
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
        """Raise if a rank has refused the version or, with ``all_or_none``, has not staged it."""
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
    """Raise the error of a failed delivery, if any has an error of this kind."""
    for delivery in deliveries:
        if delivery.ended and isinstance(delivery.error, kind):
            raise SyncError(str(delivery.error)) from delivery.error


def left(deadline: float) -> float:
    """Return the seconds until a deadline.

    Raises:
        TimeoutError: the deadline has passed.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the deadline is over")
    return seconds
