"""A local RPC world: this process as the trainer, and worker processes that are its own."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from io import FileIO

from torch._C._distributed_c10d import TCPStore
from torch._C._distributed_rpc import _get_current_rpc_agent
from torch.distributed import rpc

from sync_core import OptionError, PluginError, WorkerLostError, WorkerTimeoutError
from sync_core.workers import start_process
from sync_plugin_dist.rpc_child import Place
from sync_plugin_dist.rpc_join import Seat, attempts, initialised, join

_MAIN = "sync_plugin_dist.rpc_child:main"

# From the end of its connection to the end of a process: closing a GPU takes a moment.
_BURIAL = 5.0


class RpcPeer:
    """A process that was not started here.

    Args:
        name: its name in the RPC world.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def alive(self) -> bool:
        """Return whether the process lives, as far as this one can tell without asking it."""
        return True

    def epitaph(self) -> str:
        """Return how it ended, now that it cannot be reached any more."""
        return f"RPC has lost {self.name!r}"


class ChildPeer(RpcPeer):
    """A process that dies with this one.

    Args:
        place: its arguments.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place.seat.name)
        self._ending = False
        lifeline, write_end = os.pipe()
        self._lifeline = FileIO(write_end, "wb")
        try:
            self._process = start_process(_MAIN, place.to_json(), fds=[lifeline])
        except BaseException:
            self._lifeline.close()
            raise
        finally:
            os.close(lifeline)
        _lifelines.add(self._lifeline)
        # However it is forgotten, and whatever became of the process.
        weakref.finalize(self, self._lifeline.close)

    @property
    def alive(self) -> bool:
        return not self._ending and not self._process.exited(0)

    def epitaph(self) -> str:
        if self._ending:
            return "was stopped"
        if not self.exited(_BURIAL):
            return super().epitaph()
        return self._process.epitaph()

    def ask_to_end(self) -> None:
        """Let the process run its exit handlers and end, whatever it is doing."""
        self._ending = True
        # It is closed where the process has ended.
        with suppress(OSError, ValueError):
            self._lifeline.write(b"\0")

    def terminate(self) -> None:
        """Send SIGTERM, which a stopped process (SIGSTOP) does not feel."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.send_signal(signal.SIGKILL)

    def exited(self, timeout: float) -> bool:
        """Return whether the process has ended, at the latest after ``timeout`` seconds."""
        if not self._process.exited(timeout):
            return False
        self._lifeline.close()
        return True


# A process forked from this one must not keep the workers alive after this one has died.
_lifelines: weakref.WeakSet[FileIO] = weakref.WeakSet()


def _close_inherited() -> None:
    for inherited in list(_lifelines):
        inherited.close()


os.register_at_fork(after_in_child=_close_inherited)


# The longest that ending waits for processes to end by themselves, and after SIGTERM.
_ASKING = 5.0
_TERMINATING = 2.0
# Time to end processes of a world that did not come together.
_SHORT = 2.0

# A process can be in one world only. Reentrant, as the garbage collector may end a forgotten
# group in any thread.
_one_world = threading.RLock()
_worlds: list[LocalWorld] = []


class LocalWorld:
    """Fresh interpreters on this machine, each in the RPC world as ``worker0``, ``worker1``, ….

    Args:
        num_workers: how many; none need no world.
        timeout: deadline in seconds for them to be there.
        torch_threads: threads that torch uses in each; None shares the cores out.

    Raises:
        PluginError: a world that this class has begun in this process still lives.
        WorkerLostError: a process ended before it was there.
        WorkerTimeoutError: a process was not there in time.
    """

    def __init__(self, num_workers: int, timeout: float, torch_threads: int | None) -> None:
        self.peers: list[ChildPeer] = []
        self._timeout = timeout
        self._server: TCPStore | None = None
        if not num_workers:
            return
        with _one_world:
            _check_free()
            _worlds.append(self)
        try:
            self._begin(num_workers, torch_threads)
        except BaseException:
            self.end(min(timeout, _SHORT))
            raise

    def end(self, timeout: float) -> None:
        """Leave RPC and end every process within ``timeout`` seconds. May be called again."""
        begin = time.monotonic()
        with _one_world:
            if self in _worlds and initialised():
                rpc.shutdown(graceful=False)
        end_processes(self.peers, timeout - (time.monotonic() - begin))
        self._server = None
        with _one_world:
            if self in _worlds:
                _worlds.remove(self)

    def _begin(self, num_workers: int, torch_threads: int | None) -> None:
        deadline = time.monotonic() + self._timeout
        self._server = _listen(self._timeout)
        # torch keeps the store that it is given until the next world, and so not the one that
        # holds the port.
        store = TCPStore("127.0.0.1", self._server.port, timeout=timedelta(seconds=self._timeout))
        size, attempt = num_workers + 1, attempts()
        if torch_threads is None:
            torch_threads = max(1, _cores() // num_workers)
        seats = [
            Seat(f"worker{i}", i + 1, size, attempt, self._timeout) for i in range(num_workers)
        ]
        for seat in seats:
            self.peers.append(ChildPeer(Place(seat, store.port, torch_threads)))
        # torch would notice neither a death nor Ctrl-C while it waits for all to be there.
        self._wait_for(store, seats, deadline)
        try:
            join(store, Seat("trainer", 0, size, attempt, self._timeout))
        except RuntimeError as error:
            self._check_alive()
            message = f"or another worker did not join torch RPC: {error}"
            raise WorkerTimeoutError(0, message) from error

    def _wait_for(self, store: TCPStore, seats: list[Seat], deadline: float) -> None:
        while missing := [i for i, seat in enumerate(seats) if not store.check([seat.key])]:
            self._check_alive()
            if time.monotonic() > deadline:
                late = f"did not start within {self._timeout:g} s; give the group a longer timeout"
                raise WorkerTimeoutError(missing[0], late)
            time.sleep(0.005)

    def _check_alive(self) -> None:
        for i, peer in enumerate(self.peers):
            if not peer.alive:
                raise WorkerLostError(i, f"{peer.epitaph()} before it could join torch RPC")


def find_peers(
    num_workers: int, names: Sequence[str] | None, torch_threads: int | None
) -> list[RpcPeer] | None:
    """The workers among the peers of the world that this process has joined; None without one.

    Args:
        num_workers: the number of workers.
        names: which they are; None for all others, in the order of their ids.
        torch_threads: an option that only a `LocalWorld` has.

    Raises:
        ValueError: there are others, or another number of them.
        OptionError: the option given is not for the case that is found.
        PluginError: the world is a `LocalWorld`.
    """
    with _one_world:
        _check_free()
    if not initialised():
        if names is not None:
            raise OptionError(
                "names are those of workers in torch RPC, which is not initialised in this "
                "process; call torch.distributed.rpc.init_rpc first, or leave names out"
            )
        return None
    if torch_threads is not None:
        raise OptionError(
            "torch_threads is for workers that the group starts, and torch RPC is initialised in "
            "this process; call torch.set_num_threads in its workers instead"
        )
    there = others()
    chosen = there if names is None else list(names)
    known = ", ".join(map(repr, there)) or "none"
    if strangers := [name for name in chosen if name not in there]:
        raise ValueError(f"no RPC worker {strangers[0]!r} besides this process; there are: {known}")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"names={chosen!r} has a name twice; give each worker once")
    if len(chosen) != num_workers:
        advice = "" if names is not None else ", or names=[…] for some of them"
        raise ValueError(
            f"num_workers is {num_workers}, and the RPC workers are {len(chosen)}: "
            f"{', '.join(map(repr, chosen)) or 'none'}; give num_workers={len(chosen)}{advice}"
        )
    return [RpcPeer(name) for name in chosen]


def others() -> list[str]:
    """The other workers of this process's world, by name, in the order of their ids."""
    # torch has no public list of the members of a world.
    infos = sorted(_get_current_rpc_agent().get_worker_infos(), key=lambda info: info.id)
    own = rpc.get_worker_info().id
    return [info.name for info in infos if info.id != own]


def _check_free() -> None:
    if _worlds:
        raise PluginError(
            "worker group 'rpc' runs in this process already, and a process can be in one torch "
            "RPC world only; stop that group first, or use workers='process' with scheme='dist' "
            "for one of the two"
        )


def end_processes(peers: Collection[ChildPeer], timeout: float) -> None:
    """End processes within ``timeout`` seconds, by force where asking is not enough."""
    begin = time.monotonic()
    terminate_at = begin + min(timeout / 2, _ASKING)
    steps = (
        (ChildPeer.ask_to_end, terminate_at),
        (ChildPeer.terminate, terminate_at + min(timeout / 4, _TERMINATING)),
        (ChildPeer.kill, begin + timeout),
    )
    running = list(peers)
    for step, until in steps:
        for peer in running:
            step(peer)
        running = [peer for peer in running if not peer.exited(until - time.monotonic())]


def _listen(timeout: float) -> TCPStore:
    # A store that chose its port itself would listen on every interface.
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        return TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )


def _cores() -> int:
    """The cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
