"""The words of TorchRL's weight updaters and receivers, in terms of `send` and `receive`."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from sync_core.errors import ModelError
from sync_core.report import SendReport
from sync_core.weights.payload import Update


class CollectorReference:
    """A weak reference to one collector; a base class of senders and receivers."""

    _collector: weakref.ref[Any] | None = None

    @property
    def collector(self) -> Any:
        """The collector that was registered; None before that, and after it was collected."""
        return None if self._collector is None else self._collector()

    def register_collector(self, collector: Any) -> None:
        """Keep a weak reference to the collector whose workers are updated.

        Raises:
            RuntimeError: a collector was registered before.
        """
        if self._collector is not None:
            raise RuntimeError(
                f"this {type(self).__name__} has a collector already, and serves one only; "
                f"make another {type(self).__name__} for another collector"
            )
        self._collector = weakref.ref(collector)


class Updater(CollectorReference, ABC):
    """The vocabulary of TorchRL's weight updaters, in terms of `send`."""

    def __init__(self) -> None:
        self._post_hooks: list[Callable[[], None]] = []

    @abstractmethod
    def send(
        self, weights: Any = None, worker_ids: int | Iterable[int] | None = None
    ) -> SendReport:
        """Send the weights as a new version, and wait until every worker has committed it."""

    @abstractmethod
    def _read(self) -> Update:
        """The model's weights as they are now; aliases of them."""

    @abstractmethod
    def all_worker_ids(self) -> tuple[int, ...]:
        """The ids of the workers."""

    def push_weights(
        self, policy_or_weights: Any = None, worker_ids: int | Iterable[int] | None = None
    ) -> SendReport:
        """Send the weights; the same as `send`."""
        return self.send(policy_or_weights, worker_ids)

    def update_weights(
        self, weights: Any = None, worker_ids: int | Iterable[int] | None = None
    ) -> SendReport:
        """Send the weights; the same as `send`."""
        return self.send(weights, worker_ids)

    def __call__(
        self, policy_or_weights: Any = None, worker_ids: int | Iterable[int] | None = None
    ) -> SendReport:
        """Send the weights; the same as `send`."""
        return self.send(policy_or_weights, worker_ids)

    @property
    def post_hooks(self) -> tuple[Callable[[], None], ...]:
        """The functions that run after every send, in the order of registration."""
        return tuple(self._post_hooks)

    def register_post_hook(self, hook: Callable[[], None]) -> None:
        """Run ``hook()`` in this process after every send that no worker failed.

        It runs as well when every worker was skipped.
        """
        self._post_hooks.append(hook)

    def _run_post_hooks(self) -> None:
        for hook in self._post_hooks:
            hook()

    def increment_version(self) -> None:
        """Tell the collector that its policy has a new version, which came another way."""
        collector = self.collector
        if collector is not None:
            collector.increment_version()

    def snapshot(self) -> Mapping[str, Tensor]:
        """A copy of the model's weights as they are now, in the CPU's memory."""
        update = self._read()
        copies = [tensor.detach().to("cpu", copy=True) for tensor in update.tensors]
        return dict(Update(update.layout, copies).items())


class Updated(CollectorReference, ABC):
    """The vocabulary of TorchRL's receivers, in terms of `receive`."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The version that the model has; 0 before the first commit."""

    @abstractmethod
    def receive(self, timeout: float | None = None) -> int | None:
        """Commit the newest version, if there is one that the model does not have."""

    @abstractmethod
    def apply_weights(self, weights: Any) -> None:
        """Commit weights given by hand; the version stays what it is."""

    def update_weights(self, weights: Any = None) -> int | None:
        """Commit the weights given, or what the sender has; see `apply_weights` and `receive`."""
        if weights is None:
            return self.receive()
        self.apply_weights(weights)
        return self.version

    def __call__(self, weights: Any = None) -> int | None:
        """Commit the weights given, or what the sender has; the same as `update_weights`."""
        return self.update_weights(weights)


def either(weights: Any, weights_dict: Mapping[str, Any] | None) -> Any:
    """Return the models to send, given in one of two ways.

    Raises:
        ValueError: both were given.
        ModelError: ``weights_dict`` is not a mapping.
    """
    if weights_dict is None:
        return weights
    if weights is not None:
        raise ValueError("weights and weights_dict were both given; leave one of them out")
    if not isinstance(weights_dict, Mapping):
        raise ModelError(
            f"weights_dict is a {type(weights_dict).__name__}; "
            'write it like {"policy": policy, "critic": critic}'
        )
    return weights_dict
