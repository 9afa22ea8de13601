"""An engine that is a Ray actor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.engines.engines import OPTIONS, check_output, generated, make_llama

from sync_core import Sender, SendError
from sync_plugin_vllm import VllmTarget

pytestmark = pytest.mark.timeout(600)


def test_an_actor_has_each_version_and_its_death_is_reported(checkpoint: Path) -> None:
    import ray
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    class Actor(LLM):
        def generated(self) -> tuple[list[int], list[str]]:
            return generated(self)

    # An actor must find this file, and whatever else this process does by its own PYTHONPATH.
    paths = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": paths}
    ray.init(num_cpus=1, include_dashboard=False, runtime_env={"env_vars": variables})
    try:
        config = WeightTransferConfig(backend="sync_core")
        remote: Any = ray.remote(Actor)
        actor = remote.remote(str(checkpoint), weight_transfer_config=config, **OPTIONS)
        target, model = VllmTarget([actor], timeout=120), make_llama(1)
        with Sender("shm", model, num_workers=1, strategy="checkpoint", timeout=60) as sender:
            target.connect(sender)
            assert target.send().updated == (0,)
            check_output(ray.get(actor.generated.remote()), model, "1")
            ray.kill(actor)
            with pytest.raises(SendError, match="worker 0"):
                target.send()
    finally:
        ray.shutdown()
