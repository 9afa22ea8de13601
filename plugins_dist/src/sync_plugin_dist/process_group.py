"""An unregistered process group over which a sender sends versions to workers."""

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

# How often to check whether the collectives of a group have ended, in seconds.
_LOOKING = 0.1
# How long the exit of the process waits while a group is being freed, in seconds.
_PATIENCE = 5.0


class _Process:
    """This process's state of freeing process groups."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        # Reentrant, since the garbage collector may end a forgotten sender meanwhile.
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
        held: the only references to the group and then its works; the list is emptied.
    """
    with _process.freeing:
        if _process.ends:
            keep_for_ever(held)
        held.clear()


def free_when_completed(held: list[Any]) -> None:
    """Free a group once its collectives have ended, by their timeout at the latest."""
    if _completed(held):
        free(held)
        return
    thread = threading.Thread(target=_free_later, args=(held,), name="sync-dist-leave", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # Since Python 3.12, no thread can start during the exit of the process.
        keep_for_ever(held)


def keep_for_ever(held: Iterable[Any]) -> None:
    """Never free these objects."""
    for each in held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _free_later(held: list[Any]) -> None:
    while not _completed(held):
        time.sleep(_LOOKING)
    free(held)


def _completed(held: Sequence[Any]) -> bool:
    return all(work.is_completed() for work in held[1:])


# How long a send may stay incomplete after the worker has received everything, in seconds.
_SETTLING = 5.0
# If the other end disappears while connecting, gloo takes this many times its timeout.
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The parameters that both ends of a process group agree on.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        collective: whether parts are broadcast instead of sent to one worker.
        interface: this machine's address for outgoing connections.
        timeout: the timeout for connecting and for a part without progress, in seconds.
        verify: whether received parts are hashed.
    """

    backend: str
    collective: bool
    interface: str
    timeout: float
    verify: bool = False

    @property
    def device(self) -> torch.device:
        """The device of the memory to send from and receive into."""
        return torch.device("cuda" if self.backend == "nccl" else "cpu")

    def allocate(self, nbytes: int) -> Block:
        """Allocate memory on the device."""
        if self.device.type == "cpu":
            return Block.allocate(nbytes)
        return Block(torch.empty(nbytes, dtype=torch.uint8, device=self.device))


class Control(Protocol):
    """A source of control messages during a transfer, for a worker."""

    def register(self, poll: select.poll) -> None:
        """Make a poll object wait for messages."""

    def interrupts(self) -> bool:
        """Read the messages, and return whether one ends the transfer."""


class TensorGroup:
    """A member of a process group that is not registered with torch.

    Args:
        link: the common parameters.
        rendezvous: the store by which the members find each other.
        rank: 0 for the sender.
        size: the number of members.

    Raises:
        BrokenGroupError: a member did not join within the timeout.
    """

    def __init__(self, link: Link, rendezvous: Rendezvous, rank: int, size: int) -> None:
        self.number = rendezvous.number
        # Keep a reference: torch keeps only the C++ part of the store.
        self._rendezvous = rendezvous
        self._link = link
        self._works: deque[Any] = deque()
        self._tail = torch.zeros(1, dtype=torch.int64, device=link.device)
        #: The hash of the last received version, if both ends verify; see `PartSums`.
        self.sum = ""
        try:
            self._group = _connect(link, rendezvous, rank, size)
        except (RuntimeError, ValueError) as error:
            raise BrokenGroupError(f"no connection: {error}") from error
        _wires.add(self)

    def send(self, part: Tensor) -> None:
        """Send the next part, which must not change until `settle` or `close`."""
        if self._link.collective:
            self._works.append(self._group.broadcast([part], _from_sender()))
        else:
            self._works.append(self._group.send([part], 1, len(self._works)))

    def finish(self, version: int) -> None:
        """Send the version's number, which tells the receivers that they have all parts."""
        self._tail.fill_(version)
        self.send(self._tail)

    def settle(self) -> None:
        """Wait for the sends to complete, once all members have received everything.

        Raises:
            BrokenGroupError: a send did not complete.
        """
        self._wait_for_all(time.monotonic() + _SETTLING)

    def progress(self) -> int:
        """Return the number of completed parts of a broadcast."""
        return sum(work.is_completed() for work in self._works)

    def receive(self, parts: Sequence[Tensor], version: int, control: Control) -> None:
        """Receive a version.

        Args:
            parts: the memory for its parts.
            version: the version's number.
            control: may end the transfer of a broadcast.

        Raises:
            BrokenGroupError: the version did not arrive, or another one did.
        """
        deadline = time.monotonic() + self._link.timeout
        places = [*parts, self._tail]
        with PartSums() as sums:
            try:
                if self._link.collective:
                    self._works.extend(self._group.broadcast([p], _from_sender()) for p in places)
                    # GPU memory is hashed when all parts have arrived.
                    on_cpu = self._link.device.type == "cpu"
                    verified = parts if self._link.verify and on_cpu else ()
                    self._wait_unless(control, verified, sums)
                else:
                    self._works.extend(self._group.recv([p], 0, i) for i, p in enumerate(places))
                    # After a member's death, gloo fails all waits except that for the part in
                    # transfer.
                    self._works.pop().wait(timedelta(seconds=self._link.timeout))
            except RuntimeError as error:
                raise BrokenGroupError(str(error)) from error
            self._wait_for_all(deadline)
            if self._link.collective and control.interrupts():
                # If a sender gives a version up, it may overwrite it during the broadcast.
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
        """Leave the group; parts in transfer do not arrive, or only incomplete."""
        _wires.discard(self)
        if self._link.collective:
            # Weights not yet broadcast may be overwritten from now on. The tail is sent last, so a
            # zero there tells the other members.
            self._tail.zero_()
        held = [self._group, *self._works]
        del self._group, self._works
        if self._link.collective:
            free_when_completed(held)
        else:
            free(held)

    def _wait_unless(self, control: Control, parts: Sequence[Tensor], sums: PartSums) -> None:
        """Wait for all parts of a broadcast, and hash them as they arrive."""
        # Futures, since a work's `is_completed` is true only some time after its callbacks.
        missing = deque(work.get_future() for work in self._works)
        alarm = _Alarm()
        try:
            for future in missing:
                future.add_done_callback(alarm.ring)
            poll = select.poll()
            poll.register(alarm.reader, select.POLLIN)
            control.register(poll)
            if control.interrupts():  # it may have been read already, with other messages
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
    # The timeout of collectives; waits for other works each have their own timeout.
    group._set_default_timeout(timeout)
    return group


def _from_sender() -> Any:
    options = distributed.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options


class _Alarm:
    """A pipe with which torch's threads wake a poll, safely even after it was closed."""

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


# Never freed in a forked process: freeing a group waits for its threads, which do not exist there.
_wires: weakref.WeakSet[TensorGroup] = weakref.WeakSet()


def _never_free() -> None:
    for wire in list(_wires):
        keep_for_ever((wire._group, *wire._works))


os.register_at_fork(after_in_child=_never_free)
