"""A collector that is itself a worker: passes on what it receives to its own workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from sync_collector.collector_worker import CollectorWorker
from sync_collector.model_weights import ModelWeights
from sync_collector.schemes import POLICY, check_name
from sync_collector.worker_pool import WorkerPool
from sync_core import Address, ClosedError, ModelError, Receiver, SenderLostError, Update
from sync_core.checks import check_mapping
from sync_core.models import Binding, named_tensors

# How long one of several senders is listened to before the next one is, in seconds.
_TURN = 0.01


class PolicyRelay:
    """Receives a collector's models from senders elsewhere.

    A version is acknowledged when the collector's own workers have committed it, and not before;
    if some could not, the sender gets their error instead.

    Args:
        weights: the collector's models, and the way to its workers.
        pool: its workers; those that are found dead are replaced, if the pool does so.
    """

    def __init__(self, weights: ModelWeights, pool: WorkerPool) -> None:
        self._weights = weights
        self._pool = pool
        self._receivers: dict[str, Receiver] = {}
        # The only receiver, while a thread waits for it.
        self._listening: Receiver | None = None
        self._closed = False
        # A thread that iterates looks for weights too.
        self._lock = threading.Lock()

    def register(self, addresses: Mapping[str, Address]) -> None:
        """Get models from these senders from now on.

        Raises:
            TypeError: that is not a mapping from names.
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
                    # What only the workers have is received into a copy of their tensors.
                    copy = self._copied(name) if own is None else None
                    model = copy if own is None else own
                    passed_on = partial(self._pass_on, name, copy)
                    receivers[name] = Receiver(address, model, on_commit=passed_on)
            except BaseException:
                _close(receivers)
                raise
            _close({name: old for name, old in self._receivers.items() if name in receivers})
            self._receivers |= receivers

    def receive(self, timeout: float) -> dict[str, int]:
        """Pass on what has come, or what comes first within a time.

        Args:
            timeout: seconds to wait for a version of any model.

        Returns:
            The versions, by model; none for a model without a newer one.

        Raises:
            SenderLostError: a sender is gone; it is said once.
            SendError: some workers do not have the version.
        """
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            return {}
        try:
            received = self._received(0.0)
            while not received and self._receivers and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                received = self._wait(left)
            return received
        finally:
            self._release()

    def _wait(self, timeout: float) -> dict[str, int]:
        """Wait for a version; of several senders, each is listened to in turn."""
        if len(self._receivers) > 1:
            return self._received(min(timeout, _TURN))
        (self._listening,) = self._receivers.values()
        try:
            return {} if self._closed else self._received(timeout)
        except ClosedError:
            # `close` ends the wait.
            if not self._closed:
                raise
            return {}
        finally:
            self._listening = None

    def _received(self, patience: float) -> dict[str, int]:
        received = {}
        for name, receiver in list(self._receivers.items()):
            try:
                version = receiver.receive(patience)
            except SenderLostError:
                del self._receivers[name]
                raise
            if version is not None:
                received[name] = version
        return received

    def look(self) -> None:
        """Pass on new versions, unless another thread does so already."""
        if self._receivers and self._lock.acquire(blocking=False):
            try:
                self._received(0.0)
            finally:
                self._release()

    def receive_or_load(self, given: tuple[Any, ...], timeout: float) -> dict[str, int]:
        """Receive, or write weights given by hand into the policy and pass them on.

        Raises:
            ValueError: weights where there are senders, or neither.
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
        """Leave the senders, or have the thread that listens to them leave them."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            self._release()
        elif (listening := self._listening) is not None:
            listening.close()

    def _release(self) -> None:
        """Let others listen; the last one to do so after the end leaves the senders."""
        if self._closed:
            _close(self._receivers)
            self._receivers.clear()
        self._lock.release()
        # It may have ended between the two lines before.
        if self._closed and self._receivers:
            self.close()

    def _load(self, weights: Any) -> None:
        if POLICY not in self._weights.models:
            raise ModelError(
                "the collector has no policy of its own to load weights into; "
                "type update_policy_weights_(weights)"
            )
        model = Binding(self._weights.models[POLICY])
        model.write(Update.of(named_tensors(weights, "tensordict")))
        self._pass_on(POLICY)

    def read_model(self, name: str) -> Mapping[str, Tensor]:
        """Return a copy of a model's tensors as a worker has them; empty if it has none."""
        return self._pool.gather_one(
            self._pool.ids[0], f"read its {name!r}", CollectorWorker.read_model, name
        )

    def _copied(self, name: str) -> Mapping[str, Tensor]:
        """Return a copy of a model's tensors, which a worker must have."""
        tensors = self.read_model(name)
        if not tensors:
            raise ModelError(
                f"the workers' {name!r} has no tensors to receive into; register no sender for it"
            )
        return tensors

    def _pass_on(
        self, name: str, weights: Mapping[str, Tensor] | None = None, version: int = 0
    ) -> None:
        """Send a model to the collector's own workers.

        Args:
            name: the model's name.
            weights: its weights; None for the collector's own.
            version: not used.
        """
        del version
        if self._pool.dismissed:
            return  # after the last batch, no worker acts
        self._pool.see_through(lambda: self._weights.update({name: weights}, None, blocking=True))


def _close(receivers: Mapping[str, Receiver]) -> None:
    for receiver in receivers.values():
        receiver.close()
