"""The rollout side of the checkpoint engine: receives the version of each step."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sync_core import Address, Receiver, SenderLostError, SyncError

_log = logging.getLogger("sync_core")
_Named = Iterable[tuple[str, Tensor]]
_GIVEN_UP = "verl has given up the step, and begun another"


class StepError(SyncError):
    """A rollout got the version of another step than verl requested."""


def version_of(step: int | None, newest: int) -> int:
    """Return the version number for a step's weights; trainer and rollouts compute the same one.

    Args:
        step: verl's ``global_steps``; None if verl does not pass it.
        newest: the trainer's newest version.

    Example:
        >>> version_of(0, newest=0), version_of(7, newest=1), version_of(7, newest=8)
        (1, 8, 9)
    """
    # Versions begin with 1, and steps with 0. If a step is sent again, it needs a newer version.
    return newest + 1 if step is None or step < newest else step + 1


class RolloutEnd:
    """Receives versions in one rollout worker.

    The trainer identifies it by its name, `worker`. After a failure the name changes, so the
    trainer serves it as a new worker.

    Args:
        timeout: the longest wait for the weights of a step, in seconds.
        device: the device of the tensors for verl; None for the device to which the scheme delivers
            them.
    """

    def __init__(self, timeout: float, device: str | None = None) -> None:
        self._timeout = timeout
        self._device = None if device is None else torch.device(device)
        self._trainer = ""
        self._newest = 0
        # Whether a step has begun and not ended.
        self._busy = False
        self._receiver: Receiver | None = None
        self._handover = _Handover(timeout)
        self._address: Future[Address] = Future()
        # The address of the current receiver: the trainer may have sent a new one since.
        self._used: Future[Address] | None = None
        self._begin()

    def prepare(self) -> str:
        """Return the worker's name; abandon an unfinished step."""
        if self._busy:
            self._begin()
        return self.worker

    def join(self, trainer: str, newest: int) -> None:
        """Take part in a step of a trainer.

        Args:
            trainer: the name of the trainer's process.
            newest: its newest version.
        """
        if trainer != self._trainer:
            self._disconnect("another trainer has begun a step")
        self._trainer, self._newest = trainer, newest

    def deliver(self, address: Address) -> None:
        """Store this worker's address from the trainer; runs in verl's event loop."""
        if self._address.done():
            # The sender has dropped this worker, and added it again.
            self._address = Future()
        self._address.set_result(address)

    async def receive(self, step: int | None) -> AsyncGenerator[tuple[str, Tensor]]:
        """Yield the names and tensors of a step's version, and commit it after the last one.

        Args:
            step: verl's ``global_steps``.

        Raises:
            StepError: a version of a later step arrived.
            TimeoutError: no version arrived in time.
            SyncError: the weights could not be received.
        """
        self._busy, worker = True, self.worker
        try:
            receiver = await self._stage(version_of(step, self._newest), step)
            handover = self._handover
            handover.begin()
            loading = asyncio.create_task(asyncio.to_thread(receiver.load))
            try:
                for name, tensor in await handover.weights(loading):
                    self._check(worker)
                    yield name, tensor if self._device is None else tensor.to(self._device)
                handover.end()
                await loading
            except BaseException as error:
                # A generator does not learn of an error in verl's use of the weights.
                why = SyncError("verl did not take all weights; its own error says why")
                handover.end(why)
                with suppress(SyncError):
                    await loading
                receiver.reject(error if isinstance(error, SyncError) else why)
                raise
            self._check(worker)
            receiver.confirm()
            self._busy = False
        except BaseException:
            if worker == self.worker:
                self._begin()
            raise

    def close(self) -> None:
        """Close the receiver."""
        self._disconnect("the rollout is closed")

    async def _stage(self, version: int, step: int | None) -> Receiver:
        """Return the receiver after it has staged a version."""
        deadline, worker = time.monotonic() + self._timeout, self.worker
        if self._receiver is not None:
            receiver = self._receiver
            try:
                await asyncio.to_thread(_stage, receiver, version, step, deadline)
            except SenderLostError as error:
                self._check(worker)
                _log.warning("%s joins again: %s", worker, error)
                if self._address is self._used:
                    self._address = Future()
                self._receiver = None
            else:
                return receiver
        # Shielded, since a cancelled future cannot receive an address.
        used = self._address
        coming = asyncio.shield(asyncio.wrap_future(used))
        try:
            address = await asyncio.wait_for(coming, max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise TimeoutError(
                f"the trainer sent no address for step {step} within {self._timeout:g} s; see its "
                "log, or give a longer time: engine_kwargs.sync_core.timeout"
            ) from None
        receiver = await asyncio.to_thread(Receiver, address, load=self._handover.load)
        if worker != self.worker:
            receiver.close()
        self._check(worker)
        self._receiver, self._used = receiver, used
        await asyncio.to_thread(_stage, receiver, version, step, deadline)
        return receiver

    def _check(self, worker: str) -> None:
        if worker != self.worker:
            raise SyncError(_GIVEN_UP)

    def _begin(self) -> None:
        """Become a new worker, with a new name."""
        self._disconnect(_GIVEN_UP)
        self._busy = False
        self.worker = f"rollout-{secrets.token_hex(8)}"
        _ENDS[self.worker] = self

    def _disconnect(self, why: str) -> None:
        """Close the receiver, and end calls that wait for it."""
        receiver, self._receiver = self._receiver, None
        address, self._address = self._address, Future()
        handover, self._handover = self._handover, _Handover(self._timeout)
        if not address.done():
            address.set_exception(SyncError(why))
        handover.end(SyncError(why))
        if receiver is not None:
            receiver.close()


class _Handover:
    """Passes the weights from the thread that loads them to verl's event loop.

    A `Receiver` calls a function with all weights, but verl requests one after the other.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.begin()

    def begin(self) -> None:
        """Prepare for a version."""
        self._given: Future[_Named] = Future()
        self._taken: Future[None] = Future()

    def load(self, weights: _Named) -> None:
        """Pass on the weights, and wait for `end`; this is the ``load`` of a `Receiver`."""
        self._given.set_result(weights)
        self._taken.result(self._timeout)

    async def weights(self, loading: asyncio.Task[None]) -> _Named:
        """Return the weights from `load`, or raise the error that ended the task that calls it."""
        given = asyncio.wrap_future(self._given)
        both: list[asyncio.Future[Any]] = [loading, given]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not given.done():
            await loading
        return given.result()

    def end(self, error: BaseException | None = None) -> None:
        """Make `load` return, or raise the error."""
        if self._taken.done():
            return
        if error is None:
            self._taken.set_result(None)
        else:
            self._taken.set_exception(error)


_ENDS: WeakValueDictionary[str, RolloutEnd] = WeakValueDictionary()


def deliver(actor: Any, worker: str, address: Address) -> None:
    """Pass an address to a worker of this process; the trainer calls this in the actor.

    Args:
        actor: the actor, which Ray passes to the function; not used.
        worker: the worker's name.
        address: the address.

    Raises:
        LookupError: this process has no such worker.
    """
    del actor
    end = _ENDS.get(worker)
    if end is None:
        raise LookupError(f"there is no worker {worker} in this process")
    end.deliver(address)


def _stage(receiver: Receiver, version: int, step: int | None, deadline: float) -> None:
    """Stage a version, and drop versions of earlier steps."""
    found = None
    while found is None or found < version:
        found = receiver.stage(max(0.0, deadline - time.monotonic()))
        if found is None:
            raise TimeoutError(
                f"version {version}, of step {step}, did not come in time; see the trainer's log, "
                "or give a longer time: engine_kwargs.sync_core.timeout"
            )
    if found > version:
        error = StepError(
            f"version {found} came in place of version {version}, that of step {step}: the trainer "
            "and the rollouts must be asked for the same global_steps"
        )
        receiver.reject(error)
        raise error
