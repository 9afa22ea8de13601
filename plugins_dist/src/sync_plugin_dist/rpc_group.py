"""Worker group `rpc`: each worker is a peer in a world of `torch.distributed.rpc`."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, ClassVar, NoReturn, TypeVar
from uuid import uuid4

from sync_core import (
    ClosedError,
    OptionError,
    RemoteCallError,
    UnknownWorkerError,
    WorkerGroup,
    WorkerTimeoutError,
)
from sync_plugin_dist.rpc_outcome import Message, dumps, name_of
from sync_plugin_dist.rpc_peer import ChildPeer, Peer
from sync_plugin_dist.rpc_worker import RpcWorker
from sync_plugin_dist.rpc_world import LocalWorld, end_processes, find_peers

Result = TypeVar("Result")

# The longest that stopping waits for the calls in progress, and for a peer to forget.
_ASKING = 5.0
# Time for workers that nobody waits for any more: the group failed to start, or was forgotten.
_SHORT = 2.0


class RpcGroup(WorkerGroup):
    """Objects that live in the processes of a torch RPC world, each in a thread of its own.

    Where this process has called `torch.distributed.rpc.init_rpc`, the others of that world are
    the workers, in the order of their ids. They need this package installed. Stopping the group
    lets them forget what they hosted, and ends nothing else; stop it before RPC is shut down. A
    peer whose machine vanishes without closing its connections is not noticed, as torch RPC does
    not notice it.

    Otherwise processes are started on this machine, which die with this process and
    ignore Ctrl-C, and RPC runs over loopback until the group is stopped, with this process as
    ``trainer`` and the others as ``worker0``, ``worker1``, …. Stopping asks first: the call in
    progress has half of the timeout (at most 5 s) to finish.

    A torch RPC world is fixed when it begins: no worker can be added or restarted.

    The factory, functions, arguments, results and exceptions travel by cloudpickle; tensors among
    them are copied. Arguments are pickled by `call`, so changing them afterwards changes nothing.

    Args:
        factory: see `WorkerGroup`.
        num_workers: likewise.
        timeout: likewise; in a world of the group's own also for RPC calls that set no other.
        names: the workers' names, where RPC is initialised and not all others are workers.
        torch_threads: threads that torch uses in each interpreter that is started; None shares
            the cores out.

    Raises:
        ValueError: the RPC world has other workers, or another number of them.
        OptionError: ``names`` where RPC is not initialised, or ``torch_threads`` where it is.
        PluginError: this process has a group with a world of its own already.

    Example:
        >>> with RpcGroup(lambda worker_id: [worker_id], 2) as group:  # doctest: +SKIP
        ...     group.call(1, list.__len__).result()
        1
    """

    capabilities: ClassVar[frozenset[str]] = frozenset({"parallel", "cross_process", "cross_host"})

    def __init__(
        self,
        factory: Callable[[int], Any],
        num_workers: int,
        *,
        timeout: float = 60.0,
        names: Sequence[str] | None = None,
        torch_threads: int | None = None,
    ) -> None:
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}; give 0 or more")
        self._timeout = timeout
        self._closed = False
        self._lock = threading.Lock()
        message = _encode_factory(factory)
        deadline = time.monotonic() + timeout
        self._world: LocalWorld | None = None
        peers: Sequence[Peer] | None = find_peers(num_workers, names, torch_threads)
        if peers is None:
            self._world = LocalWorld(num_workers, timeout, torch_threads)
            peers = self._world.peers
        self._workers: dict[int, RpcWorker] = {}
        name, key = name_of(factory), uuid4().hex
        try:
            for worker_id, peer in enumerate(peers):
                self._workers[worker_id] = RpcWorker(peer, worker_id, key, name, message)
            _wait_ready(self._workers, deadline, timeout)
        except BaseException:
            _end(self._workers.values(), self._world, min(timeout, _SHORT))
            raise
        weakref.finalize(self, _end_forgotten, os.getpid(), self._workers, self._world)

    @property
    def worker_ids(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted(self._workers))

    def call(
        self,
        worker_id: int,
        function: Callable[..., Result],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Future[Result]:
        return self._member(worker_id).call(function, args, kwargs)

    def alive(self, worker_id: int) -> bool:
        with self._lock:
            return self._find(worker_id).alive and not self._closed

    def add(self) -> int:
        self._refuse("add a worker", "give more num_workers when you make it")

    def restart(self, worker_id: int) -> None:
        self._member(worker_id)
        self._refuse("restart a worker", "stop the group and make a new one")

    def remove(self, worker_id: int) -> None:
        worker = self._member(worker_id)
        with self._lock:
            self._workers.pop(worker_id, None)
        _end_calls([worker], self._timeout)
        if isinstance(worker.peer, ChildPeer):
            end_processes([worker.peer], self._timeout)
        else:
            _forget([worker], min(self._timeout, _ASKING))

    def stop(self, timeout: float | None = None) -> None:
        with self._lock:
            self._closed = True
            workers = tuple(self._workers.values())
        _end(workers, self._world, self._timeout if timeout is None else timeout)

    def _refuse(self, what: str, advice: str) -> NoReturn:
        with self._lock:
            self._check_open()
        raise OptionError(
            f"worker group 'rpc' cannot {what}, as a torch RPC world is fixed when it begins; "
            f"{advice}, or use workers='process' or 'ray' with scheme='dist'"
        )

    def _member(self, worker_id: int) -> RpcWorker:
        with self._lock:
            self._check_open()
            return self._find(worker_id)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this worker group was stopped; make a new one")

    def _find(self, worker_id: int) -> RpcWorker:
        # True and False would pass for the workers 1 and 0.
        if isinstance(worker_id, bool) or worker_id not in self._workers:
            ids = ", ".join(map(str, sorted(self._workers))) or "none"
            raise UnknownWorkerError(f"no worker {worker_id!r} in this group; there are: {ids}")
        return self._workers[worker_id]


def _encode_factory(factory: Callable[[int], Any]) -> Message:
    try:
        return dumps((factory, (), {}))
    except Exception as error:
        message = f"was not started, its factory {name_of(factory)} cannot be pickled: {error}"
        raise RemoteCallError(0, message) from error


def _wait_ready(workers: dict[int, RpcWorker], deadline: float, timeout: float) -> None:
    waits = {worker.ready: worker_id for worker_id, worker in workers.items()}
    done, late = wait(waits, deadline - time.monotonic(), return_when=FIRST_EXCEPTION)
    for ready in done:
        ready.result()
    for worker_id in sorted(waits[ready] for ready in late):
        raise WorkerTimeoutError(
            worker_id, f"did not start within {timeout:g} s; give the group a longer timeout"
        )


def _end(workers: Collection[RpcWorker], world: LocalWorld | None, timeout: float) -> None:
    """End the workers, ended ones included, within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    _end_calls(workers, timeout)
    left = deadline - time.monotonic()
    if world is None:
        _forget(workers, min(left, _ASKING))
    else:
        world.end(left)


def _end_calls(workers: Collection[RpcWorker], timeout: float) -> None:
    """Give the calls in progress half of the timeout, and let no other begin."""
    begin = time.monotonic()
    for worker in workers:
        worker.ask_to_end()
    stuck = [worker for worker in workers if not worker.join(begin + min(timeout / 2, _ASKING))]
    for worker in stuck:
        worker.give_up()
    for worker in stuck:
        worker.join(begin + timeout * 3 / 4)


def _forget(workers: Collection[RpcWorker], timeout: float) -> None:
    asked = [worker.forget(timeout) for worker in workers]
    wait([done for done in asked if done is not None], timeout)


def _end_forgotten(owner: int, workers: dict[int, RpcWorker], world: LocalWorld | None) -> None:
    # A fork of the owner has the group in its memory; the workers are not its to end.
    if os.getpid() == owner:
        _end(workers.values(), world, _SHORT)
