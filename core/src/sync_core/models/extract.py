"""Named tensors from whatever holds weights: a module, a TensorDict, a state_dict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import unwrap
from typing import Any, Literal

from torch import Tensor, nn

from sync_core.errors import ModelError
from sync_core.models.lookup import leaves, modules_in
from sync_core.models.modules import (
    check_flat,
    check_sharded,
    flatten,
    is_extra_state,
    modules_with_extra_state,
    plain_name,
)
from sync_core.weights.layout import QUANTIZED, Layout, check_tensor, place_of
from sync_core.weights.streamed import TensorStream


def check_saved(model: nn.Module, *, persistent: bool = False) -> None:
    """Raise `ModelError` where a submodule saves what no parameter, buffer or extra state holds.

    Only submodules that save more than `nn.Module` does are asked: by their own
    `_save_to_state_dict` or `state_dict`, or by hooks.

    Args:
        model: the module.
        persistent: whether buffers that are not persistent are left out.
    """
    check_sharded(model)
    for name, module in model.named_modules():
        if module._state_dict_pre_hooks:
            raise ModelError(
                f"{name or 'the module'} (a {type(module).__name__}) has a hook that runs before "
                "its state_dict is made, and may write its tensors; to run it at each send, type "
                "Sender(…, strategy='state_dict')"
            )
    saved = [(name, module, _saved(name, module)) for name, module in model.named_modules()]
    if not any(state for _, _, state in saved):
        return
    held, plain = plain_tensors(model, persistent=persistent), plain_name(model)
    names = {*held, *(name for name, _ in modules_with_extra_state(model))}
    unknown = {
        key: (value, f"{name or 'the module'} (a {type(module).__name__})")
        for name, module, state in saved
        for key, value in (state or {}).items()
        if plain(key) not in names and key.rpartition(".")[2] not in _TENSORDICT
    }
    check_tensors({key: value for key, (value, _) in unknown.items() if not is_extra_state(key)})
    if unknown:
        # What quantized parameters save besides; their own error says more.
        for key, tensor in held.items():
            check_tensor(key, tensor)
    # A hook may save a parameter under another name.
    places = set(map(place_of, held.values())) if unknown else set()
    for key, (value, owner) in unknown.items():
        if not isinstance(value, Tensor) or place_of(value) not in places:
            raise ModelError(
                f"{key!r}, which {owner} saves, is not a parameter, a buffer or extra state, so it "
                f"would not be sent; {QUANTIZED}; in a module of your own, make it a buffer, "
                "return it from get_extra_state, or type Sender(…, strategy='state_dict')"
            )


def _saved(name: str, module: nn.Module) -> Mapping[str, Any] | None:
    """Return the state that a submodule saves; None if `nn.Module` saves it by default."""
    prefix = f"{name}." if name else ""
    with _naming(name, module):
        if module._state_dict_hooks or _function(module.state_dict) is not nn.Module.state_dict:
            return module.state_dict(prefix=prefix, keep_vars=True)
        save = module._save_to_state_dict
        if _function(save) is nn.Module._save_to_state_dict:
            return None
        # By position, and into a dict with an order and metadata, as torch calls it.
        saved: dict[str, Any] = nn.Module().state_dict(prefix=prefix)
        save(saved, prefix, True)
    return saved


@contextmanager
def _naming(name: str, module: nn.Module) -> Iterator[None]:
    """Turn what a module raises when it is saved into a `ModelError` that names the module."""
    try:
        yield
    except Exception as error:
        raise ModelError(
            f"{name or 'the module'} (a {type(module).__name__}) cannot be saved, so that what it "
            "holds besides parameters and buffers is not known: "
            f"{type(error).__name__}: {error}; {QUANTIZED}"
        ) from error


# Their modules load what was saved as it is, or under names of older versions of theirs.
_LOAD_PLAINLY = frozenset(
    {"bitsandbytes", "peft", "tensordict", "torch", "torchao", "torchrl", "transformers"}
)


def check_loading(model: Any, strategy: Strategy) -> None:
    """Raise `ModelError` where a module loads its weights in a way that a receiver passes by.

    Those are an own `load_state_dict` or `_load_from_state_dict`, and hooks of these.

    Args:
        model: what a receiver writes into.
        strategy: ``"state_dict"`` loads in the module's way, so that nothing is passed by.
    """
    if strategy == "state_dict":
        return
    for root, outer in modules_in(model):
        for name, module in outer.named_modules():
            # Of the submodules, torch calls the second alone.
            methods = [module._load_from_state_dict]
            if module is outer:
                methods.append(module.load_state_dict)
            pre, post = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
            for what in (*methods, *pre.values(), *post.values()):
                function = _function(getattr(what, "hook", what))
                found = getattr(function, "__module__", None) or type(function).__module__
                if found.partition(".")[0] not in _LOAD_PLAINLY:
                    kind = f"its own {function.__name__}" if what in methods else "a load hook"
                    raise ModelError(
                        f"{root + name or 'the module'} (a {type(module).__name__}) loads weights "
                        f"through {kind}, which strategy={strategy!r} does not call; type "
                        "Sender(…, strategy='state_dict'), which does, or Receiver(…, load=…)"
                    )


def _function(method: Any) -> Any:
    """The function of a method, as it was before Ray wrapped it for the class of an actor."""
    return unwrap(getattr(method, "__func__", method))


def check_tensors(state: Mapping[str, Any]) -> None:
    """Raise `ModelError` for what is not a tensor in the `state_dict` of a module."""
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"{name!r} is a {type(value).__name__}, which the module's state_dict holds as "
                f"those of quantized modules do, and only tensors travel: {QUANTIZED}; or let a "
                "module of your own save tensors"
            )


#: ``"tensordict"`` reads a module's parameters and buffers; ``"state_dict"`` asks the module for
#: its `state_dict`, so that the hooks it has there are honoured; ``"checkpoint"`` reads parameters
#: and the buffers that are persistent, as engines and checkpoints name them.
Strategy = Literal["tensordict", "state_dict", "checkpoint"]

# What `TensorDictParams` saves besides its tensors; every worker's has it.
_TENSORDICT = ("__batch_size", "__device")


# The types of tensors that most models have.
_PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer})


def check_strategy(strategy: str) -> None:
    """Raise `ValueError` unless there is such a strategy."""
    if strategy not in ("tensordict", "state_dict", "checkpoint"):
        raise ValueError(
            f"strategy must be 'tensordict', 'state_dict' or 'checkpoint', not {strategy!r}"
        )


def named_tensors(weights: Any, strategy: Strategy = "tensordict") -> dict[str, Tensor]:
    """The tensors that hold ``weights``, under dotted names; aliases of them, not copies.

    Args:
        weights: an `nn.Module`, a TensorDict, or a mapping, flat or nested, of tensors and of
            models such as these.
        strategy: how a module is read; see `Strategy`.

    Raises:
        ModelError: weights of another kind, something in them that is not a tensor, or two tensors
            under one name.
    """
    return _named(weights, partial(from_module, strategy=strategy))


def held_tensors(weights: Any) -> dict[str, Tensor]:
    """Like `named_tensors`, whatever the modules save besides, for one that loads that itself."""
    return _named(weights, lambda module: plain_tensors(module) | extra_tensors(module))


def _named(weights: Any, read: Callable[[nn.Module], dict[str, Tensor]]) -> dict[str, Tensor]:
    if isinstance(weights, dict) and _is_flat(weights):
        return dict(weights)
    if isinstance(weights, Mapping):
        return combined(
            (name, read(leaf) if isinstance(leaf, nn.Module) else leaf)
            for name, leaf in leaves(weights)
        )
    if isinstance(weights, nn.Module):
        return read(weights)
    raise ModelError(
        f"cannot read weights from a {type(weights).__name__}; "
        "give an nn.Module, a TensorDict or a state_dict"
    )


def _is_flat(weights: Mapping[Any, Any]) -> bool:
    """Return whether a mapping holds nothing but tensors, as most state_dicts do.

    Asked of the types alone, it takes a microsecond for each hundred of them.
    """
    return set(map(type, weights)) == {str} and _PLAIN.issuperset(map(type, weights.values()))


def combined(found: Iterable[tuple[str, Any]]) -> dict[str, Tensor]:
    """One dict of what was found in several models.

    Args:
        found: names, each with a tensor or with a dict of named tensors.

    Raises:
        ModelError: something that is not a tensor, or two tensors under one name.
    """
    named: dict[str, Tensor] = {}
    for name, value in found:
        if isinstance(value, dict):
            for inner, tensor in value.items():
                _put(f"{name}.{inner}", tensor, named)
        else:
            _put(name, value, named)
    return named


def from_module(module: nn.Module, strategy: Strategy) -> dict[str, Tensor]:
    """The parameters, buffers and extra state of a module; see `Strategy`.

    Raises:
        ModelError: the module has state that is in no tensor, or is wrapped by FSDP1.
    """
    check_flat(module)
    if strategy != "state_dict":
        persistent = strategy == "checkpoint"
        check_saved(module, persistent=persistent)
        named = plain_tensors(module, persistent=persistent)
    else:
        with _naming("", module):
            state = module.state_dict(keep_vars=True)
        plain = plain_name(module)
        named = {plain(name): v for name, v in state.items() if not is_extra_state(name)}
        check_tensors(named)
        named |= non_persistent_buffers(module)
    return named | extra_tensors(module)


def plain_tensors(module: nn.Module, *, persistent: bool = False) -> dict[str, Tensor]:
    """The parameters and buffers of a module, read from it directly.

    Args:
        module: the module.
        persistent: whether buffers that its `state_dict` leaves out are left out.
    """
    named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named |= dict(module.named_buffers(remove_duplicate=False))
    plain = plain_name(module)
    left_out = non_persistent_buffers(module) if persistent else {}
    found = {plain(name): tensor for name, tensor in named.items()}
    return {name: tensor for name, tensor in found.items() if name not in left_out}


def extra_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The extra state of a module and its submodules, as named tensors."""
    named: dict[str, Tensor] = {}
    for name, submodule in modules_with_extra_state(module):
        named |= dict(flatten(name, submodule.get_extra_state()))
    return named


class ComputedWeights(ABC):
    """Weights that a sender computes at every send, such as `sync_core.gathered`.

    Args:
        model: the model that they come from, which layers get as `SendContext.model`; None for
            none.

    Example:
        >>> class Halved(ComputedWeights):
        ...     def read(self, strategy):
        ...         named = named_tensors(self.model, strategy)
        ...         return {name: tensor / 2 for name, tensor in named.items()}
        >>> Halved(torch.nn.Linear(2, 1)).read("tensordict")["weight"].shape
        torch.Size([1, 2])
    """

    def __init__(self, model: Any = None) -> None:
        self.model = model

    @abstractmethod
    def read(self, strategy: Strategy) -> Mapping[str, Tensor] | TensorStream:
        """Return the tensors of this version; called by each send, and once before all.

        By name; or, where they need not exist all at once, as a `TensorStream`. That is read once
        by each send, also by one that sends nothing, and not before the first.

        Args:
            strategy: how modules are read; see `Strategy`.
        """


class Gathered(ComputedWeights):
    """The tensors of a model, those that are spread over ranks whole, one after the other."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._layout = Layout(())

    def read(self, strategy: Strategy) -> TensorStream:
        tensors: list[Tensor] = []
        aliases: list[tuple[str, str]] = []
        owners: dict[object, str] = {}
        kinds = []
        for name, tensor in tensors_of_rank(self.model, strategy).items():
            spread = hasattr(tensor, "full_tensor")
            if not spread:
                check_tensor(name, tensor)
            owner = owners.setdefault(id(tensor) if spread else place_of(tensor), name)
            if owner != name:
                aliases.append((name, owner))
                continue
            tensors.append(tensor)
            kinds.append((name, tensor.dtype, tuple(tensor.shape)))
        known = self._layout
        agreed = [(spec.name, spec.dtype, spec.shape) for spec in known.specs]
        if (kinds, tuple(aliases)) != (agreed, known.aliases):
            # Its header and its digest are kept with it.
            self._layout = Layout.of_kinds(kinds, aliases)
        return TensorStream(self._layout, lambda: map(_whole, tensors))


def _whole(tensor: Any) -> Tensor:
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def gathered(model: Any) -> ComputedWeights:
    """Weights whose tensors that are spread over ranks are gathered at every send.

    Those are `DTensor`: FSDP2, tensor parallel. Every rank makes a sender of them and calls `send`:
    the one whose workers are updated, and the others with ``num_workers=0``. One tensor is gathered
    at a time, and packed before the next: the first rank needs the memory of one packed version,
    and every rank that of its largest tensor. A layer that changes tensors keeps all of them.

    Args:
        model: a module, a TensorDict, a state_dict, or a mapping from names to these.

    Example:
        >>> Sender("none", gathered(torch.nn.Linear(2, 1)), num_workers=1).send().updated
        (0,)
    """
    return Gathered(model)


def tensors_of_rank(weights: Any, strategy: Strategy = "state_dict") -> dict[str, Tensor]:
    """The tensors of weights that are spread over ranks: distributed ones as this rank has them.

    Modules are read by their `state_dict`, since the parameters of a module under FSDP2 are whole
    or not, as its last forward left them. No rank waits for another.

    Args:
        weights: see `named_tensors`.
        strategy: ``"checkpoint"`` leaves out buffers that are not persistent.
    """
    named = named_tensors(weights, "state_dict")
    if strategy == "checkpoint" and isinstance(weights, nn.Module):
        left_out = non_persistent_buffers(weights)
        named = {name: tensor for name, tensor in named.items() if name not in left_out}
    return named


def not_saved(model: Any) -> list[str]:
    """The names of the tensors that checkpoints of a model, or of several, do not have."""
    return [
        prefix + name
        for prefix, module in modules_in(model)
        for name in non_persistent_buffers(module)
    ]


def non_persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a module's `state_dict` leaves out."""
    plain = plain_name(module)
    return {
        plain(f"{prefix}.{name}" if prefix else name): buffer
        for prefix, submodule in module.named_modules(remove_duplicate=False)
        for name, buffer in submodule._buffers.items()
        if name in submodule._non_persistent_buffers_set and buffer is not None
    }


def _put(name: str, value: Any, named: dict[str, Tensor]) -> None:
    if not isinstance(value, Tensor):
        raise ModelError(f"{name!r} is a {type(value).__name__}; only tensors travel")
    if name in named:
        raise ModelError(f"two tensors are named {name!r}, one flat and one nested")
    named[name] = value
