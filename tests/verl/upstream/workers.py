"""A trainer of verl's with FSDP, and rollout workers of verl's that keep what they load."""

from __future__ import annotations

import hashlib
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import torch
from ray import cloudpickle
from torch import Tensor
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import (
    CheckpointEngineConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    RolloutConfig,
)
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.rollout import BaseRollout, RolloutReplica

# Workers cannot import this file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def digest(tensor: Tensor) -> str:
    """Return what tells tensors of other values, dtypes or shapes apart."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


class Trainer(TrainingWorker):
    """One rank of a trainer, with the checkpoint engine that verl's actors have."""

    def __init__(self, config: TrainingWorkerConfig, checkpoint: CheckpointEngineConfig) -> None:
        # verl's own call names the CPU twice, as it takes it for an accelerator.
        initialize_global_process_group_ray(backend="cpu:gloo")
        super().__init__(config)
        import_external_libs(checkpoint.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            checkpoint.backend,
            is_master=torch.distributed.get_rank() == 0,
            bucket_size=checkpoint.update_weights_bucket_megabytes << 20,
            **checkpoint.engine_kwargs.get(checkpoint.backend, {}),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        del mode
        weights, _ = self.engine.get_per_tensor_param()
        return await self.checkpoint_engine.send_weights(weights, global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self) -> None:
        """Change every weight."""
        with torch.no_grad():
            for parameter in self.engine.module.parameters():
                parameter.mul_(1.01)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digests(self) -> dict[str, str]:
        """Return those of the whole weights, which takes all ranks."""
        weights, _ = self.engine.get_per_tensor_param()
        return {name: digest(tensor) for name, tensor in weights}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def memory(self) -> float:
        """Return the peak of this process's memory, in MB."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Rollout(BaseRollout):
    """In place of an inference engine: it keeps the digests of what it loads, or copies."""

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig, copies: bool) -> None:
        super().__init__(config, model_config, device_mesh=None)
        self.copies: dict[str, Tensor] | None = {} if copies else None
        self.loaded: dict[str, str] = {}
        self.steps: list[int | None] = []

    async def resume(self, tags: list[str]) -> None:
        raise NotImplementedError

    async def release(self) -> None:
        raise NotImplementedError

    async def update_weights(self, weights: Any, global_steps: int | None, **others: Any) -> None:
        assert others == {"wire_format": "named_tensors"}
        loaded = {}
        async for name, tensor in weights:
            if self.copies is None:
                loaded[name] = digest(tensor)
            else:
                self.copies[name] = tensor.clone()
        self.loaded = loaded
        self.steps.append(global_steps)


class RolloutWorker(CheckpointEngineWorker):
    """The worker that verl starts for each rank of a rollout."""

    def __init__(
        self, rollout_config: RolloutConfig, model_config: HFModelConfig, copies: bool
    ) -> None:
        adapter = Rollout(rollout_config, model_config, copies)
        super().__init__(rollout_config, model_config, adapter)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def loaded(self) -> tuple[dict[str, str], list[int | None], int]:
        return self.server_adapter.loaded, self.server_adapter.steps, os.getpid()


class Replica(RolloutReplica):
    """A rollout of one rank, without a server."""

    def __init__(self, rank: int, group: RayWorkerGroup, **configs: Any) -> None:
        super().__init__(replica_rank=rank, **configs)
        self.group = group
        self.workers = group.workers

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        raise NotImplementedError

    async def launch_servers(self) -> None:
        raise NotImplementedError


def configs(
    model: Path, engine: Mapping[str, Any]
) -> tuple[CheckpointEngineConfig, HFModelConfig, RolloutConfig]:
    """Return verl's configurations of an engine, a model and a rollout."""
    checkpoint = CheckpointEngineConfig(
        backend="sync_core",
        custom_backend_module="sync_plugin_verl",
        engine_kwargs={"sync_core": dict(engine)},
    )
    hf = HFModelConfig(
        path=str(model),
        load_tokenizer=False,
        use_remove_padding=False,
        override_config={"attn_implementation": "eager"},
    )
    return checkpoint, hf, RolloutConfig(name="vllm", checkpoint_engine=checkpoint)


def start_trainer(
    ranks: int, checkpoint: CheckpointEngineConfig, hf: HFModelConfig, **engine: Any
) -> Any:
    """Return a trainer whose model is sharded over ranks."""
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=hf,
        engine_config=FSDPEngineConfig(fsdp_size=ranks, strategy="fsdp2", **engine),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3),
    )
    made = RayClassWithInitArgs(cls=ray.remote(Trainer), config=config, checkpoint=checkpoint)
    group = _group(ranks, made)
    group.reset()
    return group


def start_replica(
    rank: int, hf: HFModelConfig, rollout: RolloutConfig, *, copies: bool = False
) -> Replica:
    """Return a rollout in another process."""
    made = RayClassWithInitArgs(
        cls=ray.remote(RolloutWorker), model_config=hf, rollout_config=rollout, copies=copies
    )
    group = _group(1, made)
    return Replica(rank, group, config=rollout, model_config=hf)


def _group(count: int, made: RayClassWithInitArgs) -> RayWorkerGroup:
    pool = RayResourcePool(process_on_nodes=[count], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")
