"""Every hook call on stderr, one line each, where the environment has ``SYNC_TRACE=1``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pluggy
from pluggy import HookImpl

# Not all of them: a token is a secret, and options may hold some.
_CONTEXT_FIELDS = ("side", "scheme", "model_id", "version", "worker_id", "worker_ids")


def trace_if_asked(manager: pluggy.PluginManager) -> None:
    """Print the calls of a manager's hooks from now on, if the environment asks for it."""
    if os.environ.get("SYNC_TRACE") != "1":
        return
    began: list[float] = []

    def before(hook: str, impls: Sequence[HookImpl], arguments: Mapping[str, Any]) -> None:
        del hook, impls, arguments
        began.append(time.perf_counter())

    def after(
        outcome: pluggy.Result[Any],
        hook: str,
        impls: Sequence[HookImpl],
        arguments: Mapping[str, Any],
    ) -> None:
        seconds = time.perf_counter() - began.pop()
        context = arguments["context"]
        told = {
            "pid": os.getpid(),
            "hook": hook,
            # Called in this order, the reverse of that of registration. What has no name is the
            # core's own check of what plugins return.
            "plugins": ",".join(_names(impls)),
            **{name: getattr(context, name) for name in _CONTEXT_FIELDS if _has(context, name)},
            "seconds": f"{seconds:.6f}",
            "outcome": "ok" if outcome.exception is None else repr(outcome.exception),
        }
        sys.stderr.write(f"sync-trace {' '.join(f'{k}={_written(v)}' for k, v in told.items())}\n")

    manager.add_hookcall_monitoring(before, after)


def _names(impls: Sequence[HookImpl]) -> list[str]:
    names = [impl.plugin_name.partition(": ") for impl in reversed(impls)]
    return [name or number for number, _, name in names if name or number == "sync-core"]


def _has(context: Any, name: str) -> bool:
    return name in context.__dataclass_fields__


def _written(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
