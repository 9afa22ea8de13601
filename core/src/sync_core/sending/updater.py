"""What a collector and its hooks expect of whatever updates the workers' weights."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Self

from sync_core.report import SendReport


class Updater(ABC):
    """The vocabulary of TorchRL's weight updaters, in terms of `send`."""

    def __init__(self) -> None:
        self._post_hooks: list[Callable[[], None]] = []
        self._collector: weakref.ref[Any] | None = None

    @classmethod
    def from_policy(cls, policy: Any) -> Self | None:
        """An updater made for one policy; None, unless a subclass knows how to make one."""
        del policy
        return None

    def init(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 - a no-op is the default
        """Called by a collector's `init_updater`; does nothing unless a subclass does."""

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
        """The same as `send`."""
        return self.send(policy_or_weights, worker_ids)

    def __call__(
        self, policy_or_weights: Any = None, worker_ids: int | Iterable[int] | None = None
    ) -> SendReport:
        """The same as `send`."""
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

    @property
    def collector(self) -> Any:
        """The collector that was registered, or None when there is none any more."""
        return None if self._collector is None else self._collector()

    def register_collector(self, collector: Any) -> None:
        """Remember, by a weak reference, the collector whose workers are updated.

        Raises:
            RuntimeError: one was registered before.
        """
        if self._collector is not None:
            raise RuntimeError("an updater serves one collector, and one was registered already")
        self._collector = weakref.ref(collector)

    def increment_version(self) -> None:
        """Tell the collector that its policy has a new version, which came another way."""
        collector = self.collector
        if collector is not None:
            collector.increment_version()
