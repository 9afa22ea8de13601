"""The adapter of one rank of a vLLM engine: its files, and whether the engine has loaded it.

vLLM reads an adapter from a directory, and reads it again whenever requests need one that its cache
has dropped. So each version of an adapter has a directory, from before it is loaded until no
request can use it.

A version takes these steps. vLLM has no call for them: those for weights end by dropping all
adapters. So each is an ``init_weight_transfer_engine`` with an `AdapterStep`:

- ``stage``: each rank stages the version;
- ``check``: each rank raises unless all have staged it;
- ``write``: one rank of each machine writes the directory; then the trainer calls vLLM's
  ``add_lora``;
- ``confirm``: each rank confirms the version if its LoRA manager has a new adapter;
- ``drop``: each rank refuses the version, and its directory is removed;
- ``keep``: the other versions are unloaded, and their directories removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from safetensors.torch import save_file
from torch import Tensor

from sync_core import Layout, OptionError, SyncError
from sync_core.errors import LayoutMismatchError
from sync_plugin_vllm.adapter_model import (
    PREFIX,
    TENSOR,
    AdapterDescription,
    base_names,
    peft_config,
)
from sync_plugin_vllm.names import FusedNames, check_names, is_tied
from sync_plugin_vllm.reload import Kind, rehearse_loading
from sync_plugin_vllm.votes import AdapterError

Step: TypeAlias = Literal["stage", "check", "write", "confirm", "drop", "keep"]

_DIRECTORY = re.compile(r"[A-Za-z0-9][\w.-]*-v[0-9]+-[0-9a-f]{8}")


@dataclass(frozen=True, kw_only=True)
class AdapterStep:
    """One step of a version of an adapter.

    Args:
        step: which step.
        version: the version.
        name: the adapter's name in the engine, such as ``"policy-v7"``; (keep) the part that all
            versions share, such as ``"policy-v"``.
        directory: (write) where its files are written: a directory that does not exist yet.
        description: (write) the fields of an `AdapterDescription`.
        lora_id: (write) its number in vLLM; 0 where vLLM's server chooses it.
        reason: (drop) why vLLM could not load it; empty where another engine could not.
        names: (keep) the adapters that requests may use.
    """

    step: Step
    version: int = 0
    name: str = ""
    directory: str = ""
    description: Mapping[str, Any] = field(default_factory=dict)
    lora_id: int = 0
    reason: str = ""
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.step not in get_args(Step):
            raise OptionError(f"a step must be one of {get_args(Step)}, got {self.step!r}")


@dataclass(slots=True)
class _Loaded:
    """An adapter whose directory is there."""

    directory: Path
    lora_id: int


class LoraWorker:
    """Writes versions of an adapter, and knows which of them the engine has.

    Args:
        model: vLLM's model.
        lora_config: vLLM's configuration of LoRA; None for an engine without.
    """

    def __init__(self, model: Any, lora_config: Any) -> None:
        self._model = model
        self._lora_config = lora_config
        self._adapters: dict[str, _Loaded] = {}
        #: All names so far: vLLM keeps cached prompts by the name of their adapter.
        self._names: set[str] = set()
        self._before: set[int] = set()
        self._step: AdapterStep | None = None
        self._writes = False
        #: The number of the version in vLLM; 0 where it was not found there.
        self._found = 0
        #: Whether the files of the version are there.
        self.written = False
        self._directories: set[Path] = set()
        self._end = weakref.finalize(self, _remove_all, self._directories, os.getpid())

    def check(
        self, layout: Layout, description: AdapterDescription, advice: str, *, quantized: bool
    ) -> None:
        """Raise unless the engine can take an adapter, and has the shapes of its base model.

        Args:
            layout: of the trainer's PEFT model.
            description: of its adapter.
            advice: the sentence that ends a message about names.
            quantized: whether the engine's base model is quantized, so that shapes differ.

        Raises:
            OptionError: the engine takes no adapters, or none of this rank.
            LayoutMismatchError: modules of the adapter, or weights of the base model, have no
                counterpart in the engine, or one of another shape.
        """
        manager = self._manager()
        specs = {name: layout.specs[layout.index[name]] for name in layout.names}
        tensors = {n: spec for n, spec in specs.items() if _is_of(n, description.adapter)}
        rank = max((min(spec.shape) for spec in tensors.values()), default=0)
        if rank > self._lora_config.max_lora_rank:
            raise OptionError(
                f"the adapter has rank {rank}, and the engine takes up to "
                f"{self._lora_config.max_lora_rank}; start it with max_lora_rank={rank} or more"
            )
        plain = base_names(specs)
        sent = list(plain.values())
        check_names(sent, self._taken, self._model, quantized=quantized, advice=advice)
        if not quantized:
            kinds: list[Kind] = [
                (own, specs[name].dtype, specs[name].shape)
                for name, own in plain.items()
                if not is_tied(own, self._model)
            ]
            rehearse_loading(self._model, kinds)
        fused = FusedNames(self._model)
        lacking = [
            module
            for module in description.scaling
            if not any(
                owner.removesuffix(".weight") in manager.modules
                for owner in fused.owners(f"{module}.weight")
            )
        ]
        if lacking:
            raise LayoutMismatchError(
                f"vLLM's {type(self._model).__name__} takes no adapter of "
                f"{', '.join(map(repr, lacking[:8]))}: leave it out of the LoraConfig's "
                "target_modules, or start the engine without a restriction of its own"
            )

    def take(self, step: AdapterStep, *, writes: bool) -> None:
        """Have the next `load` write the files of a version.

        Args:
            step: the version.
            writes: whether this rank does so for all ranks of its machine.

        Raises:
            OptionError: the engine has had an adapter of this name, or the directory is not one
                that may be made.
        """
        self.drop()
        directory = Path(step.directory)
        if step.name in self._names:
            raise OptionError(
                f"the engine has had an adapter {step.name!r} before, whose cached prompts it may "
                "use again; let the trainer count on: Sender(…, version=…)"
            )
        if not directory.is_absolute() or not _DIRECTORY.fullmatch(directory.name):
            raise OptionError(f"an adapter cannot be written to {step.directory!r}")
        self._names.add(step.name)
        self._step, self._writes = step, writes
        self._before = set(self._manager().list_adapters())

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Write the files of a version, and raise, as vLLM has yet to load them.

        Once `find` has found the version in vLLM's manager, it returns: the engine has the version.

        Raises:
            AdapterError: vLLM has not loaded the version, or the files cannot be written.
        """
        step = self._step
        if step is None or self._found:
            return
        try:
            description = AdapterDescription(**step.description)
            tensors = {n: t.contiguous() for n, t in named if _is_of(n, description.adapter)}
            ranks = _ranks(tensors, description)
            if self._writes:
                self._write(Path(step.directory), tensors, description, ranks)
        except Exception as error:
            raise AdapterError(0, f"{type(error).__name__}: {error}") from error
        self.written = True
        raise AdapterError(0, "vLLM has not loaded the adapter yet")

    def find(self) -> None:
        """Find the version in vLLM's manager.

        Raises:
            AdapterError: vLLM has not loaded it.
        """
        step = self._step
        found = set(self._manager().list_adapters())
        number = 0 if step is None else step.lora_id
        new = found & {number} if number else found - self._before
        if step is None or not new:
            name = "adapter" if step is None else repr(step.name)
            raise AdapterError(0, f"vLLM's LoRA manager has {sorted(found)}, and no {name}")
        self._found = max(new)

    def commit(self) -> None:
        """Note that requests may use the version that was found."""
        assert self._step is not None
        directory = Path(self._step.directory)
        self._adapters[self._step.name] = _Loaded(directory, self._found)
        self._step, self._found, self.written = None, 0, False

    def drop(self) -> None:
        """Remove the files of a version that is not loaded."""
        if self._step is not None:
            if self._step.lora_id:
                self._manager().remove_adapter(self._step.lora_id)
            self._remove(Path(self._step.directory))
        self._step, self._found, self.written = None, 0, False

    def keep(self, prefix: str, names: Iterable[str]) -> None:
        """Unload the versions that are not named, and remove their files.

        Args:
            prefix: what the names of all versions of the adapter begin with.
            names: the versions that remain.
        """
        versions = {n for n in self._adapters if n.rpartition("-v")[0] + "-v" == prefix}
        for name in versions - set(names):
            gone = self._adapters.pop(name)
            self._manager().remove_adapter(gone.lora_id)
            self._remove(gone.directory)

    @property
    def _taken(self) -> frozenset[str]:
        named = (self._model.named_parameters, self._model.named_buffers)
        return frozenset(name for each in named for name, _ in each(remove_duplicate=False))

    def _manager(self) -> Any:
        manager = getattr(self._model, "lora_manager", None)
        if manager is None or self._lora_config is None:
            raise OptionError(
                "the engine takes no adapters; start it with enable_lora=True, or send the adapter "
                'merged: layers=[lora("merged")]'
            )
        return manager

    def _write(
        self,
        directory: Path,
        tensors: Mapping[str, Tensor],
        description: AdapterDescription,
        ranks: Mapping[str, int],
    ) -> None:
        directory.mkdir(mode=0o700)
        self._directories.add(directory)
        names = {n: n.replace(f".{description.adapter}.weight", ".weight") for n in tensors}
        save_file(
            {names[name]: tensor for name, tensor in tensors.items()},
            directory / "adapter_model.safetensors",
        )
        config = json.dumps(peft_config(ranks, description.scaling), indent=1)
        (directory / "adapter_config.json").write_text(config)

    def _remove(self, directory: Path) -> None:
        if directory in self._directories:
            # Others may have removed it, as what cleans /tmp does.
            shutil.rmtree(directory, ignore_errors=True)
            self._directories.remove(directory)


def _is_of(name: str, adapter: str) -> bool:
    found = TENSOR.fullmatch(name)
    return found is not None and found["adapter"] == adapter


def _ranks(tensors: Mapping[str, Tensor], description: AdapterDescription) -> dict[str, int]:
    """Return the rank of each module's part.

    Raises:
        SyncError: modules were described and not sent, or the other way round.
    """
    ranks: dict[str, dict[str, int]] = {}
    for name, tensor in tensors.items():
        found = TENSOR.fullmatch(name)
        assert found is not None
        module = found["module"].removeprefix(PREFIX)
        ranks.setdefault(module, {})[found["part"]] = tensor.shape[0 if found["part"] == "A" else 1]
    wrong = sorted(description.scaling.keys() ^ ranks.keys())
    wrong += [m for m, of in ranks.items() if len(of) != 2 or of["A"] != of["B"]]
    if wrong:
        raise SyncError(
            f"the tensors of the adapter {description.adapter!r} are not those of the trainer's "
            f"model, in {', '.join(map(repr, wrong[:8]))}; send the model that the sender has"
        )
    return {module: of["A"] for module, of in ranks.items()}


def _remove_all(directories: set[Path], process: int) -> None:
    if os.getpid() != process:
        return  # forked from the rank's
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
