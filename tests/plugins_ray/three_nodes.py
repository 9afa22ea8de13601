"""A cluster of three nodes on this machine, each with its own object store; run by a test."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

import pytest
import ray
import torch
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.experimental import get_object_locations
from torch import nn

from sync_core import Receiver, Sender, SendError, WorkerLostError
from sync_plugin_ray.group import RayGroup

WIDTH = 2000


def policy(value: float) -> nn.Linear:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    model.weight.data.fill_(value)
    return model


class Agent:
    def __init__(self) -> None:
        self.policy = policy(0.0)

    def value(self) -> tuple[float, float]:
        return self.policy.weight.min().item(), self.policy.weight.max().item()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def pull(self, address: Any) -> float:
        model = policy(0.0)
        with Receiver(address, model) as receiver:
            receiver.receive()
        return model.weight.max().item()


def main() -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": 200 << 20, "resources": {"n0": 9}},
    )
    nodes = [add_node(cluster, name) for name in ("n1", "n2")]
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    actors = [start(name) for name in ("n0", "n1", "n2", "n2")]
    with Sender("ray", policy(1.0), workers=actors, timeout=60) as sender:
        report = sender.send()
        assert report.updated == (0, 1, 2, 3), report
        transport: Any = sender._pipeline.transport
        (location,) = get_object_locations(transport.roster.wanted(0).content.data).values()
        say("workers", len(actors), "copies", len(location["node_ids"]))
        assert len(location["node_ids"]) == 3

        ray.get(actors[1].value.remote())
        actors[2].sleep.remote(60)
        group = RayGroup(repr, 1, remote_configs={"num_cpus": 0, "resources": {"n2": 1}})
        call = group.call(0, lambda _: time.sleep(60))
        pending = sender.send_async(policy(2.0))
        cluster.remove_node(nodes[1])
        with pytest.raises(SendError) as caught:
            pending.wait()
        failed = caught.value.report.failed
        # Worker 3 was idle, so it may have had the version before its node went.
        assert sorted(failed) in ([2], [2, 3])
        assert all(isinstance(result.error, WorkerLostError) for result in failed.values())
        assert caught.value.report.updated[:2] == (0, 1)
        with pytest.raises(WorkerLostError) as lost:
            call.result(30)
        assert str(lost.value) == "worker 0: its actor died while running main.<locals>.<lambda>"
        assert not group.alive(0)
        group.stop()
        say("removed")
        for worker_id in (2, 3):
            sender.remove_worker(worker_id)
        assert sender.send(policy(3.0)).updated == (0, 1)

        add_node(cluster, "n3")
        joined = start("n3")
        added = sender.add_worker(worker=joined)
        deadline = time.monotonic() + 30
        while ray.get(joined.value.remote()) != (3.0, 3.0):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        say("joined", added)
        assert ray.get(joined.pull.remote(sender.address(added))) == 3.0
        say("pulled")
    ray.shutdown()
    cluster.shutdown()


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def add_node(cluster: Cluster, name: str) -> Any:
    return cluster.add_node(num_cpus=1, object_store_memory=200 << 20, resources={name: 9})


def start(node: str) -> Any:
    actor: Any = ray.remote(Agent).options(num_cpus=0, resources={node: 1}).remote()
    ray.get(actor.value.remote())
    return actor


if __name__ == "__main__":
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    torch.set_num_threads(1)
    os.environ.pop("RAY_ADDRESS", None)
    main()
