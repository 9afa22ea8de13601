"""The stack: order of layers, and the plugin named that returned nonsense."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from sync_core import ApplyContext, SendContext, SkipContext, TransportContext, Update, hookimpl
from sync_core.errors import HookResultError, UnknownHookError
from sync_core.registry import Plugin
from sync_core.stack import PluginStack

SEND = SendContext(model_id="policy", version=1, worker_ids=(0,))
APPLY = ApplyContext(model_id="policy", version=1, worker_id=0, zero_copy=False, partial=False)
SKIP = SkipContext(model_id="policy", worker_id=0, version=1, pushes=1, updated=True)
TRANSPORT = TransportContext(side="sender", scheme="x", model_id="policy", token="", timeout=1.0)


class Defaults:
    def __init__(self) -> None:
        self.applied: list[float] = []

    @hookimpl
    def prepare_weights(self, update: Update) -> Update:
        return update

    @hookimpl
    def apply_weights(self, update: Update) -> bool:
        self.applied.append(float(update.tensors[0]))
        return True

    @hookimpl
    def skip_update(self) -> bool:
        return False


class Affine:
    """Multiplies and adds on the way out; the opposite on the way in."""

    def __init__(self, factor: float, term: float) -> None:
        self.factor, self.term = factor, term

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        update = yield
        update.replace([tensor * self.factor + self.term for tensor in update.tensors])
        return update

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update) -> Generator[None, bool, bool]:
        update.replace([(tensor - self.term) / self.factor for tensor in update.tensors])
        return (yield)


def stack(*plugins: object) -> PluginStack:
    backend, *layers = [Plugin("sync.layers", type(p).__name__, p) for p in plugins]
    return PluginStack(Defaults(), backend, layers)


def one() -> Update:
    return Update.of({"w": torch.tensor(1.0)})


def test_layers_change_in_the_order_given_and_undo_in_mirrored_order() -> None:
    defaults = Defaults()
    layers = [Plugin("sync.layers", str(i), Affine(*v)) for i, v in enumerate([(2, 1), (10, 5)])]
    built = PluginStack(defaults, Plugin("sync.schemes", "backend", object()), layers)
    prepared = built.prepare_weights(one(), SEND)
    assert float(prepared.tensors[0]) == (1 * 2 + 1) * 10 + 5
    built.apply_weights(update=prepared, model=None, context=APPLY)
    assert defaults.applied == [1.0]


def test_what_is_implemented_besides_the_defaults() -> None:
    built = stack(object(), Affine(1, 0))
    assert built.implements("prepare_weights")
    assert built.implements("apply_weights")
    assert not built.implements("skip_update")


class BadTransport:
    @hookimpl
    def create_transport(self) -> Any:
        return 3


class BadPrepare:
    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Any, Any]:
        yield


class BadApply:
    @hookimpl
    def apply_weights(self) -> Any:
        return "done"


class BadSkip:
    @hookimpl
    def skip_update(self) -> Any:
        return "yes"


def test_the_plugin_that_returned_nonsense_is_named() -> None:
    good = Affine(1, 0)
    with pytest.raises(HookResultError, match="'BadTransport': create_transport returned a int"):
        stack(BadTransport()).create_sender_transport(TRANSPORT)
    with pytest.raises(HookResultError, match="create_transport returned None"):
        stack(object()).create_receiver_transport(TRANSPORT)
    with pytest.raises(HookResultError, match="'BadPrepare': prepare_weights returned None"):
        stack(good, BadPrepare(), Affine(2, 0)).prepare_weights(one(), SEND)
    with pytest.raises(HookResultError, match="'BadApply': apply_weights returned a str"):
        stack(BadApply(), good).apply_weights(update=one(), model=None, context=APPLY)
    with pytest.raises(HookResultError, match="'BadSkip': skip_update returned a str, not True"):
        stack(good, BadSkip()).skip_update(SKIP)


def test_a_hook_that_does_not_exist() -> None:
    class Misspelt:
        @hookimpl
        def prepare_wieghts(self, update: Any) -> None: ...

    with pytest.raises(
        UnknownHookError, match=r"'prepare_wieghts'.*did you mean 'prepare_weights'"
    ):
        stack(Misspelt())


def test_a_hook_with_arguments_that_it_does_not_have() -> None:
    class TooMany:
        @hookimpl
        def skip_update(self, context: Any, worker: Any) -> None: ...

    with pytest.raises(UnknownHookError, match=r"skip_update\(context, worker\); the hook is skip"):
        stack(TooMany())


def test_a_hook_with_arguments_that_pluggy_may_not_pass() -> None:
    class Default:
        @hookimpl
        def skip_update(self, context: Any = None) -> None: ...

    class KeywordOnly:
        @hookimpl
        def skip_update(self, *, context: Any) -> None: ...

    class Everything:
        @hookimpl
        def skip_update(self, **everything: Any) -> None: ...

    with pytest.raises(UnknownHookError, match=r"skip_update\(context=None\); the hook is"):
        stack(Default())
    with pytest.raises(UnknownHookError, match=r"skip_update\(\*, context\); the hook is"):
        stack(KeywordOnly())
    with pytest.raises(UnknownHookError, match=r"skip_update\(\*\*everything\); the hook is"):
        stack(Everything())


def test_an_optional_hook_may_be_one_of_a_later_version() -> None:
    class Ahead:
        @hookimpl(optionalhook=True)
        def resize_weights(self, context: Any) -> None: ...

    assert not stack(Ahead()).implements("resize_weights")


def test_a_wrapper_that_never_yields_is_refused() -> None:
    class NoYield:
        @hookimpl(wrapper=True)
        def prepare_weights(self) -> Any:
            return None

    with pytest.raises(UnknownHookError, match=r"(?s)'NoYield' was refused: .*generator"):
        stack(NoYield())


def test_no_opinion_leaves_it_to_the_others() -> None:
    class Never:
        @hookimpl
        def skip_update(self) -> None:
            return None

    class Always:
        @hookimpl
        def skip_update(self) -> bool:
            return True

    assert stack(object(), Never()).skip_update(SKIP) is False
    assert stack(object(), Always(), Never()).skip_update(SKIP) is True


def test_one_object_given_twice() -> None:
    layer = Affine(1, 0)
    with pytest.raises(UnknownHookError, match="given twice"):
        stack(object(), layer, layer)
