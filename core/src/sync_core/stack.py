"""The plugins of one sender or receiver in order, with one typed method for each hook."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import pluggy
from pluggy import HookImpl
from torch import Tensor

from sync_core import hooks as hookspecs
from sync_core._util import uninterrupted
from sync_core.errors import HookResultError, LoadError, UnknownHookError, WorkerError
from sync_core.hooks import (
    HOOKS,
    ApplyContext,
    HookManager,
    SendContext,
    SkipContext,
    TransportContext,
    check_hooks,
    hookimpl,
    implemented,
)
from sync_core.models.binding import Binding
from sync_core.models.extract import Strategy, check_loading, not_saved
from sync_core.printable import printable
from sync_core.registry import LAYERS, Plugin
from sync_core.transports.transport import ReceiverTransport, SenderTransport
from sync_core.weights.extras import attached
from sync_core.weights.layout import Layout
from sync_core.weights.payload import Update
from sync_core.wrapping import make_receiver, make_sender

# Not all of them: a token is a secret, and options may hold some.
_CONTEXT_FIELDS = ("side", "scheme", "model_id", "version", "worker_id", "worker_ids")


def trace_if_asked(manager: pluggy.PluginManager) -> bool:
    """Print the calls of a manager's hooks from now on, if the environment asks for it."""
    if os.environ.get("SYNC_TRACE") != "1":
        return False
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
            # In the order of the calls, the reverse of registration. The one without a name is the
            # core's own check of what plugins return.
            "plugins": ",".join(_names(impls)),
            **{name: getattr(context, name) for name in _CONTEXT_FIELDS if _has(context, name)},
            "seconds": f"{seconds:.6f}",
            "outcome": "ok" if outcome.exception is None else repr(outcome.exception),
        }
        line = f"sync-trace {' '.join(f'{k}={_written(v)}' for k, v in told.items())}"
        sys.stderr.write(f"{printable(line)}\n")

    manager.add_hookcall_monitoring(before, after)
    return True


def _names(impls: Sequence[HookImpl]) -> list[str]:
    names = [impl.plugin_name.partition(": ") for impl in reversed(impls)]
    return [name or number for number, _, name in names if name or number == "sync-core"]


def _has(context: Any, name: str) -> bool:
    return name in context.__dataclass_fields__


def _written(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


# How many names an error shows.
_SHOWN = 8


def _left_out(returned: Any, update: Update, model: Any) -> list[str]:
    """The names that a load function has not taken, by what it returned; see `Receiver`."""
    index = update.layout.index
    if isinstance(unexpected := getattr(returned, "unexpected_keys", None), (list, tuple)):
        left = list(map(str, unexpected))
    elif isinstance(returned, AbstractSet) or (isinstance(returned, (list, tuple)) and returned):
        # Other names are the engine's own, as of fused tensors, and say nothing about those sent.
        if any(not isinstance(name, str) or name not in index for name in returned):
            return []
        taken = set(returned)
        left = [name for name in index if name not in taken]
    else:
        return []
    if not left:
        return []
    # A tied tensor is taken under one of its names.
    positions = {index[name] for name in index.keys() - set(left)}
    computed = set(not_saved(model))
    return [
        name
        for name in left
        # Models compute the frequencies of rotary embeddings themselves.
        if not (index.get(name) in positions or name in computed or name.endswith("inv_freq"))
    ]


#: A worker's own way of loading named tensors, such as an engine's ``load_weights``.
Load: TypeAlias = Callable[[Iterable[tuple[str, Tensor]]], object]


class Defaults:
    """The core's own implementations; a stack calls them last.

    Args:
        strategy: how the model is bound when weights are first applied to it.
        consolidate: see `sync_core.models.Binding`.
        load: see `sync_core.Receiver`.
    """

    def __init__(
        self, strategy: Strategy, *, consolidate: bool = False, load: Load | None = None
    ) -> None:
        #: Whether the model may hold parts of a version: ``load``, or a copy into it, has raised.
        self.loading = False
        #: Whether an update was loaded, even if a layer raised afterwards; callers reset it.
        self.loaded = False
        self._load = load
        self._strategy = strategy
        self._consolidate = consolidate
        self._binding: Binding | None = None

    @hookimpl
    def prepare_weights(self, update: Update, context: SendContext) -> Update:
        """Send the update as it is."""
        del context
        return update

    @hookimpl
    def apply_weights(self, update: Update, model: Any, context: ApplyContext) -> bool:
        """Write the update into the model."""
        if self._load is not None:
            self._load_with(self._load, update, model, context)
            return True
        if self._binding is None or self._binding.model is not model:
            check_loading(model, self._strategy)
            self._binding = Binding(model, self._strategy, consolidate=self._consolidate)
        # Ctrl-C would leave parts of a version, or a version that is taken for the one before.
        with uninterrupted():
            try:
                self._binding.write(
                    update,
                    partial=context.partial,
                    zero_copy=context.zero_copy,
                    cast=context.cast,
                    version=context.version,
                )
            finally:
                self.loading = self._binding.torn
            self.loaded = True
        return True

    def _load_with(self, load: Load, update: Update, model: Any, context: ApplyContext) -> None:
        self.loading = True
        try:
            returned = load(update.items())
        except Exception as error:
            if isinstance(error, WorkerError) and error.failure:
                self.loading = error.model_state == "bad"
                raise
            raise LoadError(
                context.worker_id,
                f"its model may hold parts of version {context.version}: its load function raised "
                f"{type(error).__name__}: {error}",
            ) from error
        if left := _left_out(returned, update, model):
            names = update.layout.names
            raise LoadError(
                context.worker_id,
                f"its model may lack parts of version {context.version}: by what its load function "
                f"returned, it took {len(names) - len(left)} of {len(names)} tensors, and not "
                f"{', '.join(map(repr, left[:_SHOWN]))}{' …' * (len(left) > _SHOWN)}; "
                f"where it has other names, type Sender(…, "
                "layers=[rename(…)]), and strategy='checkpoint' leaves out buffers that are not "
                "persistent; if it leaves them out on purpose, let the function return None",
            )
        self.loading, self.loaded = False, True

    @hookimpl
    def skip_update(self, context: SkipContext) -> bool:
        """Skip no worker."""
        del context
        return False


class PluginStack:
    """Core defaults, then a backend, then layers; never changed after it is built.

    Args:
        defaults: the core's own implementations, called last.
        backend: the scheme.
        layers: each changes an update after the one before it, and undoes itself before it.

    Raises:
        UnknownHookError: a plugin has a hook that does not exist, or with arguments that the
            hook does not have.
    """

    def __init__(self, defaults: Any, backend: Plugin, layers: Sequence[Plugin] = ()) -> None:
        self._backend = backend
        # How long each ``prepare_weights`` took, with those inside of it, from the innermost on.
        self._took: list[tuple[str, float]] = []
        self._manager = HookManager()
        self._manager.add_hookspecs(hookspecs)
        self._manager.register(defaults, "sync-core")
        self._manager.register(_Loaded(defaults))
        plugins = [(plugin, implemented(plugin.object)) for plugin in (backend, *layers)]
        # Innermost, so that it sees what comes from implementations that wrap no other.
        self._register_check(plugins, wrappers=False)
        for position, (plugin, hooks) in enumerate(plugins):
            self._register(plugin, f"{position}: {plugin.name}")
            self._register_check([(plugin, hooks)], wrappers=True)
        traced = trace_if_asked(self._manager)
        self._extended = frozenset(hook for _, hooks in plugins for hook in hooks if hook in HOOKS)
        # Where only the core implements a hook, it is called directly, unless calls are traced.
        self._defaults = defaults
        self._hooked = frozenset(HOOKS) if traced else self._extended
        self._prepare_weights = self._find("prepare_weights")
        #: Loads an update into a model, by the arguments of the hook.
        self.apply_weights = self._find("apply_weights")

    def implements(self, hook: str) -> bool:
        """Return whether the backend or a layer implements the hook, and not the core alone."""
        return hook in self._extended

    def calls_plugins(self, hook: str) -> bool:
        """Return whether a call of the hook runs more than what the core does by default."""
        return hook in self._hooked

    def create_sender_transport(self, context: TransportContext) -> SenderTransport:
        """The sender's side of the backend's transport."""
        return make_sender(self._backend, context, self._manager)

    def create_receiver_transport(self, context: TransportContext) -> ReceiverTransport:
        """A receiver's side of the backend's transport."""
        return make_receiver(self._backend, context, self._manager)

    def prepare_weights(self, update: Update, context: SendContext) -> Update:
        """The update to send."""
        self._took.clear()
        prepared: Update = self._prepare_weights(update=update, context=context)
        return prepared

    def slowest(self) -> tuple[float, str]:
        """Return how long the slowest plugin took in the last `prepare_weights`, and its name."""
        inside = [0.0, *(seconds for _, seconds in self._took)]
        alone = [(took - inside[i], plugin) for i, (plugin, took) in enumerate(self._took)]
        return max(alone, default=(0.0, ""))

    def skip_update(self, context: SkipContext) -> bool:
        """Return whether the worker is left out of this push."""
        skipped: bool = self._manager.hook.skip_update(context=context)
        return skipped

    def _find(self, hook: str) -> Callable[..., Any]:
        """The function that calls all implementations of a hook."""
        found: Callable[..., Any] = getattr(
            self._manager.hook if hook in self._hooked else self._defaults, hook
        )
        return found

    def _register(self, plugin: Plugin, name: str) -> None:
        check_hooks(plugin.describe(), plugin.object)
        try:
            self._manager.register(plugin.object, name)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise UnknownHookError(f"{plugin.describe()} was refused: {error}") from error
        except ValueError as error:
            raise UnknownHookError(
                f"{plugin.describe()} is given twice; give each layer once, or its own object"
            ) from error

    def _register_check(
        self, plugins: Sequence[tuple[Plugin, Mapping[str, bool]]], *, wrappers: bool
    ) -> None:
        suspects = {
            hook: [plugin.describe() for plugin, hooks in plugins if hooks.get(hook) is wrappers]
            for hook in ("prepare_weights", "apply_weights", "skip_update")
        }
        if any(suspects.values()):
            self._manager.register(_Check(suspects, self._took))


class _Loaded:
    """Notes that a backend has loaded the model, before any layer continues after its ``yield``."""

    def __init__(self, defaults: Any) -> None:
        self._defaults = defaults

    @hookimpl(wrapper=True)
    def apply_weights(self) -> Generator[None, Any, Any]:
        result = yield
        self._defaults.loaded = True
        return result


class _Check:
    """Wraps what plugins return, so that the one that returned nonsense can be named.

    Registered right after a plugin, it sees that plugin's result before any other changes it.

    Args:
        suspects: the plugins whose result of a hook it sees first, by the hook.
        took: gets how long they took to prepare weights.
    """

    def __init__(
        self, suspects: Mapping[str, Sequence[str]], took: list[tuple[str, float]]
    ) -> None:
        self._suspects = suspects
        self._took = took

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Any, Update]:
        begin = time.perf_counter()
        result = yield
        if plugins := self._suspects["prepare_weights"]:
            self._took.append((" or ".join(plugins), time.perf_counter() - begin))
        if not isinstance(result, Update):
            raise self._error("prepare_weights", result, "an Update")
        return result

    @hookimpl(wrapper=True)
    def apply_weights(self) -> Generator[None, Any, bool]:
        result = yield
        if result is not True:
            raise self._error("apply_weights", result, "True (or None, to leave it to the core)")
        return result

    @hookimpl(wrapper=True)
    def skip_update(self) -> Generator[None, Any, bool]:
        result = yield
        if not isinstance(result, bool):
            raise self._error("skip_update", result, "True, False or None")
        return result

    def _error(self, hook: str, result: object, wanted: str) -> HookResultError:
        return HookResultError(
            f"{' or '.join(self._suspects[hook])}: {hook} returned {_kind(result)}, not {wanted}"
        )


def _kind(result: object) -> str:
    return "None" if result is None else f"a {type(result).__name__}"


class PushCounter:
    """Counts, for each worker, the pushes since one last reached it."""

    def __init__(self, stack: PluginStack, model_id: str) -> None:
        self._stack = stack
        self._model_id = model_id
        self._pushes: dict[int, int] = {}

    def due(self, worker_ids: Iterable[int], version: int) -> tuple[int, ...]:
        """Count a push to each worker, and return the workers that no hook skips."""
        if not self._stack.implements("skip_update"):
            return tuple(worker_ids)
        return tuple(worker_id for worker_id in worker_ids if self._is_due(worker_id, version))

    def reached(self, worker_ids: Iterable[int]) -> None:
        """These workers have committed a push."""
        self._pushes.update(dict.fromkeys(worker_ids, 0))

    def forget(self, worker_id: int) -> None:
        """Forget the pushes of a worker id that another worker takes."""
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


def layouts_before(
    defaults: object,
    backend: Plugin,
    layers: Sequence[Plugin],
    update: Update,
    context: SendContext,
) -> list[Layout]:
    """Prepare an update only for its layouts: what each layer is given, and last what travels.

    Args:
        defaults: see `PluginStack`.
        backend: the scheme.
        layers: in the order in which they prepare.
        update: the weights.
        context: of version 0.
    """
    seen = [_LayoutBefore() for _ in layers]
    watched: list[Plugin] = []
    for recorder, layer in zip(seen, layers, strict=True):
        watched += [Plugin(LAYERS, "layout", recorder), layer]
    prepared = PluginStack(defaults, backend, watched).prepare_weights(update, context)
    return [*(recorder.layout for recorder in seen), attached(prepared)[0]]


class _LayoutBefore:
    """Notes the layout that the next layer is given."""

    layout = Layout(())

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        update = yield
        self.layout = update.layout
        return update
