"""Which workers a push goes out to: counts pushes, and asks `skip_update`."""

from __future__ import annotations

from collections.abc import Iterable

from sync_core.plugins.contexts import SkipContext
from sync_core.plugins.stack import Stack


class Cadence:
    """Counts, for each worker, the pushes since one last reached it."""

    def __init__(self, stack: Stack, model_id: str) -> None:
        self._stack = stack
        self._model_id = model_id
        self._pushes: dict[int, int] = {}

    def due(self, worker_ids: Iterable[int], version: int) -> tuple[int, ...]:
        """Count a push to each worker; those for whom no hook skips it."""
        if not self._stack.implements("skip_update"):
            return tuple(worker_ids)
        return tuple(worker_id for worker_id in worker_ids if self._is_due(worker_id, version))

    def reached(self, worker_ids: Iterable[int]) -> None:
        """These workers have committed a push."""
        self._pushes.update(dict.fromkeys(worker_ids, 0))

    def forget(self, worker_id: int) -> None:
        """Who has this id from now on was never reached."""
        self._pushes.pop(worker_id, None)

    def _is_due(self, worker_id: int, version: int) -> bool:
        updated = worker_id in self._pushes
        pushes = self._pushes.get(worker_id, 0) + 1
        if updated:
            self._pushes[worker_id] = pushes
        return not self._stack.skip_update(
            SkipContext(
                model_id=self._model_id,
                worker_id=worker_id,
                version=version,
                pushes=pushes,
                updated=updated,
            )
        )
