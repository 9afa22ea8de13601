"""Modules: names without wrappers, and state that is neither a parameter nor a buffer."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from inspect import unwrap
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from sync_core.errors import ModelError, PayloadError

_COMPILED = "_orig_mod"
_PARALLEL = "module"
_CHECKPOINTED = "_checkpoint_wrapped_module"
#: The parts of names that come from wrappers, and these wrappers.
WRAPPERS = {
    _COMPILED: "torch.compile",
    _PARALLEL: "DistributedDataParallel or DataParallel",
    _CHECKPOINTED: "activation checkpointing",
}


def plain_name(module: nn.Module) -> Callable[[str], str]:
    """Return the function that removes the prefixes of wrappers from names of a module's tensors.

    Example:
        >>> parallel = torch.nn.DataParallel(torch.nn.Linear(2, 1))
        >>> list(map(plain_name(parallel), parallel.state_dict()))
        ['weight', 'bias']
    """
    compiled = _type_of("torch._dynamo.eval_frame", "OptimizedModule")
    checkpointed = _type_of(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"
    )
    prefixes: list[tuple[str, str]] = []
    for name, submodule in module.named_modules(remove_duplicate=False):
        outer = f"{name}." if name else ""
        if isinstance(submodule, compiled):
            prefixes.append((f"{outer}{_COMPILED}.", outer))
        elif isinstance(submodule, checkpointed):
            prefixes.append((f"{outer}{_CHECKPOINTED}.", outer))
        elif isinstance(submodule, (DataParallel, DistributedDataParallel)):
            prefixes.append((f"{outer}{_PARALLEL}.", outer))
    if not prefixes:
        return str
    # The innermost first, so that the prefixes of those around it still are in the name.
    prefixes.sort(key=lambda pair: len(pair[0]), reverse=True)

    def strip(name: str) -> str:
        for prefix, outer in prefixes:
            if name.startswith(prefix):
                name = outer + name.removeprefix(prefix)
        return name

    return strip


def check_flat(module: nn.Module) -> None:
    """Raise `ModelError` for FSDP1, whose parameters are parts of flat ones."""
    flat = _type_of("torch.distributed.fsdp", "FullyShardedDataParallel")
    if any(isinstance(submodule, flat) for submodule in module.modules()):
        raise ModelError(
            "the module is wrapped by FullyShardedDataParallel (FSDP1), which replaces its "
            "parameters by flat ones; shard it with torch.distributed.fsdp.fully_shard and type "
            "Sender(scheme, gathered(model)), or send a full state_dict: "
            "FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT)"
        )


def check_sharded(module: nn.Module) -> None:
    """Raise `ModelError` for FSDP2, whose last forward may have left its parameters whole."""
    sharded = _type_of("torch.distributed.fsdp", "FSDPModule")
    if any(isinstance(submodule, sharded) for submodule in module.modules()):
        raise ModelError(
            "the module is sharded by fully_shard (FSDP2), so that this rank has parts of its "
            "tensors; to send it, type Sender(scheme, gathered(model)) on every rank; for a worker "
            "with such a model, type Sender(Sharded(scheme, rank, size), …)"
        )


# Their hooks leave parameters as they are.
_HARMLESS = frozenset(
    {
        "accelerate",
        "bitsandbytes",
        "peft",
        "tensordict",
        "torch",
        "torchao",
        "torchrl",
        "transformers",
        "trl",
    }
)


def check_forward_hooks(module: nn.Module) -> None:
    """Raise `ModelError` for a hook that may write parameters before each forward.

    An optimizer that gathers parameters in the next forward does that, such as Megatron's with
    ``overlap_param_gather``: until then, the module holds old values.
    """
    for name, submodule in module.named_modules():
        # Private to torch; where torch has no such attribute, no hook is known.
        for hook in getattr(submodule, "_forward_pre_hooks", {}).values():
            function = getattr(hook, "func", hook)
            origin = getattr(function, "__module__", None) or type(function).__module__
            if origin.partition(".")[0] in _HARMLESS:
                continue
            described = getattr(function, "__qualname__", type(function).__name__)
            raise ModelError(
                f"{name or 'the module'} (a {type(submodule).__name__}) has a forward pre-hook, "
                f"{origin}.{described}, which may write parameters, such as those that another "
                "rank has updated, so that a send before the next forward would bring old ones; "
                "type Sender(…, before_read=function) with the function that completes them, or "
                "before_read=lambda: None if the hook writes none"
            )


def _type_of(module: str, name: str) -> type[nn.Module] | tuple[()]:
    """Return a type of torch's; it has no instance before its module is imported.

    Those of compiled modules and of activation checkpointing have no public name. Where torch
    names them otherwise, nothing is removed, and the error about names says what to do.
    """
    found: type[nn.Module] | tuple[()] = getattr(sys.modules.get(module), name, ())
    return found


_SUFFIX = "_extra_state"
_JSON = "__json__"
# Room for a few numbers and strings, so that a counter that grows leaves the layout as it is.
_LEAST_NBYTES = 256
_PLAIN = (type(None), bool, int, float, str)


def modules_with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The submodules that override `get_extra_state`, with the name of their extra state."""
    plain = plain_name(model)
    return [
        (plain(f"{prefix}.{_SUFFIX}" if prefix else _SUFFIX), module)
        for prefix, module in model.named_modules()
        # Ray wraps the methods of the classes of actors, which may be modules.
        if unwrap(type(module).get_extra_state) is not nn.Module.get_extra_state
    ]


def is_extra_state(name: str) -> bool:
    """Return whether a dotted name is that of extra state, or of a part of it."""
    return _SUFFIX in name.split(".")


def is_whole_extra_state(name: str) -> bool:
    """Return whether a dotted name is that of all the extra state of one module."""
    return name.rpartition(".")[2] == _SUFFIX


def is_json(name: str) -> bool:
    """Return whether a dotted name is that of extra state as JSON, whose size may change.

    Example:
        >>> is_json("head._extra_state.__json__"), is_json("head._extra_state.mean")
        (True, False)
    """
    return name.endswith(f"{_SUFFIX}.{_JSON}")


def flatten(name: str, state: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a state travels as, with dotted names.

    Raises:
        ModelError: the state holds something that cannot travel.

    Example:
        >>> dict(flatten("_extra_state", {"mean": torch.ones(1)}))
        {'_extra_state.mean': tensor([1.])}
        >>> list(dict(flatten("_extra_state", {"mean": torch.ones(1), "steps": 3})))
        ['_extra_state.mean', '_extra_state.__json__']
    """
    tensors: dict[str, Tensor] = {}
    structure = _encode(name, state, tensors)
    yield from tensors.items()
    if not _is_made_of_tensors(state):
        yield f"{name}.{_JSON}", _to_tensor(name, structure)


def rebuild(name: str, like: Any, tensors: Mapping[str, Tensor]) -> Any:
    """A state from the tensors named, copied; what they lack is taken from ``like``.

    Raises:
        PayloadError: the JSON that arrived is not that of a state.
    """
    given = tensors.get(f"{name}.{_JSON}")
    if given is not None:
        had = dict(flatten(name, like))
        try:
            return _decode(
                json.loads(given.cpu().numpy().tobytes()),
                lambda found: tensors[found].clone() if found in tensors else had[found],
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PayloadError(f"{name!r} arrived as JSON that is not a state") from error
    return _rebuild_like(name, like, tensors)


def _rebuild_like(name: str, like: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(like, Tensor):
        return tensors[name].clone() if name in tensors else like
    if isinstance(like, Mapping):
        return {key: _rebuild_like(f"{name}.{key}", v, tensors) for key, v in like.items()}
    if type(like) in (list, tuple):
        parts = (_rebuild_like(f"{name}.{i}", v, tensors) for i, v in enumerate(like))
        return type(like)(parts)
    return like


def _is_made_of_tensors(state: Any) -> bool:
    if isinstance(state, Tensor):
        return True
    if isinstance(state, Mapping):
        return bool(state) and all(map(_is_made_of_tensors, state.values()))
    return type(state) in (list, tuple) and bool(state) and all(map(_is_made_of_tensors, state))


def _encode(name: str, state: Any, tensors: dict[str, Tensor]) -> Any:
    """The structure of a state as JSON; its tensors are put into ``tensors``."""
    if isinstance(state, Tensor):
        if name in tensors:
            raise ModelError(f"two tensors of the extra state are named {name!r}; rename a key")
        tensors[name] = state
        return {"tensor": name}
    if isinstance(state, Mapping):
        return {
            "dict": [
                [_encode_key(name, key), _encode(f"{name}.{key}", value, tensors)]
                for key, value in state.items()
            ]
        }
    if type(state) in (list, tuple):
        parts = [_encode(f"{name}.{i}", value, tensors) for i, value in enumerate(state)]
        return parts if type(state) is list else {"tuple": parts}
    if type(state) is bytes:
        return {"bytes": base64.b64encode(state).decode()}
    if type(state) in _PLAIN:
        return state
    raise _cannot_travel(name, state)


def _encode_key(name: str, key: Any) -> Any:
    if type(key) not in _PLAIN:
        raise _cannot_travel(name, key)
    return key


def _decode(structure: Any, find: Callable[[str], Tensor]) -> Any:
    if isinstance(structure, list):
        return [_decode(part, find) for part in structure]
    if not isinstance(structure, dict):
        return structure
    ((kind, value),) = structure.items()
    if kind == "tensor":
        return find(value)
    if kind == "dict":
        return {key: _decode(part, find) for key, part in value}
    if kind == "tuple":
        return tuple(_decode(part, find) for part in value)
    if kind == "bytes":
        return base64.b64decode(value, validate=True)
    raise ValueError(f"there is no kind {kind!r}")


def _to_tensor(name: str, structure: Any) -> Tensor:
    try:
        text = json.dumps(structure, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name!r} cannot be written as JSON: {error}") from error
    nbytes = max(_LEAST_NBYTES, 1 << (len(text) - 1).bit_length())
    # Whitespace after it is part of no value.
    return torch.from_numpy(np.frombuffer(text.ljust(nbytes), dtype=np.uint8).copy())


def _cannot_travel(name: str, found: Any) -> ModelError:
    return ModelError(
        f"{name!r} is or holds a {type(found).__name__}; extra state travels when it is made of "
        "tensors, str, bytes, int, float, bool, None, dicts, lists and tuples: let "
        "get_extra_state return these"
    )
