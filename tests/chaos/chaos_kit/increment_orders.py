"""Random orders of sends, misses, deaths and damage over a sender with increments."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sync_core import (
    PendingSend,
    Receiver,
    Sender,
    SendError,
    SkipContext,
    SyncError,
    WorkerState,
    hookimpl,
)
from sync_plugin_scale import IncrementError, Increments
from sync_plugin_std import select
from sync_testing.recording import Recorder, WorkerRecorder

# A send that takes longer counts as hanging, in seconds.
_DEADLINE = 20.0
_MOST_WORKERS = 4
_STEPS = 12


class Mixed(nn.Module):
    """Parameters and buffers of several dtypes, two of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(40, 30).to(torch.bfloat16)
        self.norm = nn.BatchNorm1d(30)
        self.tied = nn.Linear(40, 30, bias=False)
        self.tied.weight = self.wide.weight
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("none", torch.zeros(0))


class Skipper:
    """Holds back some workers."""

    def __init__(self) -> None:
        self.skipped: set[int] = set()

    @hookimpl
    def skip_update(self, context: SkipContext) -> bool:
        return context.worker_id in self.skipped


@dataclass(eq=False)
class Worker:
    """A copy of the model, and its receiver while it lives."""

    model: nn.Module
    receiver: Receiver | None
    recorder: WorkerRecorder
    #: Whether it has taken another's place, and the sender may not have noticed.
    unnoticed: bool = False

    def receive(self) -> None:
        """Commit a version if there is one; the sender may have gone."""
        if self.receiver is not None:
            with suppress(SyncError):
                self.receiver.receive(0)

    def die(self) -> None:
        """Lose the connection, without a word."""
        if self.receiver is not None:
            self.receiver._connection.transport.close()
            self.receiver._connection._leave.detach()
            self.receiver = None


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def digest(model: nn.Module) -> str:
    """Return a digest of every bit of a model."""
    return hashlib.blake2b(b"".join(state(model).values()), digest_size=8).hexdigest()


def state(model: nn.Module) -> dict[str, bytes]:
    """Every bit of a model."""
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


class Order:
    """One sender's life, as a seed decides.

    Args:
        seed: decides everything.
        scheme: makes the scheme, a name or a plugin object.
        options: of the scheme.
        at_once: whether its sender notices a worker that takes another's place before that
            receives.

    Raises:
        AssertionError: a worker counts as current that differs from the trainer.
    """

    def __init__(
        self, seed: int, scheme: Callable[[], Any], options: Mapping[str, Any], *, at_once: bool
    ) -> None:
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.model = Mixed()
        self._scheme, self._options, self._at_once = scheme, options, at_once
        self.log: list[str] = []
        self.start()

    def start(self) -> None:
        """Start the trainer, and two workers."""
        self.skipper = Skipper()
        self.partial = self.random.random() < 0.5
        scheme = Increments(
            self._scheme(),
            below=self.random.choice([0.1, 0.3, 1.0]),
            whole_every=self.random.choice([None, None, 3]),
            compress=self.random.choice([None, "zstd"]),
        )
        self.sender = Sender(
            scheme,
            self.model,
            num_workers=2,
            layers=[select("*"), self.skipper] if self.partial else [self.skipper],
            timeout=_DEADLINE,
            **self._options,
        )
        self.versions: dict[int, dict[str, bytes]] = {}
        self.recorder = Recorder()
        self.workers = {i: self.connect(i) for i in range(2)}

    def connect(self, worker_id: int) -> Worker:
        """A worker that knows nothing yet."""
        model = Mixed()
        recorder = WorkerRecorder(self.recorder, worker_id, look=lambda: digest(model))
        address = self.sender.address(worker_id)
        receiver = Receiver(address, model, on_commit=recorder.committed)
        return Worker(model, receiver, recorder)

    def run(self) -> None:
        """Take the steps, then send once more to all."""
        try:
            for _ in range(_STEPS):
                step = self.random.choice(_ORDERS)
                self.log.append(step)
                getattr(self, f"do_{step}")()
                self.check_states()
            for worker_id in self.workers:
                self.revive(worker_id)
            self.recorder.expect(self.workers)
            self.do_send()
            assert all(state(w.model) == state(self.model) for w in self.workers.values())
        finally:
            self.end()

    def end(self) -> None:
        """Close all."""
        self.sender.close()
        for worker in self.workers.values():
            if worker.receiver is not None:
                worker.receiver.close()
        assert not self.recorder.check()

    def change(self, names: set[str] | None = None) -> None:
        """Train a little: few elements, all of one tensor, or none."""
        share = self.random.choice([0.0, 0.002, 0.002, 0.01, 1.0])
        tied = names is not None and "wide.weight" in names
        with torch.no_grad():
            for name, tensor in self.model.state_dict(keep_vars=True).items():
                wanted = names is None or name in names or (tied and name == "tied.weight")
                if not tensor.numel() or not wanted:
                    continue
                flat = tensor.detach().view(-1)
                where = torch.from_numpy(self.numbers.random(flat.numel()) < share)
                if flat.dtype == torch.bool:
                    flat ^= where
                elif flat.is_floating_point():
                    values = self.random.choice([-0.0, float("nan"), 1e-40, self.random.random()])
                    flat[where] = torch.tensor(values, dtype=flat.dtype)
                else:
                    flat += where

    def send(self, given: Any = None, ids: list[int] | None = None, *, missed: int = -1) -> None:
        """Send, let workers receive but for one, and check what is reported."""
        addressed = list(self.workers) if ids is None else ids
        pending = self.sender.send_async(given, ids)
        if pending.worker_ids:
            self.versions[pending.version] = state(self.model)
            self.recorder.send(pending.version, digest=digest(self.model), deadline=_DEADLINE)
        alive = [i for i in addressed if self.workers[i].receiver is not None and i != missed]
        self.pump(pending, alive, wait=len(alive) == len(addressed))
        try:
            report = pending.wait(0.0)
        except SendError as error:
            report = error.report
            silent = set(addressed) - set(alive)
            assert set(report.failed) <= silent, report.failed
        if pending.worker_ids:
            self.recorder.report(report)
        for worker_id in report.updated:
            assert state(self.workers[worker_id].model) == self.versions[report.version]
            self.workers[worker_id].unnoticed = False

    def pump(self, pending: PendingSend, alive: list[int], *, wait: bool) -> None:
        """Let workers receive until each has the version, or those that live have it."""
        deadline = time.monotonic() + _DEADLINE
        while not pending.done():
            for worker_id in alive:
                self.workers[worker_id].receive()
            if not wait and not set(alive) & set(pending.unanswered):
                return
            assert time.monotonic() < deadline, "a send hangs"

    def check_states(self) -> None:
        """No worker that counts as current lacks anything."""
        known = {i: s for i, s in self.sender.workers.items() if not self.workers[i].unnoticed}
        self.recorder.states(known)
        for worker_id, status in known.items():
            worker = self.workers[worker_id]
            if status.state is WorkerState.CURRENT and status.version:
                held = state(worker.model)
                assert held == self.versions[status.version], f"worker {worker_id}: {status}"

    def any_worker(self) -> int:
        return self.random.choice(list(self.workers))

    def revive(self, worker_id: int) -> None:
        if self.workers[worker_id].receiver is None:
            self.workers[worker_id] = self.connect(worker_id)
            self.workers[worker_id].unnoticed = not self._at_once

    def do_send(self) -> None:
        """Send to all."""
        self.change()
        self.send()

    def do_subset(self) -> None:
        """Send to one worker."""
        self.change()
        self.send(ids=[self.any_worker()])

    def do_partial(self) -> None:
        """Send one tensor, the only one that changed."""
        if not self.partial:
            return
        name = self.random.choice(["wide.weight", "wide.bias", "norm.running_mean", "mask"])
        self.change({name})
        tensor = self.model.state_dict()[name]
        # The model's own tensor, or another one.
        given = tensor if self.random.random() < 0.5 else tensor.clone()
        self.send({name: given})

    def do_skip(self) -> None:
        """Send while one worker is held back."""
        self.skipper.skipped = {self.any_worker()}
        self.change()
        self.send()
        self.skipper.skipped = set()

    def do_miss(self) -> None:
        """Send while one worker does not receive; it may do so later."""
        missed = self.any_worker()
        self.change()
        self.send(missed=missed)
        if self.random.random() < 0.5:
            self.workers[missed].receive()

    def do_join(self) -> None:
        """Add a worker, which may look for a version at once."""
        if len(self.workers) < _MOST_WORKERS:
            worker_id = self.sender.add_worker()
            self.workers[worker_id] = self.connect(worker_id)
            self.workers[worker_id].receive()

    def do_leave(self) -> None:
        """Remove a worker."""
        if len(self.workers) > 1:
            worker_id = self.any_worker()
            self.sender.remove_worker(worker_id)
            worker = self.workers.pop(worker_id)
            if worker.receiver is not None:
                worker.receiver.close()

    def do_die(self) -> None:
        """Let a worker die."""
        self.workers[self.any_worker()].die()

    def do_come_back(self) -> None:
        """Replace a worker, dead or not, by another process in its place."""
        worker_id = self.any_worker()
        self.workers[worker_id].die()
        self.revive(worker_id)
        self.workers[worker_id].receive()

    def do_corrupt(self) -> None:
        """Flip a bit of what a worker keeps to make the next version from."""
        receiver = self.workers[self.any_worker()].receiver
        if receiver is not None:
            transport: Any = receiver._connection.transport
            with suppress(IncrementError):
                body = transport.kept.body
                body[self.random.randrange(len(body))] ^= 1

    def do_restart(self) -> None:
        """Restart the trainer."""
        self.end()
        self.start()


_STEPS_OF = tuple(name.removeprefix("do_") for name in vars(Order) if name.startswith("do_"))
_ORDERS = (*_STEPS_OF, "send", "send", "subset")


def run_order(
    seed: int, scheme: Callable[[], Any], options: Mapping[str, Any], *, at_once: bool = False
) -> None:
    """Run the order of one seed; what fails names the seed and the steps. See `Order`."""
    order = Order(seed, scheme, options, at_once=at_once)
    try:
        order.run()
    except BaseException as error:
        error.add_note(f"seed {seed}, options {dict(options)}: {' '.join(order.log)}")
        raise
