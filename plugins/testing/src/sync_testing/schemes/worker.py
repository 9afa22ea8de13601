"""The object that a worker hosts in the cases: a model, its receiver, and inspection methods."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from sync_core import (
    Address,
    ClosedError,
    LayoutMismatchError,
    PendingSend,
    Receiver,
    Sender,
    SenderLostError,
    SyncError,
)
from sync_core.wrapping import WrappingReceiver
from sync_testing.fuzz import find
from sync_testing.schemes.models import fill, fingerprints, make_policy


class Worker:
    """A worker of the group.

    Args:
        worker_id: its id in the group.
    """

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id
        self.model: Any = make_policy()
        self.receiver: Receiver | None = None
        self._sending: list[tuple[Sender, PendingSend]] = []
        # A lock that is held while the model is in use, and whether a version has arrived since.
        self._in_use = threading.Lock()
        self._arrived = False

    def fork(self) -> int:
        """Fork a process that does nothing and outlives this one; return its id."""
        with warnings.catch_warnings():
            # The warning about threads that the child lacks.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            signal.alarm(100)
            while True:
                signal.pause()
        # In its own process group: what a worker's process group leaves behind is killed.
        os.setpgid(child, child)
        return child

    def reset(self) -> int:
        """Reset the worker; return its process id."""
        if self.receiver is not None:
            self.receiver.close()
        for sender, _ in self._sending:
            sender.close()
        self.model, self.receiver, self._sending = make_policy(), None, []
        self._arrived = False
        if self._in_use.locked():  # a case has failed between two calls
            self._in_use.release()
        return os.getpid()

    def connect(self, address: Address, make: Callable[[], Any] | None = None) -> None:
        """Make a receiver, and a new model if ``make`` is given."""
        if make is not None:
            self.model = make()
        self.receiver = Receiver(address, self.model)

    def addresses(self) -> list[int]:
        """Return the addresses of the model's tensors."""
        return [tensor.data_ptr() for tensor in self.model.state_dict().values()]

    def receive(self, timeout: float | None = None) -> int | None:
        """Receive, and return the committed version, if any."""
        assert self.receiver is not None
        return self.receiver.receive(timeout)

    def attend(self) -> bool:
        """Receive whenever the scheme reports a version; return False if it never does."""
        assert self.receiver is not None
        # A receiver that refers to itself is kept until garbage collection.
        receiver = weakref.ref(self.receiver)

        def receive() -> None:
            found = receiver()
            assert found is not None
            found.receive(0)

        return self.receiver.on_arrival(receive)

    def attend_between_steps(self) -> bool:
        """Receive reported versions while the model is not in use, as collectors do."""
        assert self.receiver is not None
        worker = weakref.ref(self)

        def receive() -> None:
            found = worker()
            assert found is not None
            found._arrived = True
            found._receive_arrived()

        return self.receiver.on_arrival(receive)

    def step_until(self, version: int, seconds: float) -> list[float]:
        """Use the model, and look for a version after each step; return the time of each look."""
        assert self.receiver is not None
        looks: list[float] = []
        deadline = time.perf_counter() + seconds
        with self._in_use:
            while self.receiver.version < version and time.perf_counter() < deadline:
                began = time.perf_counter()
                self.receiver.receive(0)
                looks.append(time.perf_counter() - began)
                time.sleep(0.005)
        self._receive_arrived()
        return looks

    def begin_step(self) -> None:
        """Mark the model as in use."""
        self._in_use.acquire()

    def end_step(self, seconds: float) -> None:
        """Use the model until a version has arrived, for a limited time, and receive it."""
        deadline = time.perf_counter() + seconds
        while not self._arrived and time.perf_counter() < deadline:
            time.sleep(0.005)
        self._in_use.release()
        self._receive_arrived()

    def _receive_arrived(self) -> None:
        # If another thread holds the lock, that thread calls this after it releases the lock.
        while self._arrived and self._in_use.acquire(blocking=False):
            try:
                self._arrived = False
                if self.receiver is not None:
                    with suppress(ClosedError, SenderLostError):
                        self.receiver.receive(0)
            finally:
                self._in_use.release()

    def infer(self, function: Callable[[Worker], Any]) -> Any:
        """Run a function in inference mode, as in a worker that only acts."""
        with torch.inference_mode():
            return function(self)

    def with_default_device(self, device: str, function: Callable[[Worker], Any]) -> Any:
        """Run a function with another default device for new tensors."""
        with torch.device(device):
            return function(self)

    def gradients(self) -> set[float]:
        """Return the gradients of the sum of squares of all parameters."""
        self.model.zero_grad()
        sum(p.square().sum() for p in self.model.parameters()).backward()
        return {v for p in self.model.parameters() for v in p.grad.flatten().tolist()}

    def stage(self) -> int | None:
        """Stage a version without committing it; return the version."""
        assert self.receiver is not None
        return self.receiver.stage(20.0)

    def commit_staged(self) -> int:
        """Commit the staged version, and return it."""
        assert self.receiver is not None
        self.receiver.load()
        return self.receiver.confirm()

    def refuse_staged(self) -> None:
        """Refuse the staged version."""
        assert self.receiver is not None
        self.receiver.reject(SyncError("the worker does not want it"))

    def commit_after_another(self, address: Address) -> int:
        """Commit the staged version after another receiver has replaced this one."""
        receiver, self.receiver = self.receiver, Receiver(address, self.model)
        assert receiver is not None
        receiver.load()
        try:
            return receiver.confirm()
        finally:
            receiver.close()

    def serve(self) -> int:
        """Receive until the sender is gone; return the last version."""
        assert self.receiver is not None
        try:
            while True:
                self.receiver.receive()
        except SenderLostError:
            return self.receiver.version

    def spoil(self) -> None:
        """Flip a bit of the base of the next increment."""
        assert self.receiver is not None
        # A worker of several senders has an increment from each.
        for transport in find(self.receiver._connection.transport, WrappingReceiver):
            incremental: Any = transport
            incremental.kept.body[3] ^= 1

    def update_by_hand(self, value: float) -> int | None:
        """Commit weights that did not come from the sender."""
        assert self.receiver is not None
        return self.receiver.update_weights(make_policy(value).state_dict())

    def hang_up(self) -> None:
        """Close the receiver."""
        assert self.receiver is not None
        self.receiver.close()

    def hang_up_while_waiting(self, seconds: float) -> str | None:
        """Close the receiver while another thread receives; return the error of that thread."""
        assert self.receiver is not None
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(self.receiver.receive, seconds)
            time.sleep(0.2)
            begin = time.monotonic()
            self.receiver.close()
            error = waiting.exception()
        assert time.monotonic() - begin < seconds / 2, "receive() waited until its own deadline"
        return None if error is None else type(error).__name__

    def look_while_waiting(self, seconds: float) -> bool:
        """Return whether one thread's look ends before another thread's wait."""
        assert self.receiver is not None
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(self.receiver.receive, seconds)
            time.sleep(0.2)
            found = self.receiver.receive(0.1)
            looked = not waiting.done()
            self.receiver.close()
            waiting.exception()
        assert found is None
        return looked

    def leave(self, value: float) -> None:
        """Close the receiver, and change the model."""
        self.hang_up()
        fill(self.model, value)

    def rebuild(self) -> None:
        """Make another model, as a restarted worker does."""
        self.model = make_policy()
        if self.receiver is not None:
            self.receiver.register_model(self.model)

    def rebuild_while_waiting(self, timeout: float) -> int | None:
        """Make another model while another thread receives; return the version that it commits."""
        assert self.receiver is not None
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(self.receiver.receive, timeout)
            time.sleep(0.05)
            self.rebuild()
            return waiting.result()

    def misshape(self) -> None:
        """Replace the model by one that the weights do not fit."""
        self.model[0].weight = torch.nn.Parameter(torch.full((1, 1), 5.0))

    def be_refused(self, address: Address) -> str:
        """Make a receiver for a model that the weights do not fit; return the error."""
        try:
            Receiver(address, {"other": torch.zeros(1)}).close()
        except LayoutMismatchError as error:
            return str(error)
        return ""

    def values(self) -> set[float]:
        """Return every value in the parameters."""
        return {v for p in self.model.parameters() for v in p.detach().flatten().tolist()}

    def extras(self) -> dict[str, str] | None:
        """Return the fingerprints of the receiver's extras; None without a receiver."""
        return None if self.receiver is None else fingerprints(self.receiver.extras)

    def fingerprints(self) -> dict[str, str]:
        """Return the model's fingerprints; see `sync_testing.schemes.models.fingerprints`."""
        return fingerprints(self.model)

    def train(
        self, scheme: Any, options: Mapping[str, Any], zero_copy: Iterable[bool]
    ) -> list[Address]:
        """Start several senders of a tensor, and return an address of each."""
        for flag in zero_copy:
            weights = {"weight": torch.full((1000,), 5.0)}
            arguments = {"timeout": 20.0, **options}
            sender = Sender(scheme, weights, num_workers=1, zero_copy=flag, **arguments)
            self._sending.append((sender, sender.send_async()))
        return [sender.address(0) for sender, _ in self._sending]
