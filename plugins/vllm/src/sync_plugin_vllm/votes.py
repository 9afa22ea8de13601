"""Coordinate the steps of several engines, for ``VllmTarget(all_or_none=True)``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

from sync_core import TransportError, WorkerError

Step: TypeAlias = Literal["staged", "paused", "loaded"]


class NotLoadedError(TransportError):
    """An engine has staged a version but not loaded it; it keeps its weights.

    The engine is not at fault, so the sender's ``on_failure`` is not applied to its workers.
    """

    failure = "vllm-not-loaded"


class AsleepError(TransportError):
    """An engine is asleep, so it cannot load a version.

    The engine is not at fault, so the sender's ``on_failure`` is not applied to its workers.
    """

    failure = "vllm-asleep"


class AdapterError(WorkerError):
    """An engine has not loaded a version of an adapter; the version before stays usable."""

    failure = "vllm-adapter"


class Votes:
    """Votes on one version: an engine takes a step only after all have taken the step before.

    The steps are ``"staged"``, ``"paused"`` and ``"loaded"``. An adapter is loaded at the second
    step, without a pause, and no request uses it yet. If an engine fails before all are paused,
    none loads. A later failure does not affect the other engines.

    Args:
        members: the engines to wait for. Other engines follow their decision.
        deadline: the `time.monotonic` time at which late engines fail.

    Example:
        >>> votes = Votes(["a", "b"], deadline=time.monotonic() + 1)
        >>> votes.fail("b", MemoryError("no room"))
        >>> votes.pass_on("staged", "a"), votes.reason
        (False, 'b: no room')
    """

    def __init__(self, members: Iterable[str], deadline: float) -> None:
        self._changed = threading.Condition()
        self._deadline = deadline
        names = tuple(members)
        self._missing = {step: dict.fromkeys(names) for step in get_args(Step)}
        # One decision for each of the first two steps, so that all engines act alike.
        self._passed: dict[str, bool] = {}
        self._reason = ""

    @property
    def reason(self) -> str:
        """The reason why no engine loads the version; empty if the engines load it."""
        return self._reason

    def pass_on(self, step: Step, member: str) -> bool:
        """Report a step as taken, and wait until all engines have taken it.

        Returns:
            Whether all have taken it. If not, an engine failed or was late, and `reason` names it.
        """
        with self._changed:
            missing = self._missing[step]
            missing.pop(member, None)
            if not missing:
                self._decide(step, passed=True)
            while step not in self._passed:
                if not self._changed.wait(max(0.0, self._deadline - time.monotonic())):
                    if step != "loaded":
                        self._reason = self._reason or f"{', '.join(missing)}: was not in time"
                    self._decide(step, passed=False)
            return self._passed[step]

    def fail(self, member: str, error: object) -> None:
        """Note that an engine failed."""
        with self._changed:
            for step in ("staged", "paused"):
                if member in self._missing[step] and step not in self._passed:
                    self._reason = self._reason or f"{member}: {error}"
                    self._decide(step, passed=False)
            self._missing["loaded"].pop(member, None)
            if self._reason or not self._missing["loaded"]:
                self._decide("loaded", passed=not self._reason)

    def _decide(self, step: str, *, passed: bool) -> None:
        self._passed.setdefault(step, passed)
        self._changed.notify_all()
