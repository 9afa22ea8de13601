"""A pytest plugin with which verl's own tests of checkpoint engines run without a GPU.

``make test-verl`` loads it. A tiny model takes the place of the one that the tests name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from tiny_model import save_tiny_model  # type: ignore[import-not-found] # by PYTHONPATH

os.environ["VERL_USE_EXTERNAL_MODULES"] = "sync_cpu_platform,sync_put_in"
os.environ["VERL_PLATFORM"] = "cpu"
os.environ["VERL_ENGINE_DEVICE"] = "cuda"
os.environ["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), os.getcwd()))

# Two trainers and two rollouts.
torch.cuda.device_count = lambda: 4
ray.init = partial(ray.init, num_cpus=8, include_dashboard=False)


@pytest.fixture(autouse=True, scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Save a model where the tests look for Qwen3-8B."""
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine_workers import TrainingWorkerConfig

    home = tmp_path_factory.mktemp("home")
    save_tiny_model(home / "models" / "Qwen" / "Qwen3-8B-Base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        # The CPU has no flash attention, no FSDP1 and no memory to pin.
        _set(patch, HFModelConfig, override_config={"attn_implementation": "eager"})
        _set(patch, FSDPEngineConfig, strategy="fsdp2", forward_only=False)
        _set(patch, TrainingWorkerConfig, optimizer_config=FSDPOptimizerConfig(lr=1e-3))
        yield


def _set(patch: pytest.MonkeyPatch, config: Any, **options: Any) -> None:
    """Let a configuration be made with these options, whatever the test says."""
    make = config.__init__
    patch.setattr(config, "__init__", lambda self, **given: make(self, **given | options))
