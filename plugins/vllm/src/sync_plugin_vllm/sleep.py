"""Track whether the weights of a rank are asleep or discarded.

vLLM puts each rank to sleep with a *sleep-mode backend*: ``suspend(1)`` moves the weights to the
host, and ``suspend(2)`` discards them. vLLM does not notify weight transfer engines. So
`watch_sleep` wraps the configured backend in one that reports sleep. It registers the wrapper in
vLLM's own registry before vLLM makes the backend at the first sleep.

vLLM for CPUs ignores sleep: it keeps the weights and makes no backend.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory

from sync_plugin_vllm.votes import AsleepError

_WEIGHTS = "weights"
_numbers = itertools.count(1)


class WeightMemory:
    """The state of a rank's weights: asleep or awake, discarded or not.

    Args:
        on_discard: a method to call after weights were discarded. Its object, which has the model,
            is held weakly, since vLLM's registry never drops backends.
    """

    def __init__(self, on_discard: Callable[[], None]) -> None:
        self._on_discard = weakref.WeakMethod(on_discard)
        #: Whether the weights cannot be read or written.
        self.asleep = False
        #: Whether the weights were discarded and not loaded since.
        self.discarded = False

    def left(self, *, kept: bool) -> None:
        """Note that the memory was released, and whether a copy of the weights was kept."""
        self.asleep = True
        if not kept:
            self.discarded = True
            if (on_discard := self._on_discard()) is not None:
                on_discard()

    def error(self, worker_id: int) -> AsleepError:
        """Return the error with which a sleeping rank refuses a version."""
        fate = "lost its weights" if self.discarded else "kept its weights"
        return AsleepError(
            worker_id,
            f"the engine is asleep and has {fate}: wake it up before a send, by "
            'llm.wake_up(tags=["weights"]), or POST /wake_up?tags=weights of a server',
        )


class WatchedBackend(SleepModeBackend):
    """A sleep-mode backend that wraps and reports on another; `watch_sleep` makes subclasses."""

    memory: ClassVar[WeightMemory]
    watched: ClassVar[type[SleepModeBackend]]

    def __init__(self) -> None:
        super().__init__()
        self._backend = self.watched()

    def suspend(self, level: int = 1) -> None:
        try:
            self._backend.suspend(level)
        finally:
            self.memory.left(kept=level == 1)

    def resume(self, tags: list[str] | None = None) -> None:
        self._backend.resume(tags)
        if tags is None or _WEIGHTS in tags:
            self.memory.asleep = False

    def discard(self, tags: tuple[str, ...]) -> None:
        try:
            self._backend.discard(tags)
        finally:
            if _WEIGHTS in tags:
                self.memory.left(kept=False)

    def state(self) -> Any:
        return self._backend.state()

    @classmethod
    def is_supported(cls) -> bool:
        return bool(cls.watched.is_supported())

    @classmethod
    def preserves_communicators(cls) -> bool:
        return bool(cls.watched.preserves_communicators())

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        return bool(cls.watched.preserves_compiled_artifacts())

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        return bool(cls.watched.preserves_graphs_with_communicators())

    @classmethod
    def supports_durable_storage(cls) -> bool:
        return bool(cls.watched.supports_durable_storage())


def watch_sleep(model_config: Any, on_discard: Callable[[], None]) -> WeightMemory:
    """Track the sleep of this process's rank.

    Args:
        model_config: vLLM's configuration of the model; its ``sleep_mode_backend`` is replaced.
        on_discard: a method to call after weights were discarded.

    Returns:
        The state of the weights' memory, which is updated from now on.
    """
    memory = WeightMemory(on_discard)
    watched = SleepModeBackendFactory.get_backend_class(model_config.sleep_mode_backend)
    if issubclass(watched, WatchedBackend):
        watched = watched.watched  # the configuration has served another engine
    # Each engine needs its own class, since vLLM makes a backend from names of module and class.
    name = f"Watched{next(_numbers)}"
    attributes = {"memory": memory, "watched": watched, "__module__": __name__}
    setattr(sys.modules[__name__], name, type(name, (WatchedBackend,), attributes))
    model_config.sleep_mode_backend = f"sync_core-{name}"
    SleepModeBackendFactory.register_backend(model_config.sleep_mode_backend, __name__, name)
    return memory
