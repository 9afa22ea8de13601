"""A process group of our own, over which one version after the other goes to some workers."""

from __future__ import annotations

import atexit
import ctypes
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from sync_core.transports import Block
from sync_plugin_dist.chunks import PartSums
from sync_plugin_dist.rendezvous import BrokenGroupError, Rendezvous

# How often it is looked whether the collectives of a group have ended, in seconds.
_LOOKING = 0.1
# How long the end of the process waits for a group that is being freed, in seconds.
_PATIENCE = 5.0


class _Process:
    """The state of freeing process groups in this process."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        # Reentrant, as the garbage collector may end a forgotten sender meanwhile.
        self.freeing = threading.RLock()
        self.ends = False

    def end(self) -> None:
        free_now = self.freeing.acquire(timeout=_PATIENCE)
        self.ends = True
        if free_now:
            self.freeing.release()


_process = _Process()
atexit.register(_process.end)
os.register_at_fork(after_in_child=_process.begin)


def free(held: list[Any]) -> None:
    """Free a group and its works.

    Args:
        held: the group, then its works: the only references to them, which are taken out.
    """
    with _process.freeing:
        if _process.ends:
            keep_for_ever(held)
        held.clear()


def free_when_completed(held: list[Any]) -> None:
    """Free a group when its collectives have ended, which may be at their timeout; see `free`."""
    if _completed(held):
        free(held)
        return
    thread = threading.Thread(target=_free_later, args=(held,), name="sync-dist-leave", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # Since Python 3.12, no thread begins while the process ends.
        keep_for_ever(held)


def keep_for_ever(held: Iterable[Any]) -> None:
    """Never free these."""
    for each in held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _free_later(held: list[Any]) -> None:
    while not _completed(held):
        time.sleep(_LOOKING)
    free(held)


def _completed(held: Sequence[Any]) -> bool:
    return all(work.is_completed() for work in held[1:])


# How long what a worker has received entirely may still count as being sent, in seconds.
_SETTLING = 5.0
# Where the other end goes while they connect, gloo takes that many times the timeout it is given.
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The parameters that both ends of a process group agree on.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        collective: whether parts are broadcast, and not sent to the one worker.
        interface: the address of this machine that connections are made from.
        timeout: of connecting and of a part that does not get on, in seconds.
        verify: whether what is received is summed up.
    """

    backend: str
    collective: bool
    interface: str
    timeout: float
    verify: bool = False

    @property
    def device(self) -> torch.device:
        """Return where the memory lies that is sent and received."""
        return torch.device("cuda" if self.backend == "nccl" else "cpu")

    def allocate(self, nbytes: int) -> Block:
        """Such memory."""
        if self.device.type == "cpu":
            return Block.allocate(nbytes)
        return Block(torch.empty(nbytes, dtype=torch.uint8, device=self.device))


class Control(Protocol):
    """A worker's source of control messages while it receives."""

    def register(self, poll: select.poll) -> None:
        """Have a poll wait for what there is to read."""

    def interrupts(self) -> bool:
        """Read it, and say whether the transfer is over because of it."""


class TensorGroup:
    """One end of a process group that is not registered with torch.

    Args:
        link: what both ends agree on.
        rendezvous: by which they find each other.
        rank: 0 for the sender.
        size: how many ends there are.

    Raises:
        BrokenGroupError: not all came within the timeout.
    """

    def __init__(self, link: Link, rendezvous: Rendezvous, rank: int, size: int) -> None:
        self.number = rendezvous.number
        # torch keeps only what of it is torch's own.
        self._rendezvous = rendezvous
        self._link = link
        self._works: deque[Any] = deque()
        self._tail = torch.zeros(1, dtype=torch.int64, device=link.device)
        #: Of the last version that was received, where both ends verify: see `PartSums`.
        self.sum = ""
        try:
            self._group = _connect(link, rendezvous, rank, size)
        except (RuntimeError, ValueError) as error:
            raise BrokenGroupError(f"no connection: {error}") from error
        _wires.add(self)

    def send(self, part: Tensor) -> None:
        """Send the next part; it must stay as it is until `settle` or `close`."""
        if self._link.collective:
            self._works.append(self._group.broadcast([part], _from_sender()))
        else:
            self._works.append(self._group.send([part], 1, len(self._works)))

    def finish(self, version: int) -> None:
        """Send the version's number, by which the other end knows that it has all of it."""
        self._tail.fill_(version)
        self.send(self._tail)

    def settle(self) -> None:
        """Wait for the rest once all members have received everything.

        Raises:
            BrokenGroupError: that was not so.
        """
        self._wait_for_all(time.monotonic() + _SETTLING)

    def progress(self) -> int:
        """Return how many parts are not on their way any more; only of what is broadcast."""
        return sum(work.is_completed() for work in self._works)

    def receive(self, parts: Sequence[Tensor], version: int, control: Control) -> None:
        """Receive a version.

        Args:
            parts: where its parts go.
            version: its number.
            control: may end the transfer of what is broadcast.

        Raises:
            BrokenGroupError: it did not come, or another did.
        """
        deadline = time.monotonic() + self._link.timeout
        places = [*parts, self._tail]
        with PartSums() as sums:
            try:
                if self._link.collective:
                    self._works.extend(self._group.broadcast([p], _from_sender()) for p in places)
                    # The memory of a GPU is read when all of it has come.
                    on_cpu = self._link.device.type == "cpu"
                    verified = parts if self._link.verify and on_cpu else ()
                    self._wait_unless(control, verified, sums)
                else:
                    self._works.extend(self._group.recv([p], 0, i) for i, p in enumerate(places))
                    # When an end dies, gloo fails waits for any chunk but the one in transfer.
                    self._works.pop().wait(timedelta(seconds=self._link.timeout))
            except RuntimeError as error:
                raise BrokenGroupError(str(error)) from error
            self._wait_for_all(deadline)
            if self._link.collective and control.interrupts():
                # A version that a sender gave up may be overwritten while it is being broadcast.
                raise BrokenGroupError("the sender begins again")
            if self._link.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            if self._link.verify:
                for part in parts[sums.count :]:
                    sums.add(part)
                self.sum = sums.result()
        if int(self._tail.item()) != version:
            raise BrokenGroupError(f"version {int(self._tail.item())} came, and not {version}")

    def close(self) -> None:
        """Leave the group; what is on its way does not arrive, or not whole."""
        _wires.discard(self)
        if self._link.collective:
            # Weights not yet broadcast may be overwritten from now on. The tail goes last, so
            # it tells the other ends.
            self._tail.zero_()
        held = [self._group, *self._works]
        del self._group, self._works
        if self._link.collective:
            free_when_completed(held)
        else:
            free(held)

    def _wait_unless(self, control: Control, parts: Sequence[Tensor], sums: PartSums) -> None:
        """Wait for all that is broadcast, and sum up the parts that have come."""
        # Futures, since a work says that it is completed only some time after it has told so.
        missing = deque(work.get_future() for work in self._works)
        alarm = _Alarm()
        try:
            for future in missing:
                future.add_done_callback(alarm.ring)
            poll = select.poll()
            poll.register(alarm.reader, select.POLLIN)
            control.register(poll)
            if control.interrupts():  # which may have been read already, along with the rest
                raise BrokenGroupError("the sender begins again")
            while missing:
                ready = poll.poll(self._link.timeout * 1000)
                if not ready:
                    raise BrokenGroupError(f"nothing came for {self._link.timeout:g} s")
                for descriptor, _ in ready:
                    if descriptor == alarm.reader:
                        os.read(alarm.reader, 4096)
                    elif control.interrupts():
                        raise BrokenGroupError("the sender begins again")
                while missing and missing[0].done():
                    missing.popleft().wait()
                    if sums.count < len(parts):
                        sums.add(parts[sums.count])
        finally:
            alarm.close()

    def _wait_for_all(self, deadline: float) -> None:
        try:
            while self._works:
                left = max(0.001, deadline - time.monotonic())
                self._works[0].wait(timedelta(seconds=left))
                self._works.popleft()
        except RuntimeError as error:
            raise BrokenGroupError(str(error)) from error


def _connect(link: Link, rendezvous: Rendezvous, rank: int, size: int) -> Any:
    timeout = timedelta(seconds=link.timeout)
    if link.backend == "nccl":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return distributed.ProcessGroupNCCL(rendezvous, rank, size, options)
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout / _ATTEMPTS
    options._threads = 1
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=link.interface)]
    group = distributed.ProcessGroupGloo(rendezvous, rank, size, options)
    # Of what is sent by all together; the others are waited for with a timeout each.
    group._set_default_timeout(timeout)
    return group


def _from_sender() -> Any:
    options = distributed.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options


class _Alarm:
    """A pipe that may be rung, by threads of torch, even after it was closed."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        self._open = True
        self._lock = threading.Lock()

    def ring(self, work: object) -> None:
        del work
        with self._lock:
            if self._open:
                os.write(self._writer, b"\0")

    def close(self) -> None:
        with self._lock:
            self._open = False
            os.close(self.reader)
            os.close(self._writer)


# A group that is freed waits for its threads, and in a process forked from this one there are none.
_wires: weakref.WeakSet[TensorGroup] = weakref.WeakSet()


def _never_free() -> None:
    for wire in list(_wires):
        keep_for_ever((wire._group, *wire._works))


os.register_at_fork(after_in_child=_never_free)
