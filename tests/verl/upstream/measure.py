"""Seconds of a step of verl's manager with a model of 135M parameters, in bfloat16.

    .venv-verl/bin/python -m tests.verl.upstream.measure [SCHEME ...]

The model has the sizes of SmolLM2-135M. One trainer and two rollouts that copy each tensor run on
this machine. `naive` is what verl does where a trainer and one rollout share their devices: its
`BucketedWeightSender` brings the weights to another process by shared memory.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
import transformers
from ray import cloudpickle
from tests.verl.upstream import (
    conftest,  # noqa: F401 - before verl is imported
    workers,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(workers)
STEPS = 9


class Copies:
    """A process that copies what it gets."""

    def ready(self) -> None:
        """Return once the process runs."""
        transfer()

    def receive(self, handle: str) -> int:
        """Take one version from verl's `BucketedWeightSender`; return its bytes."""
        copies: list[torch.Tensor] = []

        def take(weights: Iterable[tuple[str, torch.Tensor]], is_last: bool) -> None:
            del is_last
            copies.extend(tensor.clone() for _, tensor in weights)

        receiver = transfer().BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
        receiver.receive_weights(take)
        return sum(tensor.nbytes for tensor in copies)


def transfer() -> Any:
    """Import verl's module of that name, whose package needs vLLM."""
    found = importlib.util.find_spec("verl")
    assert found is not None
    [folder] = found.submodule_search_locations or []
    path = Path(folder, "workers", "rollout", "vllm_rollout", "bucketed_weight_transfer.py")
    spec = importlib.util.spec_from_file_location("bucketed_weight_transfer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_model(folder: Path) -> Path:
    """Write a checkpoint with random weights."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    print(f"{model.num_parameters() / 1e6:.0f}M parameters", flush=True)
    return folder


def measure(folder: Path, scheme: str) -> None:
    """Print the seconds of steps with a scheme."""
    from verl.checkpoint_engine import CheckpointEngineManager

    checkpoint, hf, rollout = workers.configs(folder, {"scheme": scheme})
    trainer = workers.start_trainer(1, checkpoint, hf, model_dtype="bfloat16")
    replicas = [workers.start_replica(rank, hf, rollout, copies=True) for rank in range(2)]
    manager = CheckpointEngineManager(checkpoint, trainer, replicas)
    for replica in replicas:
        replica.group.loaded()  # its process is ready
    memory = trainer.memory()[0]
    seconds, sent, grown = [], [], []
    metrics: dict[str, Any] = {}
    for step in range(STEPS):
        began = time.perf_counter()
        metrics = manager.update_weights(step)
        seconds.append(time.perf_counter() - began)
        sent.append(metrics["sync_core/seconds"])
        grown.append(trainer.memory()[0] - memory)
    print(
        f"{scheme}: {metrics['sync_core/megabytes'] / 2:.0f} MB to each of 2 rollouts; a step "
        f"{median(seconds[1:]):.2f} s, of which the send {median(sent[1:]):.2f} s; the first step "
        f"{seconds[0]:.2f} s; trainer's peak of memory +{grown[0]:.0f} MB after the first step, "
        f"+{grown[-1]:.0f} MB after the last",
        flush=True,
    )
    for group in (trainer, *(replica.group for replica in replicas)):
        for worker in group.workers:
            ray.kill(worker)


def measure_naive(folder: Path) -> None:
    """Print the seconds of what verl's own engine for one machine does."""
    weights = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    made: Any = ray.remote(Copies)
    receiver = made.options(num_cpus=0).remote()
    ray.get(receiver.ready.remote(), timeout=120)
    seconds, received = [], 0
    for step in range(STEPS):
        handle = f"ipc://{folder}/naive-{step}.sock"
        coming = receiver.receive.remote(handle)
        began = time.perf_counter()
        sender = transfer().BucketedWeightSender(handle, bucket_size_mb=512, use_shm=True)
        asyncio.run(sender.async_send_weights(iter(weights.items())))
        received = ray.get(coming, timeout=120)
        seconds.append(time.perf_counter() - began)
    print(
        f"naive: {received / 1e6:.0f} MB to 1 rollout; {median(seconds[1:]):.2f} s, the first "
        f"{seconds[0]:.2f} s",
        flush=True,
    )


if __name__ == "__main__":
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory(prefix="sync-verl-") as scratch:
        model = make_model(Path(scratch))
        for name in sys.argv[1:] or ["shm", "dist"]:
            measure(model, name)
        measure_naive(model)
    ray.shutdown()
