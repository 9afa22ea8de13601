"""The proof of what partial updates of a layer leave out: a digest that each worker checks.

A layer such as ``Select`` leaves out tensors that the workers have already. `LeftOut` comes right
after the layers that stay with the sender, so it is given the tensors as they travel: under the
workers' names, and cast. It keeps a digest of each tensor that may be left out. With an update that
lacks some, the digest of those travels as an extra, and each worker compares its model's.

Workers may hold in 16 bits what travels in 32. So the digest has parts of 16 bytes: of the tensors
as they travel, and cast to each dtype that a worker may have. The last part is that of the settings
of PEFT's modules where workers never get the rest: which adapters act, and with what scale. Two
bytes of each tensor's digest follow, for an error that names the tensors that differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sync_core import (
    ApplyContext,
    BindContext,
    Layout,
    ReadbackError,
    SendContext,
    Update,
    hookimpl,
)
from sync_core.models import (
    TensorStream,
    bytes_of,
    is_extra_state,
    modules_in,
    place_of,
    tensor_finder,
)
from sync_plugin_std.layers.fingerprints import samples

_NAMES_SHOWN = 4
_PART = 16
_MARK = 2
_DIGEST = "left-out.digest"
#: The extra by which a layer tells that later updates may lack what this one has; it never travels.
LATER = "left-out.later"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: The attributes of PEFT's modules that decide, beside their tensors and properties, what they do.
_SETTINGS = ("merged_adapters", "scaling", "token_indices", "fan_in_fan_out")


class Given:
    """Lets updates lack tensors that workers hold; `Select` brings it along. Named ``given``."""

    capabilities = frozenset({"checks", "partial"})

    @hookimpl(wrapper=True)
    def apply_weights(self) -> Generator[None, bool, bool]:
        """Change nothing."""
        return (yield)


class LeftOut:
    """Proves by a digest what updates leave out; `Select` brings it along. Named ``left-out``.

    A tensor is hashed by the sender when it travels, unless it travels always, and by the worker
    when the tensor was changed or was replaced since its last check, as torch counts or a sample
    shows.
    """

    capabilities = frozenset({"checks", "partial"})

    def __init__(self) -> None:
        self._travels = True
        self._cast = False
        # At the sender: the digests of each tensor; the names of those that were left out once; of
        # those that have travelled since they were hashed; and the digest and the marks of what a
        # layout lacks.
        self._digests: dict[str, list[bytes]] = {}
        self._rest: set[str] = set()
        self._stale: set[str] = set()
        self._last: tuple[Layout, bytes, bytes] | None = None
        # At the receiver: what was found to be equal last.
        self._checked: tuple[bytes, bytes, list[object]] | None = None
        self._find: Any = None
        self._model: Any = None

    def bind(self, context: BindContext) -> LeftOut:
        """A layer for one end of one worker; an idle one where nothing travels."""
        bound = type(self)()
        bound._travels = "same_object" not in context.capabilities
        bound._cast = context.cast
        return bound

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        """Hash what may be left out later; give an update that lacks some the digest of those."""
        update = yield
        later = update.extras.pop(LATER, None) is not None
        from_start = "from_start" in self.capabilities
        if not self._travels or context.stand_ins or (context.version == 0 and not from_start):
            return update
        if context.version == 0:
            self._digests.clear()  # of a first send that failed
        missing = self._digests.keys() - update.layout.index.keys()
        # Until an update lacks some, any may travel for the last time.
        first = (bool(missing) or later) and not self._rest
        for name, tensor in _one_by_one(update, context):
            if first or name in self._rest or name not in self._digests:
                self._digests[name] = self._digest(tensor)
                self._stale.discard(name)
                self._last = None
            else:
                self._stale.add(name)
        self._rest |= missing
        # What always travelled before is hashed when it does the next time.
        if missing and not missing & self._stale:
            if self._last is None or self._last[0] is not update.layout:
                rest = {n: d for n, d in self._digests.items() if n in missing}
                parts = [
                    dict(zip(rest, part, strict=True)) for part in zip(*rest.values(), strict=True)
                ]
                # Without a cast, all are equal.
                marks = map(_marks, parts if self._cast else parts[:1])
                self._last = update.layout, b"".join(map(_combined, parts)), b"".join(marks)
            settings = _settings(context.model) if from_start else bytes(_PART)
            digest = bytearray(self._last[1] + settings + self._last[2])
            update.extras[_DIGEST] = torch.frombuffer(digest, dtype=torch.uint8)
        return update

    @hookimpl(wrapper=True)
    def apply_weights(
        self, update: Update, model: Any, context: ApplyContext
    ) -> Generator[None, bool, bool]:
        """Refuse the update unless the model holds what it leaves out."""
        digest = update.extras.pop(_DIGEST, None)
        # An engine that loads weights by its own function cannot be read.
        if digest is not None and model is not None:
            self._check(update, digest.cpu().numpy().tobytes(), model, context)
        return (yield)

    def _digest(self, tensor: Tensor) -> list[bytes]:
        """The digests of a tensor, as it is and in each dtype that is not wider."""
        exact = _digest(tensor)
        if not self._cast:
            return [exact] * (1 + len(_DTYPES))
        narrowed = [_narrowed(tensor, dtype) for dtype in _DTYPES]
        return [exact, *(exact if t is tensor else _digest(t) for t in narrowed)]

    def _check(self, update: Update, digest: bytes, model: Any, context: ApplyContext) -> None:
        if self._find is None or self._model is not model:
            self._model, self._find = model, tensor_finder(model, context.strategy)
        held: Mapping[str, Tensor] = self._find()
        settings = _settings(model)
        assert context.layout is not None
        dtypes = {
            name: context.layout.specs[position].dtype
            for name, position in context.layout.index.items()
            if name not in update.layout.index and not is_extra_state(name)
        }
        there = [held[name] for name in dtypes if name in held]
        places = [(place_of(t), _changes(t)) for t in there]
        state: list[object] = list(zip(places, samples(there), strict=True))
        if self._checked == (digest, settings, state):
            return
        part, narrow = _part_of(held, dtypes)
        found = {
            n: _digest(_narrowed(held[n].to(d), narrow)) for n, d in dtypes.items() if n in held
        }
        end = _PART * (2 + len(_DTYPES))
        wanted = [digest[i : i + _PART] for i in range(0, end, _PART)]
        if _combined(found) != wanted[part]:
            wrong = _differing(sorted(dtypes), found, digest[end:], part)
            cause = _describe_training(model, [held[n] for n in wrong if n in held])
            raise ReadbackError(
                context.worker_id,
                _describe(update, wrong or list(dtypes), context.version, cause),
            )
        # A model that is read by names alone has no settings to compare.
        if bytes(_PART) not in (settings, wanted[-1]) and settings != wanted[-1]:
            raise ReadbackError(context.worker_id, _describe_settings(context.version))
        if None not in map(_changes, there):
            self._checked = digest, settings, state


class Held(LeftOut):
    """Proves by a digest what workers have from the start; brought by `Select`. Named ``held``.

    The sender hashes what it prepares at its start, which is not sent.
    """

    capabilities = frozenset({"checks", "from_start", "partial"})


def _one_by_one(update: Update, context: SendContext) -> Iterator[tuple[str, Tensor]]:
    """Yield every name with its tensor; those of a stream, which is not sent, as they are made."""
    if context.version or not isinstance(update.source, TensorStream):
        yield from update.items()
        return
    names: dict[int, list[str]] = {}
    for name, position in update.layout.index.items():
        names.setdefault(position, []).append(name)
    for position, tensor in enumerate(update.source.draw()):
        for name in names[position]:
            yield name, tensor


def _part_of(
    held: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
) -> tuple[int, torch.dtype | None]:
    """The part of the digest that a worker can compare, and the dtype that this is for."""
    kinds = {
        held[name].dtype
        for name, dtype in dtypes.items()
        if name in held
        and dtype.is_floating_point
        and held[name].dtype != dtype
        and held[name].dtype.itemsize <= dtype.itemsize
    }
    narrow = kinds.pop() if len(kinds) == 1 else None
    return (1 + _DTYPES.index(narrow), narrow) if narrow in _DTYPES else (0, None)


def _narrowed(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or not tensor.is_floating_point() or tensor.dtype.itemsize < dtype.itemsize:
        return tensor
    return tensor.to(dtype)  # itself, where it is of that dtype


def _marks(digests: Mapping[str, bytes]) -> bytes:
    """The first bytes of each tensor's digest, in the order of the names."""
    return b"".join(digests[n][:_MARK] for n in sorted(digests) if not is_extra_state(n))


def _differing(names: list[str], found: Mapping[str, bytes], marks: bytes, part: int) -> list[str]:
    """The tensors that a worker lacks, or holds otherwise than the sender, as their marks show."""
    size = len(names) * _MARK
    if len(marks) not in (size, size * (1 + len(_DTYPES))):
        return []  # the sender has others
    start = 0 if len(marks) == size else part * size
    expected = (marks[i : i + _MARK] for i in range(start, start + size, _MARK))
    return [
        name
        for name, mark in zip(names, expected, strict=True)
        if name not in found or found[name][:_MARK] != mark
    ]


def _describe_training(model: Any, tensors: list[Tensor]) -> str:
    """Return advice where some of these are buffers of modules in training mode."""
    buffers = {
        place_of(buffer)
        for _, owner in modules_in(model)
        for module in owner.modules()
        if module.training
        for buffer in module.buffers(recurse=False)
    }
    if not any(place_of(tensor) in buffers for tensor in tensors):
        return ""
    return (
        "; a forward pass in training mode changes buffers such as running statistics, so call "
        "eval() on this worker's model"
    )


def _describe(update: Update, names: list[str], version: int, cause: str) -> str:
    listed = ", ".join(map(repr, names[:_NAMES_SHOWN]))
    if len(names) > _NAMES_SHOWN:
        listed += f" and {len(names) - _NAMES_SHOWN} more"
    remedy = (
        "the next send brings everything"
        if update.base
        else "start this worker with the trainer's checkpoint, in a dtype that holds its values"
    )
    return (
        f"version {version} leaves out tensors that this worker does not hold as the sender does, "
        f"by the digest of {listed}{cause}; {remedy}"
    )


def _describe_settings(version: int) -> str:
    return (
        f"version {version} is for adapters that act otherwise than this worker's: their scaling "
        "(lora_alpha, r, use_rslora), an aLoRA's tokens, or the active, merged or disabled ones "
        "differ; give both ends the same LoraConfig, and call set_adapter() and the like at both"
    )


def _settings(model: Any) -> bytes:
    """The digest of the settings of PEFT's modules; zeros for a model without any."""
    modules: Iterator[Any] = (m for _, owner in modules_in(model) for m in owner.modules())
    found: list[object] = []
    for module in modules:
        # Those of PEFT's types are properties; models of transformers have methods of these names.
        if isinstance(getattr(type(module), "disable_adapters", None), property):
            values = [vars(module).get(name) for name in _SETTINGS]
            settings = [sorted(v.items()) if isinstance(v, dict) else v for v in values]
            found.append([module.active_adapters, module.disable_adapters, *settings])
        configs = vars(module).get("peft_config")
        if isinstance(configs, dict):
            # An aLoRA acts after these.
            tokens = {n: getattr(c, "alora_invocation_tokens", None) for n, c in configs.items()}
            found.extend((name, given) for name, given in tokens.items() if given)
    return hashlib.sha256(repr(found).encode()).digest()[:_PART] if found else bytes(_PART)


def _changes(tensor: Tensor) -> int | None:
    """The number of changes in place; None where torch does not count them."""
    return None if tensor.is_inference() else tensor._version


def _digest(tensor: Tensor) -> bytes:
    found = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
    found.update(bytes_of(tensor))
    return found.digest()


def _combined(digests: Mapping[str, bytes]) -> bytes:
    """The digest of some tensors, but for extra state, which is made again when it is read."""
    found = hashlib.sha256()
    for name in sorted(digests):
        if not is_extra_state(name):
            found.update(name.encode() + b"\0" + digests[name])
    return found.digest()[:_PART]
