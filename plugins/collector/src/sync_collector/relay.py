"""Lets a collector be a worker of another sender: passes received weights to its own workers."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from sync_collector.collector_worker import CollectorWorker
from sync_collector.model_weights import ModelWeights
from sync_collector.schemes import POLICY, check_name
from sync_collector.worker_pool import WorkerPool
from sync_core import (
    Address,
    ClosedError,
    ModelError,
    Receiver,
    SenderLostError,
    Update,
)
from sync_core.checks import check_mapping
from sync_core.models import Binding, named_tensors
from sync_core.transports import release_with
from sync_plugin_std import receive_together

# How long a thread waits for a version before it waits again, in seconds; `close` ends the wait.
_WAITING = 3600.0


class _Listener:
    """Stages the next version of one of several senders on its own thread.

    Args:
        name: the model's name.
        receiver: the receiver; this object closes it.
        arrived: gets an item whenever `take` has something to do.
    """

    def __init__(self, name: str, receiver: Receiver, arrived: queue.SimpleQueue[None]) -> None:
        self._receiver = receiver
        self._arrived = arrived
        self._ready = False
        self._error: Exception | None = None
        self._taken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(
            target=self._listen, name=f"sync-upstream-{name}", daemon=True
        )
        self._thread.start()

    def take(self) -> int | None:
        """Commit the staged version, and return it; None if there is none.

        Raises:
            SenderLostError: the sender is gone.
            SyncError: the version could not be received or committed.
        """
        if not self._ready:
            return None
        error, version = self._error, self._receiver.staged
        self._ready, self._error = False, None
        try:
            if error is not None:
                raise error
            receive_together({"": self._receiver}, {"": version}, 0.0)
            return version
        finally:
            self._taken.put(None)

    def close(self) -> None:
        """Close the receiver, and end the thread."""
        self._closed = True
        self._taken.put(None)
        self._receiver.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                if self._receiver.stage(_WAITING) is None:
                    continue
            except ClosedError:
                return
            except Exception as error:
                self._error = error
            self._ready = True
            self._arrived.put(None)
            self._taken.get()


class PolicyRelay:
    """Receives a collector's models from other senders, and passes them to the workers.

    A version is acknowledged after the collector's own workers have committed it. If a worker
    fails, the sender gets its error instead.

    Args:
        weights: sends the collector's models to its workers.
        pool: the workers. Dead ones are replaced, if the pool does so.
    """

    def __init__(self, weights: ModelWeights, pool: WorkerPool) -> None:
        self._weights = weights
        self._pool = pool
        self._receivers: dict[str, Receiver] = {}
        # The threads that wait for receivers, if there are several.
        self._listeners: dict[str, _Listener] = {}
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
        # The only receiver, while a thread waits for it.
        self._listening: Receiver | None = None
        self._closed = False
        # The threads must not keep the collector alive.
        self._end_listeners = release_with(self, _close, self._listeners)
        # Held while receiving, because the thread that iterates also looks for weights.
        self._lock = threading.Lock()

    def register(self, addresses: Mapping[str, Address]) -> None:
        """Receive models from these senders from now on.

        Raises:
            TypeError: the addresses are not a mapping from names.
            KeyError: the collector has no such model.
            ModelError: neither the collector nor its workers have weights of that name.
            WorkerTimeoutError: a worker that makes the model was not ready in time.
        """
        check_mapping(addresses, "addresses", "{'policy': sender.address(0)}")
        for name in addresses:
            check_name(name, self._weights.names)
        with self._lock:
            receivers: dict[str, Receiver] = {}
            try:
                for name, address in addresses.items():
                    own = self._weights.models.get(name)
                    # A model that only the workers have is received into a copy of their tensors.
                    copy = self._copied(name) if own is None else None
                    model = copy if own is None else own
                    passed_on = partial(_pass_on, weakref.ref(self), name, copy)
                    receivers[name] = Receiver(address, model, on_commit=passed_on)
            except BaseException:
                _close(receivers)
                raise
            for name in receivers.keys() & self._receivers.keys():
                self._leave(name)
            self._receivers |= receivers
            if len(self._receivers) > 1:
                self._listeners |= {
                    name: _Listener(name, receiver, self._arrived)
                    for name, receiver in self._receivers.items()
                    if name not in self._listeners
                }

    def receive(self, timeout: float) -> dict[str, int]:
        """Pass on versions that have arrived, or else the first that arrives in time.

        Args:
            timeout: seconds to wait for a version of any model.

        Returns:
            The versions by model, without models that have no newer one.

        Raises:
            SenderLostError: a sender is gone; raised once.
            SendError: some workers do not have the version.
        """
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            return {}
        try:
            received = self._receive_all(0.0)
            while not received and self._receivers and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                received = self._wait(left)
            return received
        finally:
            self._release()

    def _wait(self, timeout: float) -> dict[str, int]:
        """Wait for a version."""
        if self._listeners:
            with suppress(queue.Empty):
                self._arrived.get(timeout=timeout)
            return {} if self._closed else self._receive_all(0.0)
        (self._listening,) = self._receivers.values()
        try:
            return {} if self._closed else self._receive_all(timeout)
        except ClosedError:
            # `close` ends the wait.
            if not self._closed:
                raise
            return {}
        finally:
            self._listening = None

    def _receive_all(self, patience: float) -> dict[str, int]:
        received = {}
        for name, receiver in list(self._receivers.items()):
            listener = self._listeners.get(name)
            try:
                version = receiver.receive(patience) if listener is None else listener.take()
            except SenderLostError:
                self._leave(name)
                raise
            if version is not None:
                received[name] = version
        return received

    def look(self) -> None:
        """Pass on new versions, unless another thread is doing so."""
        if self._receivers and self._lock.acquire(blocking=False):
            try:
                self._receive_all(0.0)
            finally:
                self._release()

    def receive_or_load(self, given: tuple[Any, ...], timeout: float) -> dict[str, int]:
        """Receive from the senders; without senders, load the given weights and pass them on.

        Raises:
            ValueError: both weights and senders were given, or neither.
        """
        weights = [each for each in given if each is not None]
        if self._receivers:
            if weights:
                raise ValueError("weights come from the senders registered; give none")
            return self.receive(timeout)
        if len(weights) != 1:
            raise ValueError(
                "nothing to receive from; type register_scheme_receiver({'policy': "
                "sender.address(…)}), or give weights, once"
            )
        self._load(weights[0])
        return {}

    def close(self) -> None:
        """Close the receivers, or notify the thread that uses them to close them."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            self._release()
            return
        self._arrived.put(None)
        if (listening := self._listening) is not None:
            listening.close()

    def _release(self) -> None:
        """Release the lock; close the receivers if `close` was called meanwhile."""
        if self._closed:
            for name in list(self._receivers):
                self._leave(name)
        self._lock.release()
        # `close` may have been called between the two statements above.
        if self._closed and self._receivers:
            self.close()

    def _leave(self, name: str) -> None:
        """Close the receiver of a model."""
        receiver, listener = self._receivers.pop(name), self._listeners.pop(name, None)
        (receiver if listener is None else listener).close()

    def _load(self, weights: Any) -> None:
        if POLICY not in self._weights.models:
            raise ModelError(
                "the collector has no policy to load weights into; "
                "type update_policy_weights_(weights)"
            )
        model = Binding(self._weights.models[POLICY])
        model.write(Update.of(named_tensors(weights, "tensordict")))
        self.pass_on(POLICY)

    def read_model(self, name: str) -> Mapping[str, Tensor]:
        """Return a copy of a model's tensors in a worker; empty if it has none.

        Raises:
            ClosedError: the workers have ended.
        """
        if self._pool.dismissed:
            raise ClosedError(
                "the workers, which made their policies, have ended after the last batch; type "
                "evaluate(weights=…) to evaluate those of a model"
            )
        return self._pool.gather_one(
            self._pool.ids[0], f"read its {name!r}", CollectorWorker.read_model, name
        )

    def _copied(self, name: str) -> Mapping[str, Tensor]:
        """Return a copy of a model's tensors in a worker; raise if it has none."""
        tensors = self.read_model(name)
        if not tensors:
            raise ModelError(
                f"the workers' {name!r} has no tensors to receive into; register no sender for it"
            )
        return tensors

    def pass_on(self, name: str, weights: Mapping[str, Tensor] | None = None) -> None:
        """Send a model to the collector's own workers.

        Args:
            name: the model's name.
            weights: its weights; None for the collector's own.
        """
        if self._pool.dismissed:
            return  # after the last batch, no worker acts
        self._pool.see_through(lambda: self._weights.update({name: weights}, None, blocking=True))


def _pass_on(
    relay: weakref.ref[PolicyRelay], name: str, weights: Mapping[str, Tensor] | None, version: int
) -> None:
    del version
    found = relay()
    if found is None:
        raise ClosedError("the collector is gone")
    found.pass_on(name, weights)


def _close(opened: Mapping[str, Receiver | _Listener]) -> None:
    for each in list(opened.values()):
        each.close()
