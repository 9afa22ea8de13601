"""Steps of verl's own manager, from a trainer with FSDP to rollout workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import transformers
from ray.exceptions import RayError
from tests.verl.upstream.workers import configs, start_replica, start_trainer
from verl.checkpoint_engine import (
    CheckpointEngine,
    CheckpointEngineManager,
    CheckpointEngineRegistry,
)

import sync_plugin_verl

pytestmark = pytest.mark.timeout(300)
ENGINE = {"scheme": "shm", "timeout": 60}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a tiny model."""
    path = tmp_path_factory.mktemp("qwen")
    config = transformers.Qwen2Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def test_verl_finds_the_engine_by_its_name() -> None:
    found = CheckpointEngineRegistry.get("sync_core")
    assert found is sync_plugin_verl.SyncCoreEngine
    engine = CheckpointEngineRegistry.new("sync_core", bucket_size=1, is_master=True, **ENGINE)
    assert isinstance(engine, CheckpointEngine)


@pytest.mark.usefixtures("one_ray")
def test_steps_with_a_rollout_that_dies_and_one_that_is_added(model: Path) -> None:
    checkpoint, hf, rollout = configs(model, ENGINE)
    trainer = start_trainer(2, checkpoint, hf)
    first, second = (start_replica(rank, hf, rollout) for rank in range(2))
    manager = CheckpointEngineManager(checkpoint, trainer, [first, second])

    def update(step: int, *replicas: Any) -> None:
        metrics = manager.update_weights(step)
        assert metrics["sync_core/workers"] == len(replicas)
        digests = trainer.digests()[0]
        for replica in replicas:
            [(loaded, steps, _)] = replica.group.loaded()
            assert loaded == digests
            assert steps[-1] == step

    update(0, first, second)
    trainer.train()
    update(1, first, second)
    # It dies, and verl takes it for alive.
    ray.kill(second.workers[0])
    trainer.train()
    with pytest.raises(RayError):
        manager.update_weights(2)
    manager.remove_replicas([second])
    update(2, first)
    third = start_replica(2, hf, rollout)
    manager.add_replicas([third])
    trainer.train()
    update(3, first, third)
