"""A fault at a named point of one version's delivery, and layers that raise."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sync_core import ApplyContext, Layout, SendContext, SkipContext, hookimpl


class _Gated(Tensor):
    """A tensor that calls a function once, when its elements are first copied.

    In a fused copy of several tensors, the call comes when exactly the elements before it have been
    copied. Views have the same behaviour, because some schemes copy a view or the memory.
    """

    gate: Callable[[], object] | None
    before: int

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        name = getattr(function, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if cls.gate is not None and name == "_foreach_copy_":
                cls._copy_until_here(*args)
            elif cls.gate is not None and ("copy" in name or name == "numpy"):
                cls._open()
            result = function(*args, **(kwargs or {}))
            if cls.gate is not None and _is_view(result, args[0] if args else None):
                return result.as_subclass(cls)
            return result

    @classmethod
    def _copy_until_here(cls, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        here = next(i for i, source in enumerate(sources) if isinstance(source, cls))
        for target, source in zip(targets[:here], sources[:here], strict=True):
            target.copy_(source)
        if cls.before and targets[here].is_contiguous():
            part = sources[here].reshape(-1)[: cls.before]
            targets[here].view(-1)[: cls.before].copy_(part)
        cls._open()

    @classmethod
    def _open(cls) -> None:
        gate, cls.gate = cls.gate, None
        if gate is not None:
            gate()


def _is_view(result: object, source: object) -> bool:
    return (
        isinstance(result, Tensor)
        and isinstance(source, Tensor)
        and result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    )


def gated(
    tensors: Sequence[Tensor], layout: Layout, at_byte: int, gate: Callable[[], object]
) -> tuple[Tensor, ...]:
    """Return the same tensors, one of which calls a function when it is copied.

    Args:
        tensors: the tensors, in the order of ``layout.specs``.
        layout: the layout of the tensors.
        at_byte: a byte of the body. Its tensor gets the gate, or the last tensor if the body is
            shorter.
        gate: the function to call once.

    Example:
        >>> import torch
        >>> from sync_core import Layout
        >>> tensors = torch.ones(2), torch.ones(4)
        >>> targets = torch.zeros(2), torch.zeros(4)
        >>> layout = Layout.of({"a": tensors[0], "b": tensors[1]})
        >>> made = gated(tensors, layout, 64 + 8, lambda: print(*targets))
        >>> _ = torch._foreach_copy_(targets, made)
        tensor([1., 1.]) tensor([1., 1., 0., 0.])
        >>> targets[1]
        tensor([1., 1., 1., 1.])
    """
    ends = (spec.offset + spec.nbytes for spec in layout.specs)
    here = next((i for i, end in enumerate(ends) if end > at_byte), len(tensors) - 1)
    spec = layout.specs[here]
    before = max(0, at_byte - spec.offset) // spec.dtype.itemsize
    members = {"gate": staticmethod(gate), "before": min(before, tensors[here].numel())}
    kind = type("Gated", (_Gated,), members)
    made: Tensor = Tensor._make_subclass(kind, tensors[here].detach())
    return (*tensors[:here], made, *tensors[here + 1 :])


#: The points in a version's delivery, in order, and the actions allowed at each.
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
    """The error that an injected fault raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An action at one point of one version, once for each worker.

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
        point: the point at which it is done.
        version: the version whose delivery has the fault.
        worker_ids: the workers; None for all.
        at_byte: the byte in the body of the payload.
        seconds: the duration of the action.

    Raises:
        ValueError: there is no such point, or the action is not allowed there.

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
        """Return whether the fault is for this worker."""
        return self.worker_ids is None or worker_id in self.worker_ids


class Raising:
    """A layer that raises `InjectedFaultError` once per process: ``layers=[Raising("…", …)]``.

    The hook wraps other hooks, and raises before or after they run. To raise when a transport is
    made, give `Faulty` a fault at the point ``connect``.

    Args:
        hook: ``"prepare_weights"``, ``"apply_weights"`` or ``"skip_update"``.
        version: the version.
        worker_ids: the workers in which the hook raises, or for which `skip_update` does; None for
            all.
        late: raise after the hooks inside have run.

    Example:
        >>> import torch
        >>> from sync_core import Sender
        >>> layers = [Raising("prepare_weights", version=1)]
        >>> with Sender("thread", torch.nn.Linear(4, 2), num_workers=1, layers=layers) as sender:
        ...     sender.send()
        Traceback (most recent call last):
            ...
        sync_testing.faults.fault.InjectedFaultError: in prepare_weights for version 1
    """

    def __init__(
        self,
        hook: str,
        version: int,
        worker_ids: tuple[int, ...] | None = None,
        *,
        late: bool = False,
    ) -> None:
        if hook not in ("prepare_weights", "apply_weights", "skip_update"):
            raise ValueError(f"a layer has no hook {hook!r}")
        self._hook = hook
        self._version = version
        self._worker_ids = worker_ids
        self._late = late
        self._raised: set[int] = set()

        @hookimpl(wrapper=True)
        def around(context: Any) -> Generator[None, Any, Any]:
            self._raise(context, late=False)
            result = yield
            self._raise(context, late=True)
            return result

        # Set on the instance: as methods, they would make this a layer with every hook.
        setattr(self, hook, around)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Raising, late=self._late), (self._hook, self._version, self._worker_ids)

    def _raise(self, context: SendContext | ApplyContext | SkipContext, *, late: bool) -> None:
        # `skip_update` runs before the version is counted.
        version = context.version + isinstance(context, SkipContext)
        if version != self._version or late is not self._late:
            return
        worker_id = -1 if isinstance(context, SendContext) else context.worker_id
        hurt = self._worker_ids is None or worker_id in (-1, *self._worker_ids)
        # Workers in one process raise once each; the trainer raises once.
        where = context.worker_id if isinstance(context, ApplyContext) else -1
        if hurt and where not in self._raised:
            self._raised.add(where)
            raise InjectedFaultError(f"in {self._hook} for version {version}")
