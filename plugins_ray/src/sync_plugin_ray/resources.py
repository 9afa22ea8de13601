"""What each worker's actor asks of the cluster: `ActorClass.options`, chosen or checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from sync_core import OptionError

_USUAL = {"num_cpus": 1.0, "num_gpus": 0.2, "memory": 2.0 * 1024**3}
_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}

# What would give a worker two calls at once, a second life without its object, or no end.
_FIXED = ("max_concurrency", "max_restarts", "max_task_retries", "lifetime")


def usual_options(num_workers: int) -> dict[str, Any]:
    """Options by which so many workers start at once, if nobody else takes the resources.

    Each asks for 1 CPU, 0.2 GPUs and 2 GiB of memory, or for an equal share where there is less:
    of a machine, with as many workers on each as on the others, and of what is free now.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    # Machines with a GPU where there are some, so that workers are not split into two kinds.
    hosts = next(filter(None, ([n for n in nodes if n.get(kind)] for kind in ("GPU", "CPU"))), [])
    free = ray.available_resources()
    per_host = math.ceil(num_workers / max(1, len(hosts)))
    options: dict[str, Any] = {}
    for option, usual in _USUAL.items():
        name = _NAMES[option]
        share = min((host.get(name, 0.0) for host in hosts), default=0.0) / max(1, per_host)
        demand = min(usual, share, free.get(name, 0.0) / max(1, num_workers))
        # Ray counts memory in bytes and all else in ten-thousandths.
        options[option] = int(demand) if option == "memory" else int(demand * 10_000) / 10_000
    return options


def check_configs(
    remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, num_workers: int
) -> tuple[Mapping[str, Any], ...]:
    """The user's options for each worker; none where all is left to `usual_options`.

    Raises:
        ValueError: a list of another length.
        OptionError: an option that is the worker group's own matter.
    """
    if remote_configs is None or isinstance(remote_configs, Mapping):
        configs = (remote_configs or {},) * max(1, num_workers)
    else:
        configs = tuple(remote_configs)
        if len(configs) != num_workers:
            raise ValueError(
                f"remote_configs has {len(configs)} entries for {num_workers} workers; "
                "give one for each, or a single mapping for all"
            )
    for name in _FIXED:
        if any(name in config for config in configs):
            raise OptionError(
                f"remote_configs has {name!r}, which the worker group decides itself; leave it "
                "out (a lost worker is replaced by restart(worker_id))"
            )
    return configs


def describe_shortage(options: Mapping[str, Any]) -> str:
    """A sentence without its subject, for a worker that the cluster found no place for."""
    demand = {
        name: amount
        for name, amount in options.items()
        if name in {*_NAMES, "resources", "accelerator_type", "scheduling_strategy"}
    }
    total, free = _brief(ray.cluster_resources()), _brief(ray.available_resources())
    return (
        f"it demands {demand}, and the cluster has {total}, of which free: {free}; "
        "give remote_configs={'num_cpus': …} that demands less"
    )


def _brief(resources: Mapping[str, float]) -> dict[str, float]:
    # A node is a resource too, to Ray: node:192.0.2.1.
    return {name: amount for name, amount in resources.items() if not name.startswith("node:")}
