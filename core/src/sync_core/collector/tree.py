"""A collector that is itself a worker: passes on what it receives to its own workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from sync_core.address import Address
from sync_core.binding import Binding
from sync_core.collector.given import check_name
from sync_core.collector.schemes import POLICY
from sync_core.collector.several import SeveralModels
from sync_core.collector.weights import PolicyWeights
from sync_core.errors import ModelError, SenderLostError
from sync_core.extract import named_tensors
from sync_core.receiver import Receiver
from sync_core.update import Update


class Upstream:
    """Receives a collector's models from senders elsewhere.

    A version is acknowledged when the collector's own workers have committed it, and not before;
    if some could not, the sender gets their error instead.

    Args:
        weights: the collector's models, and the way to its workers.
    """

    def __init__(self, weights: PolicyWeights | SeveralModels) -> None:
        self._weights = weights
        self._receivers: dict[str, Receiver] = {}
        # A thread that iterates looks for weights too.
        self._lock = threading.Lock()

    def register(self, addresses: Mapping[str, Address]) -> None:
        """Get models from these senders from now on.

        Raises:
            KeyError: the collector has no such model.
            ModelError: its workers make the model, so there is none here that could be written to.
        """
        for name in addresses:
            check_name(name, self._weights.names)
            if name not in self._weights.models:
                raise ModelError(
                    f"the collector has no {name!r} of its own to receive into; give it one, not "
                    "a factory"
                )
        with self._lock:
            for name, address in addresses.items():
                old = self._receivers.pop(name, None)
                if old is not None:
                    old.close()
                model = self._weights.models[name]
                passed_on = partial(self._pass_on, name)
                self._receivers[name] = Receiver(address, model, on_commit=passed_on)

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
        with self._lock:
            deadline = time.monotonic() + timeout
            while True:
                received = self._received(0.0)
                left = deadline - time.monotonic()
                if received or left <= 0 or not self._receivers:
                    return received
                # With several senders, each is listened to for a moment, in turn.
                received = self._received(left if len(self._receivers) == 1 else _GLANCE)
                if received:
                    return received

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
        """Pass on what has come."""
        if self._receivers:
            self.receive(0)

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
        """Leave the senders; whoever is waiting for them at this moment leaves them by itself."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            for receiver in self._receivers.values():
                receiver.close()
            self._receivers.clear()
        finally:
            self._lock.release()

    def _load(self, weights: Any) -> None:
        if POLICY not in self._weights.models:
            raise ModelError(
                "the collector has no policy of its own to load weights into; "
                "type update_policy_weights_(weights)"
            )
        model = Binding(self._weights.models[POLICY])
        model.write(Update.of(named_tensors(weights, "tensordict")))
        self._pass_on(POLICY)

    def _pass_on(self, name: str, version: int = 0) -> None:
        del version
        self._weights.update({name: None}, None, blocking=True)


# How long one of several senders is listened to before the next one is.
_GLANCE = 0.01
