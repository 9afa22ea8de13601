"""Load versions of an adapter in one rank of a vLLM engine.

Each step is an ``init_weight_transfer_engine`` with an `EngineStep`, since vLLM's calls for weights
drop all adapters at their end:

- ``stage``: each rank stages the version.
- ``check``, for ``all_or_none``: the engine answers whether all ranks have staged it.
- ``write``: one rank of each machine writes the files. Then the trainer calls ``add_lora``.
- ``confirm``: each rank confirms the version if its LoRA manager has a new adapter.
- ``drop``: each rank refuses the version, and its files are removed.
- ``keep``: all other versions are unloaded, and their files are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sync_core import Layout, OptionError, Receiver, SyncError
from sync_core.errors import LayoutMismatchError
from sync_plugin_vllm.adapter_files import AdapterFiles
from sync_plugin_vllm.adapter_model import PREFIX, TENSOR, AdapterDescription, base_names
from sync_plugin_vllm.names import FusedNames, check_names, is_tied, names_of
from sync_plugin_vllm.ranks import Ranks
from sync_plugin_vllm.reload import Kind, rehearse_loading
from sync_plugin_vllm.sleep import WeightMemory
from sync_plugin_vllm.staging import EngineStep, Staging
from sync_plugin_vllm.votes import AdapterError


class LoraWorker:
    """Takes the steps of an adapter's versions, and tracks which versions are loaded.

    Args:
        model: vLLM's model.
        lora_config: vLLM's LoRA configuration; None if the engine has no LoRA.
        ranks: the ranks of the engine.
        memory: the memory state of the base model's weights.
    """

    def __init__(self, model: Any, lora_config: Any, ranks: Ranks, memory: WeightMemory) -> None:
        self._model = model
        self._lora_config = lora_config
        self._ranks = ranks
        self._memory = memory
        self._files = AdapterFiles()
        #: By name: the number and the directory of each loaded version.
        self._loaded: dict[str, tuple[int, Path]] = {}
        #: All names so far, since vLLM's prompt cache is keyed by the adapter's name.
        self._names: set[str] = set()
        self._before: set[int] = set()
        #: The step of a version whose files were begun, and which is not known to be loaded.
        self._step: EngineStep | None = None
        self._is_written = False
        #: The number of the version in vLLM; 0 if it was not found.
        self._found = 0

    def check(
        self, layout: Layout, description: AdapterDescription, advice: str, *, quantized: bool
    ) -> None:
        """Raise unless the engine supports an adapter and has the shapes of its base model.

        Args:
            layout: the layout of the trainer's PEFT model.
            description: the description of its adapter.
            advice: the last sentence of an error about names.
            quantized: whether the engine's base model is quantized, so that shapes differ.

        Raises:
            OptionError: the engine takes no adapters, or only of a lower LoRA rank.
            LayoutMismatchError: modules of the adapter or weights of the base model are missing in
                the engine or have another shape there.
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
        check_names(sent, names_of(self._model), self._model, quantized=quantized, advice=advice)
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

    def take(self, step: EngineStep, staging: Staging) -> None:
        """Take a step.

        Raises:
            SyncError: a rank has failed, and all ranks have refused the version.
        """
        receiver = staging.receiver
        if step.step == "stage":
            staging.begin()
        elif step.step == "write":
            versions = staging.versions(step.version)
            self._together(receiver, lambda: self._write(step, receiver, versions))
        elif step.step == "confirm":
            self._together(receiver, lambda: self._find(receiver))
            self._commit()
            receiver.confirm()
        elif step.step == "drop":
            if step.reason:
                receiver.reject(AdapterError(receiver.worker_id, step.reason))
            staging.drop()
            self._drop()
        else:
            self._keep(step.name, step.names)

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Write the files of a version and raise, since vLLM has not loaded them yet.

        Once the version was found in vLLM's manager, return: the engine has the version.

        Raises:
            AdapterError: vLLM has not loaded the version yet, or the files cannot be written.
        """
        if self._found:
            return
        try:
            step = self._step
            if step is None:
                raise SyncError("no step has begun")
            description = AdapterDescription(**step.description)
            tensors = {n: t.contiguous() for n, t in named if _is_of(n, description.adapter)}
            ranks = _lora_ranks(tensors, description)
            if self._ranks.is_first_of_machine:
                self._files.write(Path(step.directory), tensors, description, ranks)
        except Exception as error:
            raise AdapterError(0, f"{type(error).__name__}: {error}") from error
        self._is_written = True
        raise AdapterError(0, "vLLM has not loaded the adapter yet")

    def _together(self, receiver: Receiver, take: Callable[[], None]) -> None:
        """Take a step on all ranks; if one fails, all refuse the version."""
        error, problems = self._ranks.attempt(take)
        if problems:
            refusal = SyncError(f"the adapter is not loaded: {problems}")
            receiver.reject(error or refusal)
            self._drop()
            raise refusal from error

    def _write(self, step: EngineStep, receiver: Receiver, versions: list[int | None]) -> None:
        self._drop()
        if self._memory.asleep:
            raise self._memory.error(receiver.worker_id)
        if self._memory.discarded:
            raise AdapterError(
                receiver.worker_id,
                "sleep(level=2) has discarded the engine's weights, which an adapter does not "
                "bring; send the base model by another VllmTarget(…), without adapter=, and type "
                "target.connect(sender) again",
            )
        if any(version != step.version for version in versions):
            raise SyncError(
                f"its ranks have staged the versions {versions} rather than {step.version}"
            )
        if step.name in self._names:
            raise OptionError(
                f"the engine has had an adapter {step.name!r} before, whose cached prompts it may "
                "use again; let the trainer count on: Sender(…, version=…)"
            )
        self._names.add(step.name)
        self._step = step
        self._before = set(self._manager().list_adapters())
        try:
            receiver.load()
        except AdapterError:
            if not self._is_written:
                raise

    def _find(self, receiver: Receiver) -> None:
        """Find the version in vLLM's manager."""
        step = self._step
        found = set(self._manager().list_adapters())
        number = 0 if step is None else step.lora_id
        new = found & {number} if number else found - self._before
        if step is None or not new:
            name = "adapter" if step is None else repr(step.name)
            raise AdapterError(0, f"vLLM's LoRA manager has {sorted(found)}, and no {name}")
        # The newest number: a server counts up, and a reloaded adapter keeps a smaller one.
        self._found = max(new)
        receiver.load()

    def _commit(self) -> None:
        """Add the found version to the versions that requests may use."""
        assert self._step is not None
        self._loaded[self._step.name] = self._found, Path(self._step.directory)
        self._step, self._found, self._is_written = None, 0, False

    def _drop(self) -> None:
        """Unload an unconfirmed version, and remove its files."""
        if self._step is not None:
            self._unload(self._step.lora_id, Path(self._step.directory))
        self._step, self._found, self._is_written = None, 0, False

    def _keep(self, prefix: str, names: Iterable[str]) -> None:
        """Unload the versions whose names have the prefix, except those in ``names``."""
        versions = {n for n in self._loaded if n.rpartition("-v")[0] + "-v" == prefix}
        for name in versions - set(names):
            self._unload(*self._loaded.pop(name))

    def _unload(self, lora_id: int, directory: Path) -> None:
        if lora_id:
            self._manager().remove_adapter(lora_id)
        self._files.remove(directory)

    def _manager(self) -> Any:
        manager = getattr(self._model, "lora_manager", None)
        if manager is None or self._lora_config is None:
            raise OptionError(
                "the engine takes no adapters; start it with enable_lora=True, or send the adapter "
                'merged: layers=[lora("merged")]'
            )
        return manager


def _is_of(name: str, adapter: str) -> bool:
    found = TENSOR.fullmatch(name)
    return found is not None and found["adapter"] == adapter


def _lora_ranks(tensors: Mapping[str, Tensor], description: AdapterDescription) -> dict[str, int]:
    """Return the LoRA rank of each module.

    Raises:
        SyncError: the described modules are not the modules that were sent.
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
