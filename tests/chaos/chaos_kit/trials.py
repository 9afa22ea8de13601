"""The faults that are tried, each with its documented result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from sync_core import (
    ApplyError,
    CapacityError,
    CorruptionError,
    LayoutMismatchError,
    WorkerError,
    WorkerLostError,
    WorkerTimeoutError,
)
from sync_testing.faults import Fault, InjectedFaultError, Raising

Fate = Literal["gone", "old", "new", "old or new"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A fault, and what is to become of the workers that it strikes.

    Args:
        faults: templates, in which version and workers are filled in.
        error: what the report says of a worker that was hurt; None if it is updated.
        fate: what its model holds afterwards.
        hook: the hook in which a layer raises.
        late: whether the layer raises after the hooks inside it.
        sends: False where the send itself raises, and no worker gets anything.
        needs_processes: whether the workers must be their own processes.
        copies: whether it strikes only where bytes are copied into the model.
        outlasts: whether the fault takes longer than the deadline.
        burns: how many versions a send that raises uses up.
        raises: what receiving raises in the workers that are hurt.
        lenient: whether it may be without effect, or else fail in any way that is reported.
        squeeze: the side that has no descriptors left during the send.
        verified: whether only checksums notice the fault.
    """

    faults: tuple[Fault, ...] = ()
    error: type[WorkerError] | None = None
    fate: Fate = "new"
    hook: str | None = None
    late: bool = False
    sends: bool = True
    needs_processes: bool = False
    copies: bool = False
    outlasts: bool = False
    burns: int = 0
    raises: tuple[type[Exception], ...] = (InjectedFaultError,)
    lenient: bool = False
    squeeze: Literal["nobody", "trainer", "workers"] = "nobody"
    verified: bool = False

    def faults_for(self, version: int, worker_ids: tuple[int, ...], deadline: float) -> list[Fault]:
        """The faults on the way of a version to some workers, of a sender with a deadline."""
        made = [replace(f, version=version, worker_ids=worker_ids) for f in self.faults]
        if self.outlasts:
            made = [replace(fault, seconds=deadline + 0.5) for fault in made]
        return made

    def layers_for(self, version: int, worker_ids: tuple[int, ...]) -> list[Raising]:
        """The layers that raise."""
        if self.hook is None:
            return []
        return [Raising(self.hook, version, worker_ids, late=self.late)]

    @property
    def stops(self) -> bool:
        """Return whether processes stay stopped until they are woken."""
        return any(fault.action == "stop" and not fault.seconds for fault in self.faults)


# In the middle of the model of `chaos_kit.worker`.
_MIDDLE = 600_000


def _at(point: str, action: str, seconds: float = 0.0) -> tuple[Fault, ...]:
    fault = Fault(action=action, point=point, version=0, at_byte=_MIDDLE, seconds=seconds)
    if point != "transfer" or action not in ("kill", "stop"):
        return (fault,)
    # The version packed before must be in transfer.
    return replace(fault, action="delay", seconds=0.1), fault


def _hurt(action: Literal["kill", "stop"], point: str) -> Trial:
    return Trial(
        faults=_at(point, action),
        error=WorkerLostError if action == "kill" else WorkerTimeoutError,
        fate="gone" if action == "kill" else "old or new",
        needs_processes=True,
        copies=point == "commit",
    )


#: The faults, by name; what is listed here is all there is to add for a new one.
TRIALS: Mapping[str, Trial] = MappingProxyType(
    {
        "none": Trial(),
        "kill before receive": _hurt("kill", "receive"),
        "kill in transfer": _hurt("kill", "transfer"),
        "kill when staged": _hurt("kill", "staged"),
        "kill in commit": _hurt("kill", "commit"),
        "kill before answer": _hurt("kill", "acknowledge"),
        "stop before receive": _hurt("stop", "receive"),
        "stop in transfer": _hurt("stop", "transfer"),
        "stop when staged": _hurt("stop", "staged"),
        "stop in commit": _hurt("stop", "commit"),
        "stop before answer": _hurt("stop", "acknowledge"),
        "pause in transfer": Trial(faults=_at("transfer", "stop", 0.3), needs_processes=True),
        "delay when staged": Trial(faults=_at("staged", "delay", 0.3)),
        "delay in transfer": Trial(faults=_at("transfer", "delay", 0.3)),
        "answer too late": Trial(
            faults=_at("acknowledge", "delay"), error=WorkerTimeoutError, outlasts=True
        ),
        "drop the version": Trial(
            faults=_at("staged", "drop"), error=WorkerTimeoutError, fate="old"
        ),
        "drop the answer": Trial(
            faults=_at("acknowledge", "drop"), error=WorkerTimeoutError, fate="new"
        ),
        "the version twice": Trial(faults=_at("staged", "duplicate")),
        "the answer twice": Trial(faults=_at("acknowledge", "duplicate")),
        "wrong names": Trial(
            faults=_at("staged", "misname"),
            error=ApplyError,
            fate="old",
            raises=(LayoutMismatchError,),
        ),
        "corrupt the version": Trial(
            faults=_at("staged", "corrupt"),
            verified=True,
            error=CorruptionError,
            fate="old",
            raises=(CorruptionError,),
        ),
        "raise in receive": Trial(
            faults=_at("staged", "raise"), error=WorkerTimeoutError, fate="old"
        ),
        "raise in answer": Trial(
            faults=_at("acknowledge", "raise"), error=WorkerTimeoutError, fate="new"
        ),
        "raise in send": Trial(faults=_at("transfer", "raise"), fate="old", sends=False, burns=1),
        "raise in prepare": Trial(hook="prepare_weights", fate="old", sends=False),
        "raise in skip": Trial(hook="skip_update", fate="old", sends=False),
        "raise in apply": Trial(hook="apply_weights", error=ApplyError, fate="old"),
        # A layer that raises after the weights were written takes nothing back.
        "raise after apply": Trial(hook="apply_weights", late=True, error=ApplyError, fate="new"),
        "fork in transfer": Trial(faults=_at("transfer", "fork", 0.5)),
        "exec in transfer": Trial(faults=_at("transfer", "exec", 0.5)),
        "no descriptors in the trainer": Trial(squeeze="trainer"),
        "no descriptors in workers": Trial(
            squeeze="workers",
            needs_processes=True,
            lenient=True,
            fate="old or new",
            raises=(CapacityError, OSError),
            error=WorkerTimeoutError,
        ),
    }
)
