"""One fault: what is done, at which point on the way of a version, and to whom."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

#: The points on the way of a version, in its order, and what can be done there.
POINTS = MappingProxyType(
    {
        "connect": frozenset({"kill", "stop", "delay", "raise"}),
        "receive": frozenset({"kill", "stop", "delay", "raise"}),
        "transfer": frozenset({"kill", "stop", "delay", "raise", "fork", "exec"}),
        "staged": frozenset(
            {"kill", "stop", "delay", "raise", "drop", "duplicate", "corrupt", "misname"}
        ),
        "commit": frozenset({"kill", "stop", "delay"}),
        "acknowledge": frozenset({"kill", "stop", "delay", "raise", "drop", "duplicate"}),
    }
)


class InjectedFaultError(Exception):
    """What a fault raises; no code but a test's expects it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is done at one point on the way of one version; once for each worker.

    =============== ==============================================================================
    point           when
    =============== ==============================================================================
    ``connect``     a receiver is made while the version before this one is the newest
    ``receive``     the worker is about to ask for the version
    ``transfer``    the sender packs the tensor in which the byte ``at_byte`` lies; a scheme that
                    sends part by part has sent the parts before, which may be on their way still
    ``staged``      the worker has all of the version, and has committed nothing of it
    ``commit``      the bytes before ``at_byte`` are in the model, and no others; never, where
                    ``zero_copy`` moves pointers and no bytes
    ``acknowledge`` the worker has committed, or could not, and is about to say so
    =============== ==============================================================================

    =============== ==============================================================================
    action          what is done
    =============== ==============================================================================
    ``kill``        SIGKILL for the worker's process
    ``stop``        SIGSTOP for it, and SIGCONT after ``seconds`` if those are given
    ``delay``       nothing, for ``seconds``
    ``raise``       `InjectedFaultError`
    ``drop``        the version, or the answer, is lost
    ``duplicate``   it comes twice
    ``corrupt``     one bit of the byte ``at_byte`` is changed
    ``misname``     the version comes with names that are not the model's
    ``fork``        the trainer forks a child that lives for ``seconds`` and does nothing
    ``exec``        the trainer starts a program that runs for ``seconds``
    =============== ==============================================================================

    At ``transfer``, ``kill`` and ``stop`` are for workers, which `Faulty` must be able to find;
    the other actions are for the trainer.

    Args:
        action: what is done.
        point: when.
        version: on the way of which version.
        worker_ids: to which workers; None for all.
        at_byte: which byte of the body of the payload.
        seconds: for how long.

    Raises:
        ValueError: no such point, or an action that it does not allow.

    Example:
        >>> Fault(action="drop", point="commit", version=2)
        Traceback (most recent call last):
            ...
        ValueError: at 'commit' one can delay, kill, stop, not 'drop'
    """

    action: str
    point: str
    version: int
    worker_ids: tuple[int, ...] | None = None
    at_byte: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise ValueError(f"there is no point {self.point!r}; the points: {', '.join(POINTS)}")
        if self.action not in POINTS[self.point]:
            known = ", ".join(sorted(POINTS[self.point]))
            raise ValueError(f"at {self.point!r} one can {known}, not {self.action!r}")

    def is_for(self, worker_id: int) -> bool:
        """Whether the worker is one that is hurt."""
        return self.worker_ids is None or worker_id in self.worker_ids
