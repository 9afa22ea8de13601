"""The weight transfer engine ``"sync_core"``: the receiver in each rank of a vLLM engine.

A version takes these calls, all made by `sync_plugin_vllm.VllmTarget` through vLLM:

- ``init_transfer_engine``, once: each rank makes a `sync_core.Receiver` from its address;
- ``start_weight_update``: each rank stages the version, and the model is not touched;
- ``update_weights``: each rank loads what it staged, if every rank has staged the same version;
  with ``"check": true`` it only raises where that is not so;
- ``finish_weight_update``: each rank drops what it may still have staged.

The ranks compare their results after each of these calls, so that they load one version, or none.
What goes wrong with a version is reported to the sender, rank by rank, and not raised: a rank that
raises leaves vLLM's other ranks in a weight update that cannot be finished.

An adapter takes other calls, as ``finish_weight_update`` of vLLM drops all adapters: see
`sync_plugin_vllm.lora_worker`.

A rank whose weights were discarded (``sleep(level=2)``) joins its sender again, as a worker that
has no version. While its weights are asleep it refuses versions; see `sync_plugin_vllm.sleep`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed
from torch import Tensor
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from sync_core import Address, Layout, OptionError, Receiver, SyncError
from sync_core.errors import AddressError
from sync_core.registry import LAYERS, find
from sync_plugin_vllm.adapter_model import AdapterDescription, base_names, read_sample
from sync_plugin_vllm.lora_worker import AdapterStep, LoraWorker
from sync_plugin_vllm.names import check_names, check_tied, is_tied, tied_names
from sync_plugin_vllm.proof import Proof, check_provable
from sync_plugin_vllm.reload import Kind, rehearse_loading, reload_weights
from sync_plugin_vllm.sleep import watch_sleep
from sync_plugin_vllm.votes import AdapterError, NotLoadedError

_logger = init_logger(__name__)


@dataclass
class SyncCoreInitInfo(WeightTransferInitInfo):
    """The argument of ``init_weight_transfer_engine``.

    Args:
        addresses: one for each rank of the engine, each as `sync_core.Address.to_json` wrote it.
        verify: whether each version is proved after it was loaded; see `sync_plugin_vllm.proof`.
        adapter: of a sender of an adapter, the fields of its `AdapterDescription`.
        base: with ``verify``, of a sender of an adapter, what `base_samples` has of its base model.
        step: the fields of an `AdapterStep`, for an engine that is connected; nothing else then.
    """

    addresses: list[str] = field(default_factory=list)
    verify: bool = False
    adapter: dict[str, Any] | None = None
    base: dict[str, Any] = field(default_factory=dict)
    step: dict[str, Any] | None = None


@dataclass
class SyncCoreUpdateInfo(WeightTransferUpdateInfo):
    """The argument of ``update_weights``.

    Args:
        version: the version to load.
        check: whether to load nothing, and only to raise where a rank has not staged the version.
    """

    version: int
    check: bool = False


class SyncCoreEngine(WeightTransferEngine[SyncCoreInitInfo, SyncCoreUpdateInfo]):
    """Loads what a `sync_core.Sender` sends, by the model's own ``load_weights``."""

    init_info_cls = SyncCoreInitInfo
    update_info_cls = SyncCoreUpdateInfo
    supports_draft_weight_update = False

    _receiver: Receiver | None = None
    _address: Address | None = None
    _staged: int | None = None
    _verify = False
    _adapter = False
    _advice = ""
    _loads = 0

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._memory = watch_sleep(self.model_config, self._lost_weights)
        self._lora = LoraWorker(model, vllm_config.lora_config)

    def init_transfer_engine(self, init_info: SyncCoreInitInfo) -> None:
        """Connect to the sender; the one before, if any, loses this engine.

        Raises:
            AddressError: the addresses are not the JSON of one address for each rank. Nothing was
                connected.
            SyncError: the sender is gone, or does not know the token of an address; or the weights
                have other names than the model takes.
        """
        if init_info.step is not None:
            self._take_step(AdapterStep(**init_info.step))
            return
        if self.parallel_config.pipeline_parallel_size > 1:
            raise OptionError(
                "sync-plugin-vllm does not account for the names of a model in several pipeline "
                "stages; type LLM(…, pipeline_parallel_size=1)"
            )
        # Each rank reads them all, so that all refuse them.
        adapter = init_info.adapter
        addresses = _read(init_info.addresses, self._world_size, partial=adapter is not None)
        address = addresses[self._rank]
        error: Exception | None = None
        receiver = None
        try:
            advice = _advice(address)
            self._check(address, init_info, advice)
            receiver = self._join(address, adapter=adapter is not None)
        except Exception as raised:
            error = raised
        problems = self._gather(None if error is None else f"{type(error).__name__}: {error}")
        if not any(problems):
            self.shutdown()
            self._receiver, self._address = receiver, address
            self._adapter = adapter is not None
            self._verify, self._advice = init_info.verify, advice
            return
        if receiver is not None:
            receiver.close()
        # vLLM reads the answers of ranks in their order up to the first error, and takes those that
        # it has not read for answers to the next call. So only the last rank raises.
        if self._rank == self._world_size - 1:
            raise SyncError(f"weight transfer is not set up: {_listed(problems)}") from error

    def _check(self, address: Address, init_info: SyncCoreInitInfo, advice: str) -> None:
        """Raise unless the engine can take what a sender sends."""
        quantized = self.model_config.quantization is not None
        if init_info.verify:
            check_provable(self.model, self.model_config.quantization)
        if init_info.adapter is None:
            self._check_names(address.layout.names, self._names, advice)
            if not quantized:
                rehearse_loading(self.model, _kinds(address.layout, self.model))
            return
        description = AdapterDescription(**init_info.adapter)
        self._lora.check(address.layout, description, advice, quantized=quantized)
        if init_info.verify:
            self._check_base(address.layout, init_info.base)

    def start_weight_update(self) -> None:
        """Stage the newest version; the model keeps the one that it has."""
        self._staged = None
        try:
            self._stage()
        except Exception:
            _logger.exception("no version could be staged")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the version that is staged, if all ranks have staged it."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SyncCoreUpdateInfo) -> None:
        """Load a version, and answer the sender."""
        receiver = self._connected()
        staged = self._stage_up_to(update_info.version)
        if update_info.check:
            self._check_staged(staged, update_info.version)
            return
        if self._memory.asleep:
            receiver.reject(self._memory.error(receiver.worker_id))
            return
        if any(version != update_info.version for version in staged):
            receiver.reject(
                SyncError(
                    f"not loaded, as its ranks have staged the versions {staged} rather than "
                    f"{update_info.version}"
                )
            )
            return
        error: Exception | None = None
        try:
            receiver.load()
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
        except Exception as raised:
            _logger.exception("version %d could not be loaded", update_info.version)
            error = raised
        problems = self._gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is None and any(problems):
            error = SyncError(f"loaded here, but not by every rank: {_listed(problems)}")
        if error is not None:
            receiver.reject(error)
            return
        self._memory.discarded = False
        receiver.confirm()

    def finish_weight_update(self) -> None:
        """Drop what was staged and not loaded."""
        receiver = self._connected()
        error = NotLoadedError(
            receiver.worker_id, "staged the version, and was not told to load it"
        )
        receiver.reject(error)

    def shutdown(self) -> None:
        """Leave the sender."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _stage(self) -> None:
        """Stage the version that comes next; while the weights are asleep, refuse it."""
        receiver = self._connected()
        self._staged = receiver.stage()
        if self._memory.asleep:
            receiver.reject(self._memory.error(receiver.worker_id))

    def _stage_up_to(self, version: int) -> list[int | None]:
        """Return the version that each rank has staged; None where its weights are asleep.

        A rank that has joined again may have been sent the version before first.
        """
        try:
            while self._staged is not None and self._staged < version:
                self._stage()
        except Exception:
            self._staged = None
            _logger.exception("version %d could not be staged", version)
        return self._gather(None if self._memory.asleep else self._staged)

    def _join(self, address: Address, *, adapter: bool) -> Receiver:
        load = self._lora.load if adapter else self._load
        return Receiver(address, load=load, background=True)

    def _take_step(self, step: AdapterStep) -> None:
        """Take a step of a version of an adapter; see `sync_plugin_vllm.lora_worker`.

        Raises:
            SyncError: a rank could not take it; raised in the last rank alone.
        """
        receiver = self._connected()
        if step.step == "stage":
            self.start_weight_update()
        elif step.step == "check":
            self._check_staged(self._stage_up_to(step.version), step.version)
        elif step.step == "write":
            staged = self._stage_up_to(step.version)
            self._together(lambda: self._write_adapter(step, staged))
        elif step.step == "confirm":
            if self._together(self._find_adapter):
                self._lora.commit()
                receiver.confirm()
        elif step.step == "drop":
            if step.reason:
                receiver.reject(AdapterError(receiver.worker_id, step.reason))
            self.finish_weight_update()
            self._lora.drop()
        else:
            self._lora.keep(step.name, step.names)

    def _write_adapter(self, step: AdapterStep, staged: list[int | None]) -> None:
        receiver = self._connected()
        if self._memory.asleep:
            raise self._memory.error(receiver.worker_id)
        if self._memory.discarded:
            raise AdapterError(
                receiver.worker_id,
                "sleep(level=2) has discarded the engine's weights, which an adapter does not "
                "bring; send the base model by another VllmTarget(…), without adapter=, and type "
                "target.connect(sender) again",
            )
        if any(version != step.version for version in staged):
            raise SyncError(
                f"its ranks have staged the versions {staged} rather than {step.version}"
            )
        writes = self._world_size == 1 or get_world_group().local_rank == 0
        self._lora.take(step, writes=writes)
        try:
            receiver.load()
        except AdapterError:
            if not self._lora.written:
                raise

    def _check_base(self, layout: Layout, samples: dict[str, Any]) -> None:
        """Raise unless the layers compute with the base model of an adapter."""
        if self._memory.asleep:
            raise self._memory.error(-1)
        proof = Proof(self.model, self._tensor_rank, turn=0, columns=1)
        dimensions = {
            own: len(layout.specs[layout.index[name]].shape)
            for name, own in base_names(layout.names).items()
        }
        for name, (dtype, data) in samples.items():
            sample = read_sample(dtype, data)
            proof.add(name, sample if dimensions[name] == 1 else sample[:, None])
        if wrong := proof.differing():
            raise SyncError(
                f"the engine's base model is not the one of the trainer's adapter, in {wrong}; "
                "start the engine with the checkpoint that the trainer began with"
            )
        self._memory.discarded = False

    def _find_adapter(self) -> None:
        self._lora.find()
        self._connected().load()

    def _together(self, take: Callable[[], None]) -> bool:
        """Take a step on all ranks; if one fails, all refuse the version, and the last raises."""
        error: Exception | None = None
        try:
            take()
        except Exception as raised:
            error = raised
        problems = self._gather(None if error is None else f"{type(error).__name__}: {error}")
        if not any(problems):
            return True
        refusal = SyncError(f"the adapter is not loaded: {_listed(problems)}")
        self._connected().reject(error or refusal)
        self._lora.drop()
        if self._rank == self._world_size - 1:
            raise refusal from error
        return False

    def _lost_weights(self) -> None:
        """Join the sender again, which then knows that this rank has no version."""
        if self._receiver is None or self._address is None:
            return
        self._staged = None
        self.shutdown()
        try:
            self._receiver = self._join(self._address, adapter=self._adapter)
        except SyncError:
            # The sender counts this rank as lost; the engine may sleep all the same.
            _logger.exception("this rank could not join its sender again")

    def _check_staged(self, staged: list[int | None], version: int) -> None:
        """Raise, in the last rank alone, unless all ranks have staged a version."""
        if all(found == version for found in staged) or self._rank < self._world_size - 1:
            return
        # vLLM counts the update as ended in a rank that raises.
        self.finish_weight_update()
        if self._memory.asleep:
            raise self._memory.error(self._connected().worker_id)
        raise SyncError(f"its ranks have staged the versions {staged} rather than {version}")

    def _load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Load a whole version, account for every name, and prove it on request.

        Raises:
            LayoutMismatchError: a name was sent that vLLM did not load, or a parameter of vLLM's
                model was not sent.
            SyncError: the layers compute with something else.
        """
        sent: list[str] = []
        tied, kept = tied_names(self.model), dict[str, Tensor]()
        proof = Proof(self.model, self._tensor_rank, self._loads) if self._verify else None
        self._loads += 1

        def moved() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in named:
                sent.append(name)
                if name in tied:
                    kept[name] = tensor
                if proof is not None:
                    proof.sample(name, tensor)
                if not is_tied(name, self.model):
                    yield name, tensor.to(self.device)

        loaded = reload_weights(self.model, moved(), self.model_config, self.device)
        self._check_names(sent, loaded, self._advice)
        check_tied(kept, tied, self.model)
        if proof is not None:
            proof.check()

    def _check_names(self, sent: Iterable[str], taken: Collection[str], advice: str) -> None:
        quantized = self.model_config.quantization is not None
        check_names(list(sent), taken, self.model, quantized=quantized, advice=advice)

    @property
    def _names(self) -> frozenset[str]:
        """All names of the model's tensors."""
        named = (self.model.named_parameters, self.model.named_buffers)
        return frozenset(name for each in named for name, _ in each(remove_duplicate=False))

    @property
    def _tensor_rank(self) -> tuple[int, int]:
        """The rank among those that share each layer, and how many these are."""
        ranks = int(self.parallel_config.tensor_parallel_size)
        return int(self.parallel_config.rank) % ranks, ranks

    @property
    def _world_size(self) -> int:
        return int(self.parallel_config.world_size_across_dp)

    @property
    def _rank(self) -> int:
        parallel = self.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def _connected(self) -> Receiver:
        if self._receiver is None:
            raise SyncError("this engine has no sender yet; type target.connect(sender)")
        return self._receiver

    def _gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        if self._world_size == 1:
            return [value]
        values: list[Any] = [None] * self._world_size
        torch.distributed.all_gather_object(values, value, group=get_world_group().cpu_group)
        return values


def _read(texts: Any, world_size: int, *, partial: bool) -> list[Address]:
    if not isinstance(texts, list) or len(texts) != world_size:
        given = f"{len(texts)} addresses" if isinstance(texts, list) else repr(type(texts))
        raise AddressError(
            f"this engine has {world_size} ranks and needs a list with an address for each, got "
            f"{given}; type Sender(…, num_workers=target.num_workers)"
        )
    addresses = [Address.from_json(text) for text in texts]
    layers = [find(LAYERS, layer).object for address in addresses for layer in address.layers]
    if partial:
        return addresses
    if any("partial" in getattr(layer, "capabilities", ()) for layer in layers):
        raise AddressError(
            "vLLM loads whole versions, and the versions of this sender may lack tensors; type "
            "Sender(…) without layers that leave out tensors, or for an adapter "
            'VllmTarget(…, adapter="policy")'
        )
    return addresses


def _advice(address: Address) -> str:
    """Return the hint for names that do not fit, from the options of the address."""
    if address.strategy != "checkpoint":
        return (
            f"These are names of strategy={address.strategy!r}; type "
            'Sender(…, strategy="checkpoint") for those of a checkpoint'
        )
    return (
        "vLLM takes the names of the checkpoint that the engine was started with; send that model, "
        "or type Sender(…, layers=[…]) with a layer that renames"
    )


def _kinds(layout: Layout, model: Any) -> list[Kind]:
    """The tensors that are loaded."""
    specs = {name: layout.specs[layout.index[name]] for name in layout.names}
    return [
        (name, spec.dtype, spec.shape) for name, spec in specs.items() if not is_tied(name, model)
    ]


def _listed(problems: list[str | None]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
