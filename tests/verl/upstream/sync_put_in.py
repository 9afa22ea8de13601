"""Our engine in place of verl's own for NCCL, and a process group without a GPU.

verl imports it in each process, as ``VERL_USE_EXTERNAL_MODULES`` names it, so that verl's own tests
of its checkpoint engines run as they stand.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import verl.utils.distributed
from verl.checkpoint_engine import CheckpointEngineRegistry

from sync_plugin_verl import SyncCoreEngine

# verl's own call names the CPU twice, as it takes it for an accelerator.
verl.utils.distributed.initialize_global_process_group_ray = partial(
    verl.utils.distributed.initialize_global_process_group_ray, backend="cpu:gloo"
)


@CheckpointEngineRegistry.register("nccl")
class InPlaceOfNccl(SyncCoreEngine):
    """Takes the arguments of verl's engine for NCCL."""

    def __init__(self, bucket_size: int, is_master: bool = False, **_of_nccl: Any) -> None:
        super().__init__(bucket_size, is_master, scheme="shm", timeout=60)
