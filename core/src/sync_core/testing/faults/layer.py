"""A layer that raises in one of its hooks."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

from sync_core import ApplyContext, SendContext, SkipContext, hookimpl
from sync_core.testing.faults.fault import InjectedFaultError


class Raising:
    """Raises `InjectedFaultError` in a hook, once in each process: ``layers=[Raising(…)]``.

    A hook around others may raise before they run, or after them. To raise where a transport is
    made, give `Faulty` a fault at the point ``connect``.

    Args:
        hook: ``"prepare_weights"``, ``"apply_weights"`` or ``"skip_update"``.
        version: for which version.
        worker_ids: in which workers, or for which one `skip_update` is asked; None for all.
        late: raise after the hooks inside have run.

    Example:
        >>> layers = [Raising("prepare_weights", version=1)]
        >>> with Sender("thread", torch.nn.Linear(4, 2), num_workers=1, layers=layers) as sender:
        ...     sender.send()
        Traceback (most recent call last):
            ...
        sync_core.testing.faults.fault.InjectedFaultError: in prepare_weights for version 1
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

        # No methods: a layer counts as one that has every hook which it defines.
        setattr(self, hook, around)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Raising, late=self._late), (self._hook, self._version, self._worker_ids)

    def _raise(self, context: SendContext | ApplyContext | SkipContext, *, late: bool) -> None:
        # It is asked whether to skip with the newest version before the push.
        version = context.version + isinstance(context, SkipContext)
        if version != self._version or late is not self._late:
            return
        worker_id = -1 if isinstance(context, SendContext) else context.worker_id
        hurt = self._worker_ids is None or worker_id in (-1, *self._worker_ids)
        # Workers in one process each have their turn; the trainer has one.
        where = context.worker_id if isinstance(context, ApplyContext) else -1
        if hurt and where not in self._raised:
            self._raised.add(where)
            raise InjectedFaultError(f"in {self._hook} for version {version}")
