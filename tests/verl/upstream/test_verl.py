"""Steps of verl's own manager, from a trainer with FSDP to rollout workers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import ray
import verl
from hydra import compose, initialize_config_dir
from ray.exceptions import RayError
from tests.verl.upstream.tiny_model import save_tiny_model
from tests.verl.upstream.workers import configs, start_replica, start_trainer
from verl.checkpoint_engine import (
    CheckpointEngine,
    CheckpointEngineManager,
    CheckpointEngineRegistry,
)
from verl.utils.config import omega_conf_to_dataclass

import sync_plugin_verl

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(300)
ENGINE = {"scheme": "shm", "timeout": 60}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a tiny model."""
    path = tmp_path_factory.mktemp("qwen")
    save_tiny_model(path)
    return path


def test_verl_finds_the_engine_by_its_name() -> None:
    found = CheckpointEngineRegistry.get("sync_core")
    assert found is sync_plugin_verl.SyncCoreEngine
    engine = CheckpointEngineRegistry.new("sync_core", bucket_size=1, is_master=True, **ENGINE)
    assert isinstance(engine, CheckpointEngine)


def test_verl_reads_the_configuration_of_the_page() -> None:
    text = (ROOT / "docs" / "how-to" / "verl.md").read_text(encoding="utf-8")
    assigned = re.findall(r"[ \"](\+?\$engine\.\S+?=(?:{.*?}|\w+))", text)
    where = "actor_rollout_ref.rollout.checkpoint_engine"
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        given = compose("ppo_trainer", [each.replace("$engine", where) for each in assigned])
    config = omega_conf_to_dataclass(given.actor_rollout_ref.rollout.checkpoint_engine)
    assert config.custom_backend_module == "sync_plugin_verl"
    options = config.engine_kwargs[config.backend]
    assert options == {"scheme": "dist", "host": "auto", "timeout": 300}
    engine = CheckpointEngineRegistry.new(config.backend, bucket_size=1, **options)
    assert repr(engine) == "<SyncCoreEngine 'dist': not the rank that sends>"


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
