"""What the trainer and its workers have open before a run, and after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from sync_core.testing.chaos.worker import resources
from sync_core.testing.schemes.pool import Pool
from sync_core.testing.worker_groups import eventually

Counts = dict[str, int]


class Resources:
    """Compares each process with itself, once it has been through a run.

    What is made once and kept, such as the threads of a library, is not to be counted as a leak.

    Args:
        pool: the workers.
        worker_ids: their ids.
    """

    def __init__(self, pool: Pool, worker_ids: Sequence[int]) -> None:
        self._pool = pool
        self._worker_ids = worker_ids
        self._warm: set[int | None] = set()
        self._before: dict[int | None, Counts] = {}

    def begin(self) -> None:
        """Look before a run."""
        self._before = {who: self._look(who) for who in self._warm}

    def end(self, replaced: set[int]) -> Iterator[str]:
        """What there is more of; the workers must live, and have left.

        Args:
            replaced: the workers that are new since `begin`.
        """
        for who in (None, *self._worker_ids):
            if who in replaced:
                self._warm.discard(who)
            elif who in self._warm and not eventually(partial(self._is_as_before, who)):
                name = "the trainer" if who is None else f"worker {who}"
                yield f"{name} had {self._before[who]}, and has {self._look(who)}"
            else:
                self._warm.add(who)

    def forget(self) -> None:
        """All workers are new."""
        self._warm &= {None}

    def _is_as_before(self, who: int | None) -> bool:
        before, now = self._before[who], self._look(who)
        return all(now[name] <= count for name, count in before.items())

    def _look(self, who: int | None) -> Counts:
        if who is not None:
            counts: Counts = self._pool.call(who, resources)
            return counts
        tasks = Path("/proc/self/task").iterdir()
        children = sum(len((task / "children").read_text().split()) for task in tasks)
        return {**resources(), "children": children}
