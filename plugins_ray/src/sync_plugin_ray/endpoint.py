"""What the address of a mailbox holds: it can be read in processes of a Ray cluster only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray

from sync_core.errors import AddressError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where receivers ask for versions.

    Args:
        mailbox: the actor.
    """

    mailbox: Any

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _of, (_Cluster(), self.mailbox)


class _Cluster:
    """Unpickled before the actor's handle is, which Ray alone can read, and says less of."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _check, ()


def _check() -> None:
    if not ray.is_initialized():
        raise AddressError(
            "an address of scheme 'ray' is for processes of the sender's cluster, and Ray does not "
            "run in this one; call ray.init(address=…) here first, or use Collector(…, "
            "workers='ray'), or scheme='shm' or 'dist'"
        )


def _of(cluster: None, mailbox: Any) -> Endpoint:
    del cluster
    return Endpoint(mailbox)
