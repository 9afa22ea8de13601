"""Stores that are broken in one way each, under the transport that is made of any store."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from sync_core import ReceiverTransport, SenderTransport, TransportContext, hookimpl
from sync_plugin_std.stores import Store, StoreOptions, store_transport
from sync_testing import SchemeConformance

#: What mutants leak on purpose, for the test to release.
released = threading.Event()


class Shelf(Store):
    """Keeps bytes in this process; each class its own."""

    caught_by: ClassVar[str]
    #: Of a mutant's sender, which is not to wait long for what never comes.
    options: ClassVar[Mapping[str, Any]] = {"timeout": 1.0}
    kept: ClassVar[dict[str, bytes]] = {}

    def __init_subclass__(cls) -> None:
        cls.kept = {}

    def put(self, name: str, data: bytes) -> None:
        self.kept[name] = data

    def get(self, name: str) -> bytes | None:
        return self.kept.get(name)

    def delete(self, name: str) -> None:
        self.kept.pop(name, None)


class GivesWhatIsHalfWritten(Shelf):
    """As a file that is written where readers look."""

    caught_by = "test_every_worker_gets_every_version"

    def put(self, name: str, data: bytes) -> None:
        super().put(name, data[: len(data) // 2])
        time.sleep(0.02)  # several looks of a reader
        super().put(name, data)


class GivesHalfAVersion(Shelf):
    """As a file that has its length before it has its bytes."""

    caught_by = "test_every_worker_gets_every_version"

    def put(self, name: str, data: bytes) -> None:
        half = 0 if name.endswith(".json") else len(data) // 2
        super().put(name, data[: len(data) - half] + bytes(half))


class GivesTheOneBefore(Shelf):
    """As a copy that hears of what is put when more is."""

    caught_by = "test_the_newest_version_is_the_one_that_counts"
    # Nothing but sends puts anything meanwhile.
    options = {"lost_after": 60.0}

    def __init__(self) -> None:
        self._unheard: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        super().put(name, self._unheard.get(name, data))
        self._unheard[name] = data


class LosesLaterPuts(Shelf):
    """As a bucket whose objects are written once."""

    caught_by = "test_every_worker_gets_every_version"
    options = {"lost_after": 1.0, "timeout": 3.0}

    def put(self, name: str, data: bytes) -> None:
        self.kept.setdefault(name, data)


class CannotDeleteNothing(Shelf):
    caught_by = "test_a_closed_sender"

    def delete(self, name: str) -> None:
        del self.kept[name]


class CutsWhatIsLong(Shelf):
    """As a key-value server that has a largest value."""

    caught_by = "test_a_large_model_arrives_at_all_workers"

    def put(self, name: str, data: bytes) -> None:
        super().put(name, data[: 1 << 20])


class LooksAtTheLastPartOfNames(Shelf):
    caught_by = "test_two_senders_at_once"

    def put(self, name: str, data: bytes) -> None:
        super().put(name.rpartition("/")[2], data)

    def get(self, name: str) -> bytes | None:
        return super().get(name.rpartition("/")[2])

    def delete(self, name: str) -> None:
        super().delete(name.rpartition("/")[2])


class ShelfScheme:
    """A scheme over one of these stores."""

    capabilities = frozenset({"broadcast", "late_join", "pull"})

    def __init__(self, store: type[Shelf]) -> None:
        self._store = store

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        return store_transport(context, self._store(), context.parse_options(StoreOptions))


MUTANTS: tuple[type[Shelf], ...] = tuple(Shelf.__subclasses__())


class TestBaseline(SchemeConformance):
    """The base of all mutants, which passes every case that one of them fails."""

    scheme = ShelfScheme(Shelf)
    group = "thread"


globals().update(
    {
        f"Test{mutant.__name__}": type(
            f"Test{mutant.__name__}",
            (SchemeConformance,),
            {
                "scheme": ShelfScheme(mutant),
                "options": mutant.options,
                "slack": 1.0,
                "group": "thread",
                "__module__": __name__,
            },
        )
        for mutant in MUTANTS
    }
)
CAUGHT_BY = {f"Test{mutant.__name__}": mutant.caught_by for mutant in MUTANTS} | {
    "TestBaseline": ""
}
