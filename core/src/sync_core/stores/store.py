"""What an author writes of a scheme over a store, and the options that each of them has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from sync_core.errors import OptionError


class Store(ABC):
    """Keeps bytes under names: a folder, a bucket of an object store, Redis.

    Both sides make one of their own, which has to lead to the same bytes. Methods are called by
    several threads and processes at once, must not wait for ever, and may raise whatever they
    like. Names have two parts, as in ``"sync-0123456789abcdef/sender.json"``; the first is the
    same for all that belongs to one sender, and for no other.

    Example:
        >>> class Memory(Store):
        ...     def __init__(self): self.kept = {}
        ...     def put(self, name, data): self.kept[name] = data
        ...     def get(self, name): return self.kept.get(name)
        ...     def delete(self, name): self.kept.pop(name, None)
        >>> memory = Memory()
        >>> memory.put("sync-0123456789abcdef/sender.json", b"{}")
        >>> memory.get("sync-0123456789abcdef/sender.json")
        b'{}'
    """

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Keep bytes under a name, in place of those that may be there.

        From its return on, `get` gives these bytes everywhere; until then, all of the old ones,
        or of these.
        """

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """All the bytes that were put last under a name; None where there are none."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Keep nothing under a name any more. It may be that nothing is there."""


@dataclass(frozen=True)
class StoreOptions:
    """Options that every scheme over a store has; those of its own go into a subclass.

    A subclass may declare other defaults, such as a longer ``poll`` where each look costs.

    Args:
        poll: seconds between two looks into the store, of who waits for something in it.
        lost_after: seconds without a sign of life after which a peer counts as dead; a tenth of
            that is between two signs.
        keep: how many versions are left in the store, for other tools and slow workers.

    Raises:
        OptionError: one of them makes no sense.

    Example:
        >>> @dataclass(frozen=True)
        ... class BucketOptions(StoreOptions):
        ...     bucket: str = "weights"
        ...     poll: float = 0.5
        >>> BucketOptions(lost_after=30.0)
        BucketOptions(poll=0.5, lost_after=30.0, keep=2, bucket='weights')
    """

    poll: float = 0.005
    lost_after: float = 5.0
    keep: int = 2

    def __post_init__(self) -> None:
        if self.poll <= 0 or self.lost_after <= 0:
            raise OptionError(
                f"poll={self.poll} and lost_after={self.lost_after} are seconds, more than 0"
            )
        if self.keep < 1:
            raise OptionError(f"keep={self.keep} leaves no version; it is 1 or more")
