"""Measures sends over Ray by size and number of workers, and predicts larger ones.

    python docs/benchmarks/ray_scaling.py

Sends models of several sizes to several workers on one node, and to one worker on each of several
nodes (which are processes on this machine, each with its own object store). Fits

    seconds = start + call * workers + GB * (put + copy * workers / cores + node * other_nodes)

by least squares without negative costs. Prints the costs, and the predictions for links of several
speeds. See docs/explanation/scaling.md.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster
from torch import nn

from sync_core import Sender

_SIZES = (0.001, 0.016, 0.064, 0.256)  # GB
_NODES = 3
_WARM_UP, _ROUNDS = 10, 7
_COSTS = ("start", "call", "put", "copy", "node")


@dataclass(frozen=True)
class Case:
    """One measured configuration.

    Args:
        gigabytes: the size of the model.
        workers: the number of workers on each node.
        nodes: the number of nodes.
    """

    gigabytes: float
    workers: int
    nodes: int

    def terms(self) -> list[float]:
        """Return the factor of each cost."""
        # The measured nodes share this machine's cores.
        copies = self.workers * self.nodes / (os.cpu_count() or 1)
        return [
            1,
            self.workers * self.nodes,
            self.gigabytes,
            self.gigabytes * max(1.0, copies),
            self.gigabytes * (self.nodes - 1),
        ]


class Agent:
    """Holds a model that can be resized."""

    def resize(self, gigabytes: float) -> None:
        """Make a model of another size."""
        self.policy = model(gigabytes)


def model(gigabytes: float) -> nn.Module:
    """Return a model of a size in gigabytes, in 16 layers."""
    width = int((gigabytes * 1e9 / 4 / 16) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(16)))


def main() -> None:
    """Measure, fit, predict."""
    node = {"num_cpus": 1, "object_store_memory": 1200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "resources": {"n0": 99}})
    for number in range(1, _NODES):
        cluster.add_node(**node, resources={f"n{number}": 99})
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    actors = {(n, i): _start(n) for n in range(_NODES) for i in range(4 if n == 0 else 1)}
    cases = [Case(size, workers, 1) for size in _SIZES for workers in (1, 2, 4)]
    cases += [Case(size, 1, nodes) for size in _SIZES for nodes in (2, 3)]
    measured = []
    print("| GB | workers | nodes | ms |\n|--:|--:|--:|--:|")
    for case in cases:
        chosen = [actors[n, i] for n in range(case.nodes) for i in range(case.workers)]
        measured.append(_measure(case, chosen))
        print(f"| {case.gigabytes:g} | {case.workers} | {case.nodes} | {1e3 * measured[-1]:.1f} |")
    ray.shutdown()
    cluster.shutdown()
    _report(cases, measured)


def _start(node: int) -> Any:
    return ray.remote(Agent).options(num_cpus=0, resources={f"n{node}": 1}).remote()


def _measure(case: Case, actors: list[Any]) -> float:
    ray.get([actor.resize.remote(case.gigabytes) for actor in actors])
    with Sender("ray", model(case.gigabytes), workers=actors) as sender:
        seconds = []
        for _ in range(_WARM_UP + _ROUNDS):
            time.sleep(0.05)
            begin = time.perf_counter()
            sender.send()
            seconds.append(time.perf_counter() - begin)
    return median(seconds[_WARM_UP:])


def _report(cases: list[Case], measured: list[float]) -> None:
    costs = _fit(np.array([case.terms() for case in cases]), np.array(measured))
    print("\n" + ", ".join(f"{n} {1e3 * c:.1f} ms" for n, c in zip(_COSTS, costs, strict=True)))
    start, call, put, copy, _ = costs
    print("\n| GB | nodes | workers on each | link Gb/s | from the sender alone | in a chain |")
    print("|--:|--:|--:|--:|--:|--:|")
    for gigabytes, nodes, link in [(16, 8, 100), (140, 64, 400), (1000, 1000, 400)]:
        local = start + call * nodes * 8 + (put + copy) * gigabytes
        wire = gigabytes * 8 / link
        print(
            f"| {gigabytes} | {nodes} | 8 | {link} | {local + wire * (nodes - 1):,.0f} s "
            f"| {local + wire:,.0f} s |"
        )


def _fit(terms: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the non-negative costs with the least relative errors."""
    used = list(range(terms.shape[1]))
    costs = np.zeros(terms.shape[1])
    while True:
        scaled = terms[:, used] / seconds[:, None]
        found, *_ = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)
        if (found >= 0).all():
            costs[used] = found
            return costs
        used.pop(int(found.argmin()))


if __name__ == "__main__":
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    main()
