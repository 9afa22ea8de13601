"""What a transport may tell its sender about a worker between two sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Notice:
    """News of a worker, for `TransportContext.notify`.

    A transport need not know any of it: what becomes of its deliveries is heard in any case.

    Args:
        kind: ``"connected"``, a receiver has taken the worker's place, and has no version yet;
            ``"lost"``, the worker is gone; ``"acknowledged"``, it has committed a version for
            which there is no delivery: the one that it got when it joined, or an old one.
        version: the version, where one was acknowledged.
        reason: one sentence, where the worker is lost.
    """

    kind: Literal["connected", "lost", "acknowledged"]
    version: int = 0
    reason: str = ""


def unheard(worker_id: int, notice: Notice) -> None:
    """Where nobody listens."""
    del worker_id, notice
