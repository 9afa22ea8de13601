"""Compares the scheme `ray` with plain Ray, TorchRL's Ray scheme, and a put for each worker.

    python docs/benchmarks/ray_send.py

All ways update the same four actors, alternately in one run. ``consolidated`` is ``copy`` with a
consolidated model in the trainer. ``limit`` is one `ray.put` of the flat bytes and one copy of them
in each actor, without packing. ``checked`` is the limit with a check in trainer and actors that no
tensor was replaced or moved since the last round: without it, bytes could be copied to memory that
nothing reads, or that is too small. ``torchrl`` is RayWeightSyncScheme of torchrl 0.14.1, which
sends by its own Gloo group. ``put each`` works like RayWeightUpdater: one put of a TensorDict per
worker. Prints medians in milliseconds.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

import _tensors
import numpy as np
import ray
from ray import cloudpickle
from tensordict import TensorDict
from torchrl.weight_update import RayWeightSyncScheme

import sync_core
import sync_tools.bench as ours
from sync_core.models import consolidate
from sync_tools.bench import SETTLE_SECONDS, is_marked, make_model, mark

_WARM_UP = 3
_OURS = ("copy", "consolidated", "zero_copy")

Send = Callable[[], object]


class Worker:
    """An actor with a separate model for each way of updating it.

    Args:
        model: the name of the model.
    """

    worker_idx = 0

    def __init__(self, model: str) -> None:
        self.nets = {way: make_model(model) for way in (*_OURS, "torchrl", "put")}
        nbytes = sum(p.nbytes for p in self.nets["put"].parameters())
        self.flat = np.zeros(nbytes, dtype=np.uint8)
        self.tensors = _tensors.Tensors(self.nets["put"])
        self.scheme: Any = None

    def has_arrived(self, way: str, version: int) -> bool:
        """Return whether every element of a way's model has this version."""
        return is_marked(self.nets[way], version)

    def copy_flat(self, flat: np.ndarray[Any, Any]) -> None:
        """Copy the bytes, as each actor does for the limit."""
        np.copyto(self.flat, flat)

    def copy_checked(self, flat: np.ndarray[Any, Any]) -> None:
        """Copy as for the limit, after a check that the tensors are unchanged."""
        self.tensors.check()
        self.copy_flat(flat)
        self.tensors.count_write()

    def load(self, weights: TensorDict) -> None:
        """Load the weights as a worker of RayWeightUpdater did."""
        TensorDict.from_module(self.nets["put"]).data.update_(weights)

    def register(self, scheme: Any, index: int) -> None:
        """Make a receiver of TorchRL's scheme."""
        self.scheme, self.worker_idx = scheme, index
        scheme.init_on_receiver(model_id="policy", context=self, model=self.nets["torchrl"])

    def connect(self) -> None:
        """Join the scheme's process group, and receive the first weights."""
        self.scheme.connect(worker_idx=self.worker_idx)

    def _receive_weights_scheme(self, model_version: int | None = None) -> None:
        del model_version
        self.scheme.receive()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = ["small", "many", "large"]
    parser.add_argument("--models", nargs="+", choices=ours.MODELS, default=models)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    ray.init(
        num_cpus=arguments.workers + 1,
        object_store_memory=4 << 30,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
    )
    print("| model | copy | consolidated | zero-copy | limit | checked | torchrl | put each |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for model in arguments.models:
        medians = _compare(model, arguments.workers, arguments.rounds)
        print(f"| {model} | " + " | ".join(f"{1e3 * m:.1f}" for m in medians) + " |", flush=True)


def _compare(name: str, workers: int, rounds: int) -> list[float]:
    model, consolidated = make_model(name), consolidate(make_model(name))
    actors: list[Any] = [
        ray.remote(Worker).options(num_cpus=0.5).remote(name) for _ in range(workers)
    ]
    weights = TensorDict.from_module(model).data
    flat = np.zeros(sum(p.nbytes for p in model.parameters()), dtype=np.uint8)
    tensors = _tensors.Tensors(model)
    with ExitStack() as stack:
        senders = {
            way: stack.enter_context(
                sync_core.Sender(
                    "ray",
                    consolidated if way == "consolidated" else model,
                    workers=actors,
                    model_id=f"nets[{way!r}]",
                    zero_copy=way == "zero_copy",
                )
            )
            for way in _OURS
        }
        scheme = _connect_torchrl(model, weights, actors)
        stack.callback(scheme.shutdown)

        def put_flat() -> None:
            reference = ray.put(flat)
            ray.get([actor.copy_flat.remote(reference) for actor in actors])

        def put_checked() -> None:
            tensors.check()
            reference = ray.put(flat)
            ray.get([actor.copy_checked.remote(reference) for actor in actors])

        def put_for_each() -> None:
            ray.get([actor.load.remote(ray.put(weights)) for actor in actors])

        ways: dict[str, Send] = {
            **{way: sender.send for way, sender in senders.items()},
            "limit": put_flat,
            "checked": put_checked,
            "torchrl": lambda: scheme.send(weights),
            "put": put_for_each,
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for version in range(1, _WARM_UP + rounds + 1):
            mark(model, version)
            mark(consolidated, version)
            # Memory that was never written maps to one page of zeros, which is in the cache.
            flat.fill(version)
            for way, send in ways.items():
                time.sleep(SETTLE_SECONDS)
                begin = time.perf_counter()
                send()
                seconds[way].append(time.perf_counter() - begin)
                if way not in ("limit", "checked"):
                    _check(actors, way, version)
    for actor in actors:
        ray.kill(actor)
    return [median(rounds[_WARM_UP:]) for rounds in seconds.values()]


def _connect_torchrl(model: Any, weights: TensorDict, actors: list[Any]) -> Any:
    scheme = RayWeightSyncScheme()
    scheme.init_on_sender(
        model_id="policy", remote_collectors=actors, num_workers=len(actors), model=model
    )
    for index, actor in enumerate(actors):
        ray.get(actor.register.remote(_receiving(scheme), index))
    connecting = [actor.connect.remote() for actor in actors]
    scheme.connect(weights=weights)
    ray.get(connecting)
    return scheme


def _receiving(scheme: Any) -> Any:
    received = copy.copy(scheme)
    received._initialized_on_sender = False
    received._sender_transports = None
    received._remote_collectors = None
    received._model_ref = None
    return received


def _check(actors: list[Any], way: str, version: int) -> None:
    if not all(ray.get([actor.has_arrived.remote(way, version) for actor in actors])):
        raise RuntimeError(f"a worker has other weights than those of round {version} by {way}")


if __name__ == "__main__":
    import sys

    for module in (sys.modules[__name__], _tensors):
        cloudpickle.register_pickle_by_value(module)
    main()
