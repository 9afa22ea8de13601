"""The resources that the trainer and its workers hold before and after a run."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from chaos_kit import worker as hosted
from sync_testing import eventually
from sync_testing.schemes import SharedGroup

Counts = dict[str, int]


class Resources:
    """Compares each process with itself, once it has been through a run.

    Objects that are made once and kept, such as a library's threads, are not leaks.

    Args:
        pool: the workers.
        worker_ids: their ids.
        late_connections: how many connections a library opens in each process when it first needs
            them, which may be after the first run, and keeps.
    """

    def __init__(
        self, pool: SharedGroup, worker_ids: Sequence[int], late_connections: int = 0
    ) -> None:
        self._pool = pool
        self._late_connections = late_connections
        self._worker_ids = worker_ids
        self._usual: dict[int | None, Counts] = {}
        self._opened: dict[int | None, list[str]] = {}

    def check(self, replaced: set[int]) -> Iterator[str]:
        """Return the resources that grew since the first run, with the workers alive.

        Args:
            replaced: the workers that are new since the last time.
        """
        for who in (None, *self._worker_ids):
            if who in replaced:
                self._usual.pop(who, None)
            if who not in self._usual:
                self._usual[who] = self._look(who, collect=True)
                self._opened[who] = self._descriptors(who)
            elif not eventually(partial(self._is_as_usual, who)):
                name = "the trainer" if who is None else f"worker {who}"
                now = self._look(who, collect=True)
                opened = self._descriptors(who)
                new = list((Counter(opened) - Counter(self._opened[who])).elements())
                yield f"{name} had {self._usual[who]}, and has {now}; it opened {new}"
                self._usual[who], self._opened[who] = now, opened

    def forget(self) -> None:
        """All workers are new."""
        self._usual.clear()

    def _descriptors(self, who: int | None) -> list[str]:
        if who is None:
            return hosted.descriptors()
        names: list[str] = self._pool.call(who, hosted.descriptors)
        return names

    def _is_as_usual(self, who: int | None) -> bool:
        usual = self._usual[who]
        # To collect garbage takes longer than most runs, so it is done only where it matters.
        looks = (self._look(who, collect=collect) for collect in (False, True))
        most = {**usual, "descriptors": usual["descriptors"] + self._late_connections}
        return any(all(now[name] <= count for name, count in most.items()) for now in looks)

    def _look(self, who: int | None, *, collect: bool) -> Counts:
        if who is not None:
            counts: Counts = self._pool.call(who, partial(hosted.resources, collect=collect))
            return counts
        tasks = Path("/proc/self/task").iterdir()
        children = sum(map(_count_children, tasks))
        counts = {**hosted.resources(collect=collect), "children": children}
        # Those of the group, which has none for a worker that a run has killed.
        counts["threads"] -= sum(t.name.startswith("sync worker") for t in threading.enumerate())
        return counts


def _count_children(task: Path) -> int:
    try:
        return len((task / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        return 0  # the thread has ended, and its children are another's
