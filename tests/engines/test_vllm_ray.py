"""An engine that is a Ray actor."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.engines import OPTIONS, check_output, generated, make_llama

from sync_core import Sender, SendError
from sync_plugin_std import lora
from sync_plugin_vllm import VllmTarget

pytestmark = pytest.mark.timeout(600)


def test_an_actor_has_each_version_and_its_death_is_reported(
    checkpoint: Path, tmp_path: Path
) -> None:
    import ray
    from peft import LoraConfig, get_peft_model
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    class Actor(LLM):
        def generated(self, adapter: Any = None) -> tuple[list[int], list[str]]:
            return generated(self, adapter)

    # An actor must find this file, and whatever else this process does by its own PYTHONPATH.
    paths = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": paths}
    ray.init(num_cpus=1, include_dashboard=False, runtime_env={"env_vars": variables})
    try:
        config = WeightTransferConfig(backend="sync_core")
        remote: Any = ray.remote(Actor)
        options = OPTIONS | dict(enable_lora=True)
        actor = remote.remote(str(checkpoint), weight_transfer_config=config, **options)
        target, model = VllmTarget([actor], timeout=120), make_llama(1)
        with Sender("shm", model, num_workers=1, strategy="checkpoint", timeout=60) as sender:
            target.connect(sender)
            assert target.send().updated == (0,)
            check_output(ray.get(actor.generated.remote()), model, "1")

        # With adapters; its files are unloaded with the next version.
        lora_model: Any = get_peft_model(make_llama(1), LoraConfig(target_modules=["q_proj"]))
        with torch.no_grad():
            for name, parameter in lora_model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.15)
        target = VllmTarget(actor, adapter="policy", adapter_directory=str(tmp_path), verify=True)
        layers = [lora("adapter")]
        with Sender(
            "shm", lora_model, num_workers=1, strategy="checkpoint", layers=layers, timeout=60
        ) as sender:
            target.connect(sender)
            for version in (1, 2):
                assert target.send().updated == (0,)
                output = ray.get(actor.generated.remote(target.lora_request()))
                merged = copy.deepcopy(lora_model).merge_and_unload()
                check_output((output[0], ["-"]), merged, "-")
                [directory] = tmp_path.iterdir()
                assert directory.name.startswith(f"policy-v{version}-")
            ray.kill(actor)
            with pytest.raises(SendError, match="worker 0"):
                target.send()
    finally:
        ray.shutdown()
