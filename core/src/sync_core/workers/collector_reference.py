"""The collector that a sender or a receiver belongs to."""

from __future__ import annotations

import weakref
from typing import Any


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
