"""Trainers and rollouts in Ray actors, and the calls that verl's manager makes to them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
import torch
from ray import cloudpickle
from torch import Tensor

from sync_plugin_verl import SyncCoreEngine

# Actors cannot import this file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: In seconds.
PATIENCE = 100.0


def weights(step: int, *, size: int = 300) -> dict[str, Tensor]:
    """Return the weights of a step."""
    numbers = torch.Generator().manual_seed(step)
    shapes = {"embed": (size, 8), "layer.weight": (8, size), "layer.bias": (8,), "scale": ()}
    found = {name: torch.randn(shape, generator=numbers) for name, shape in shapes.items()}
    return found | {"half": found["embed"].bfloat16(), "steps": torch.tensor([step])}


class Actor:
    """Both kinds of verl's workers: the methods that verl calls."""

    async def make(self, options: Mapping[str, Any], *, is_master: bool) -> None:
        """Make an engine, in place of one that this process may have."""
        self.engine = SyncCoreEngine(bucket_size=1 << 20, is_master=is_master, **options)
        self.held: dict[str, Tensor] = {}
        self.fails = False
        self.drawn = 0

    async def engine_call(self, method: str, **arguments: Any) -> Any:
        return getattr(self.engine, method)(**arguments)

    async def send(self, step: int | None, source: int, names: Sequence[str] = ()) -> Any:
        return await self.engine.send_weights(self._made(source, names), step)

    def _made(self, source: int, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights(source).items():
            self.drawn += 1
            yield (name, tensor) if not names or name in names else (f"other.{name}", tensor)

    async def receive(self, step: int | None) -> None:
        held = {}
        async for name, tensor in self.engine.receive_weights(step):
            if self.fails:
                raise ValueError("the engine is out of memory")
            held[name] = tensor.clone()
        self.held = held

    async def fail(self, fails: bool) -> None:
        self.fails = fails

    async def state(self) -> dict[str, Any]:
        sender = self.engine.sender
        workers = () if sender is None else sender.all_worker_ids()
        return {"held": self.held, "drawn": self.drawn, "workers": workers, "pid": os.getpid()}


class Cluster:
    """Actors of which tests make trainers and rollouts; starting one takes seconds."""

    def __init__(self) -> None:
        self._idle: list[Any] = []
        self._used: list[Any] = []
        self.start(3)

    def start(self, count: int) -> None:
        kind: Any = ray.remote(Actor).options(num_cpus=0)
        self._idle += [kind.remote() for _ in range(count)]

    def make(self, count: int, options: Mapping[str, Any], *, is_master: bool = False) -> list[Any]:
        """Return actors with new engines."""
        self.start(max(0, count - len(self._idle)))
        made = [self._idle.pop() for _ in range(count)]
        self._used += made
        ray.get([a.make.remote(options, is_master=is_master) for a in made], timeout=PATIENCE)
        return made

    def kill(self, actor: Any) -> None:
        self._used.remove(actor)
        ray.kill(actor)

    def take_back(self) -> None:
        """Count all of them as idle."""
        self._idle += self._used
        self._used.clear()


def call(actors: Sequence[Any], method: str, *each: Mapping[str, Any]) -> list[Any]:
    given: Sequence[Mapping[str, Any]] = each or [{}] * len(actors)
    calls = [
        actor.engine_call.remote(method, **arguments)
        for actor, arguments in zip(actors, given, strict=True)
    ]
    found: list[Any] = ray.get(calls, timeout=PATIENCE)
    return found


def begin(trainers: Sequence[Any], rollouts: Sequence[Any]) -> None:
    """Build a group, as verl does at each step."""
    metadata = call([*trainers, *rollouts], "prepare")
    topologies = SyncCoreEngine.build_topology(len(trainers), len(rollouts), metadata)
    for actors, topology in zip((trainers, rollouts), topologies, strict=True):
        each = [{name: values[i] for name, values in topology.items()} for i in range(len(actors))]
        call(actors, "init_process_group", *each)


def update(trainers: Sequence[Any], rollouts: Sequence[Any], step: int | None, source: int) -> Any:
    """Do what verl does at a step; return the figures of the rank that sends."""
    begin(trainers, rollouts)
    sent = [actor.send.remote(step, source) for actor in trainers]
    received = [actor.receive.remote(step) for actor in rollouts]
    found = ray.get([*sent, *received], timeout=PATIENCE)
    call([*trainers, *rollouts], "finalize")
    return found[0]


def states(actors: Sequence[Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ray.get([a.state.remote() for a in actors], timeout=PATIENCE)
    return found


def check(rollouts: Sequence[Any], source: int) -> None:
    """Raise unless each of these holds the weights of a step, bit for bit."""
    expected = weights(source)
    for state in states(rollouts):
        assert state["held"].keys() == expected.keys()
        for name, tensor in expected.items():
            assert state["held"][name].dtype == tensor.dtype, name
            assert torch.equal(state["held"][name], tensor), name
