"""Load whole versions into an engine while it is paused."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from sync_core import Delivery
from sync_plugin_vllm.driver import CONCLUDING, Driver, left
from sync_plugin_vllm.votes import NotLoadedError, Votes

#: The output label of an engine that has loaded only a part of a version.
BAD = "bad"


class WholeDriver(Driver):
    """Stages a version, pauses the engine, loads it, and resumes the engine."""

    _paused = False
    #: Whether an update was started and is not known to be finished.
    _unfinished = False
    #: When the pause for this update began (`time.perf_counter`); None without a pause.
    _pause_began: float | None = None

    def _bring(
        self,
        deliveries: Sequence[Delivery],
        described: dict[str, Any],
        votes: Votes,
        deadline: float,
    ) -> None:
        del described
        client, version = self._client, deliveries[0].version
        if self._unfinished:
            # This fails if the engine had not started the update.
            with suppress(Exception):
                client.step(left(deadline), step="updating")
                client.finish(left(deadline))
        self._unfinished = True
        client.start(left(deadline))
        self._check_staged(deliveries, deadline)
        self._agree(votes, "staged")
        self._pause_began = time.perf_counter()
        if not self._paused:
            # Do not resume an engine that its user has paused or only partly woken up.
            self._paused = not client.is_paused(left(deadline))
            client.pause(self._options.pause, left(deadline))
        self._agree(votes, "paused")
        # With all_or_none all engines load now, even if the deadline is close.
        seconds = deadline - time.monotonic()
        seconds = max(CONCLUDING, seconds) if self._options.all_or_none else left(deadline)
        self.torn = True
        self._load(partial(client.update, version, seconds), deliveries, deadline)
        client.finish(left(deadline))
        self._unfinished = False

    def _conclude(self, version: int, failure: Exception | None) -> None:
        """Set the status, label the outputs, and resume the engine unless it is torn."""
        if isinstance(failure, NotLoadedError):
            # If this fails, the next send finishes the update.
            with suppress(Exception):
                self._client.finish(CONCLUDING)
                self._unfinished = False
        try:
            if self.torn:
                self.set(state="bad", version=None, error=failure)
                self._client.label(BAD, CONCLUDING)
            elif failure is not None:
                self.set(state="behind", error=failure)
            else:
                self.set(state="current", version=version, error=None)
                self._client.label(str(version), CONCLUDING)
        finally:
            if self._paused and not self.torn:
                self._client.resume(CONCLUDING)
                self._paused = False
            began, self._pause_began = self._pause_began, None
            self.set(pause_seconds=0.0 if began is None else time.perf_counter() - began)
