"""The interface of a weight updater, as a collector and its hooks expect it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from sync_core._util import CollectorReference
from sync_core.report import SendReport


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
