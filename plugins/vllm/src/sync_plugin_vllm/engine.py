"""The weight transfer engine ``"sync_core"``: the receiver in each rank of a vLLM engine.

To load a version, `sync_plugin_vllm.VllmTarget` makes these calls through vLLM:

- ``init_transfer_engine``, once: each rank makes a `sync_core.Receiver` from its address.
- ``start_weight_update``: each rank stages the version without touching the model.
- ``update_weights``: each rank loads the staged version, if all ranks have staged the same one.
- ``finish_weight_update``: each rank drops a version that is still staged.

The ranks compare their results (`sync_plugin_vllm.ranks`), so that all load the same version or
none. Errors with a version are not raised but reported to the sender by each rank: if one rank
raised, vLLM's other ranks could not finish the weight update.

vLLM has no call for other steps, and aborts the update of a rank that raises in its calls. So each
`sync_plugin_vllm.staging.EngineStep` is passed to ``init_weight_transfer_engine``. An adapter uses
only such steps, since vLLM's ``finish_weight_update`` drops all adapters.

A rank whose weights were discarded (``sleep(level=2)``) rejoins its sender as a worker without a
version. While its weights are asleep it refuses versions; see `sync_plugin_vllm.sleep`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from sync_core import Address, Layout, OptionError, Receiver, SyncError
from sync_core.errors import AddressError
from sync_core.registry import LAYERS, find
from sync_plugin_vllm.adapter_model import AdapterDescription
from sync_plugin_vllm.lora_worker import LoraWorker
from sync_plugin_vllm.names import check_names, check_tied, is_tied, names_of, tied_names
from sync_plugin_vllm.proof import Proof, check_base, check_provable
from sync_plugin_vllm.ranks import Ranks
from sync_plugin_vllm.reload import Kind, rehearse_loading, reload_weights
from sync_plugin_vllm.sleep import watch_sleep
from sync_plugin_vllm.staging import EngineStep, Staging

_logger = init_logger(__name__)


@dataclass
class SyncCoreInitInfo(WeightTransferInitInfo):
    """The argument of ``init_weight_transfer_engine``.

    Args:
        addresses: one address per rank of the engine, written by `sync_core.Address.to_json`.
        verify: whether to prove each version after loading it; see `sync_plugin_vllm.proof`.
        adapter: the fields of the `AdapterDescription`, if the sender sends an adapter.
        base: the `base_samples` of the adapter's base model, with ``verify``.
        step: the fields of an `EngineStep` for a connected engine; the other fields are empty then.
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
    """

    version: int


class SyncCoreWeightEngine(WeightTransferEngine[SyncCoreInitInfo, SyncCoreUpdateInfo]):
    """Loads the versions of a `sync_core.Sender` with the model's own ``load_weights``."""

    init_info_cls = SyncCoreInitInfo
    update_info_cls = SyncCoreUpdateInfo
    supports_draft_weight_update = False

    _staging: Staging | None = None
    _address: Address | None = None
    _verify = False
    _adapter = False
    #: Whether vLLM is in a weight update.
    _updating = False
    _advice = ""
    _loads = 0

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._memory = watch_sleep(self.model_config, self._lost_weights)
        self._ranks = Ranks(self.parallel_config)
        self._lora = LoraWorker(model, vllm_config.lora_config, self._ranks, self._memory)

    def init_transfer_engine(self, init_info: SyncCoreInitInfo) -> None:
        """Connect to a sender, and disconnect from the previous one, if any.

        Raises:
            SyncError: the addresses are not the JSON of one address per rank, the sender is gone or
                does not accept the token, or the names of the weights do not fit the model. No rank
                was connected.
        """
        with self._ranks.raising_once():
            if init_info.step is None:
                self._connect(init_info)
            else:
                self._take_step(EngineStep(**init_info.step))

    def _take_step(self, step: EngineStep) -> None:
        if step.step == "check":
            self._connected().check(step.version)
        elif step.step != "updating":
            self._lora.take(step, self._connected(adapter=True))
        elif not self._updating:
            raise SyncError("no weight update has begun")

    def _connect(self, init_info: SyncCoreInitInfo) -> None:
        is_adapter = init_info.adapter is not None
        joined: list[tuple[Receiver, Address]] = []

        def join() -> None:
            addresses = _read(init_info.addresses, self._ranks.count, partial=is_adapter)
            address = addresses[self._ranks.own]
            self._check(address, init_info)
            joined.append((self._join(address, adapter=is_adapter), address))

        error, problems = self._ranks.attempt(join)
        if problems:
            for receiver, _ in joined:
                receiver.close()
            raise SyncError(f"weight transfer is not set up: {problems}") from error
        self.shutdown()
        [(receiver, self._address)] = joined
        self._staging = Staging(receiver, self._memory, self._ranks)
        self._adapter, self._verify = is_adapter, init_info.verify
        self._advice = _advice(self._address)

    def _check(self, address: Address, init_info: SyncCoreInitInfo) -> None:
        """Raise unless the engine can load the weights of a sender."""
        if self.parallel_config.pipeline_parallel_size > 1:
            raise OptionError(
                "sync-plugin-vllm does not account for the names of a model in several pipeline "
                "stages; type LLM(…, pipeline_parallel_size=1)"
            )
        quantization, advice = self.model_config.quantization, _advice(address)
        if init_info.verify:
            check_provable(self.model, quantization)
        if init_info.adapter is None:
            self._check_names(address.layout.names, names_of(self.model), advice)
            if quantization is None:
                rehearse_loading(self.model, _kinds(address.layout, self.model))
            return
        description = AdapterDescription(**init_info.adapter)
        quantized = quantization is not None
        self._lora.check(address.layout, description, advice, quantized=quantized)
        if init_info.verify:
            if self._memory.asleep:
                raise self._memory.error(address.worker_id)
            check_base(self.model, self._ranks.of_layers, address.layout, init_info.base)
            self._memory.discarded = False

    def start_weight_update(self) -> None:
        """Stage the newest version, without changing the model."""
        self._updating = True
        if self._staging is not None:
            self._staging.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the staged version, if all ranks have staged it."""
        with self._ranks.raising_once():
            self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SyncCoreUpdateInfo) -> None:
        """Load a version, and answer the sender."""
        staging, version = self._connected(adapter=False), update_info.version
        receiver, staged = staging.receiver, staging.versions(version)
        if self._memory.asleep:
            receiver.reject(self._memory.error(receiver.worker_id))
            return
        if any(each != version for each in staged):
            reason = f"its ranks have staged the versions {staged} rather than {version}"
            receiver.reject(SyncError(f"not loaded, as {reason}"))
            return

        def load() -> None:
            receiver.load()
            if self.device.type != "cpu":
                torch.accelerator.synchronize()

        error, problems = self._ranks.attempt(load)
        if problems:
            _logger.error("version %d could not be loaded", version, exc_info=error)
            others = SyncError(f"loaded here, but not by every rank: {problems}")
            receiver.reject(error or others)
            return
        self._memory.discarded = False
        receiver.confirm()

    def finish_weight_update(self) -> None:
        """Drop a staged version that was not loaded."""
        self._updating = False
        if self._staging is not None:
            self._staging.drop()

    def shutdown(self) -> None:
        """Disconnect from the sender."""
        if self._staging is not None:
            self._staging.receiver.close()
            self._staging = None

    def _connected(self, *, adapter: bool | None = None) -> Staging:
        """Return the staging of this rank; raise if it is of the wrong kind."""
        if self._staging is None:
            raise SyncError("this engine has no sender yet; type target.connect(sender)")
        if adapter not in (None, self._adapter):
            kind = "an adapter" if self._adapter else "whole versions"
            raise SyncError(
                f"another target has connected this engine to a sender of {kind}; type "
                "target.connect(sender)"
            )
        return self._staging

    def _join(self, address: Address, *, adapter: bool) -> Receiver:
        load = self._lora.load if adapter else self._load
        return Receiver(address, load=load, background=True)

    def _lost_weights(self) -> None:
        """Rejoin the sender, which then knows that this rank has no version."""
        if self._staging is None or self._address is None:
            return
        self.shutdown()
        try:
            receiver = self._join(self._address, adapter=self._adapter)
        except SyncError:
            # Only log: the sender counts this rank as lost, and the engine can still sleep.
            _logger.exception("this rank could not join its sender again")
        else:
            self._staging = Staging(receiver, self._memory, self._ranks)

    def _load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Load a whole version, check that no name was left out, and prove it on request.

        Raises:
            LayoutMismatchError: vLLM did not load a name that was sent, or a parameter of its model
                was not sent.
            SyncError: the layers do not compute with the version's weights.
        """
        sent: list[str] = []
        tied, kept = tied_names(self.model), dict[str, Tensor]()
        proof = Proof(self.model, self._ranks.of_layers, self._loads) if self._verify else None
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
    """Return the hint for mismatched names, from the options of the address."""
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
    """Return the kinds of the tensors to load."""
    specs = {name: layout.specs[layout.index[name]] for name in layout.names}
    return [
        (name, spec.dtype, spec.shape) for name, spec in specs.items() if not is_tied(name, model)
    ]
