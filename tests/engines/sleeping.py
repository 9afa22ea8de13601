"""A worker of vLLM for CPUs that sleeps as one on a GPU does, which vLLM's own ignores.

vLLM's calls are all real: ``LLM.sleep`` pauses the scheduler and calls each worker, which calls the
sleep-mode backend of the engine's configuration. The backend here releases the memory of the
weights on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory
from vllm.v1.worker.cpu_worker import CPUWorker

BACKEND = "host-memory"
WORKER = "tests.engines.sleeping.SleepingWorker"


class HostMemory(SleepModeBackend):
    """Releases the memory of a model: level 1 keeps a copy, level 2 does not."""

    model: Any = None

    def __init__(self) -> None:
        super().__init__()
        self._released: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []

    def suspend(self, level: int = 1) -> None:
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in self._tensors()}
        for storage in storages.values():
            self._released.append((storage, len(storage), storage.clone() if level == 1 else None))
            storage.resize_(0)

    def resume(self, tags: list[str] | None = None) -> None:
        if tags is not None and "weights" not in tags:
            return
        for storage, size, copy in self._released:
            storage.resize_(size)
            if copy is None:
                torch.tensor([], dtype=torch.uint8).set_(storage).fill_(255)  # bfloat16: NaN
            else:
                storage.copy_(copy)
        self._released.clear()

    def _tensors(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = list(self.model.parameters())
        return [tensor for tensor in found if tensor.untyped_storage().size()]


class SleepingWorker(CPUWorker):
    """Calls the sleep-mode backend as vLLM's worker on a GPU does."""

    def __init__(self, vllm_config: Any, *args: Any, **options: Any) -> None:
        vllm_config.model_config.sleep_mode_backend = BACKEND
        super().__init__(vllm_config, *args, **options)

    def sleep(self, level: int = 1) -> None:
        HostMemory.model = self.model_runner.model
        self.sleep_mode_backend.suspend(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.sleep_mode_backend.resume(tags)


SleepModeBackendFactory.register_backend(BACKEND, __name__, "HostMemory")
