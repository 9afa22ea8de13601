"""Worker group `rpc`: each worker is a peer in a world of `torch.distributed.rpc`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import wait
from typing import Any, ClassVar, NoReturn
from uuid import uuid4

from sync_core import OptionError
from sync_core.checks import check_count
from sync_core.workers import LaunchedGroup, Launcher, pickle_factory
from sync_plugin_dist.rpc_message import pack
from sync_plugin_dist.rpc_peer import ChildPeer, Peer
from sync_plugin_dist.rpc_worker import RpcWorker
from sync_plugin_dist.rpc_world import LocalWorld, end_processes, find_peers

# The longest that stopping waits for the calls in progress, and for a peer to forget.
_ASKING = 5.0


class RpcGroup(LaunchedGroup[RpcWorker]):
    """Objects that live in the processes of a torch RPC world, each in a thread of its own.

    Where this process has called `torch.distributed.rpc.init_rpc`, the others of that world are
    the workers, in the order of their ids. They need this package installed. Stopping the group
    lets them forget what they hosted, and ends nothing else; stop it before RPC is shut down. A
    peer whose machine vanishes without closing its connections is not noticed, as torch RPC does
    not notice it.

    Otherwise processes are started on this machine, which die with this process and
    ignore Ctrl-C, and RPC runs by TCP over loopback until the group is stopped, with this process
    as ``trainer`` and the others as ``worker0``, ``worker1``, …. Stopping asks first: the call in
    progress has half of the timeout (at most 5 s) to finish.

    No worker can be added or restarted: a torch RPC world of a given size is fixed when it begins,
    and into one without, nobody can come any more once a member has died.

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
        num_workers = check_count(num_workers, "num_workers", least=0)
        peers = find_peers(num_workers, names, torch_threads)
        launcher = _RpcLauncher(factory, peers, timeout, torch_threads)
        super().__init__(launcher, num_workers, timeout=timeout)

    def add(self) -> int:
        with self._lock:
            self._check_open()
        self._refuse("add a worker", "give more num_workers when you make it")

    def restart(self, worker_id: int) -> None:
        self._member(worker_id)
        self._refuse("restart a worker", "stop the group and make a new one")

    def _refuse(self, what: str, advice: str) -> NoReturn:
        raise OptionError(
            f"worker group 'rpc' cannot {what}, as a torch RPC world is fixed when it begins; "
            f"{advice}, or use workers='process' or 'ray' with scheme='dist'"
        )


class _RpcLauncher(Launcher[RpcWorker]):
    def __init__(
        self,
        factory: Callable[[int], Any],
        peers: Sequence[Peer] | None,
        timeout: float,
        torch_threads: int | None,
    ) -> None:
        self._factory, self._pickled = factory, pack(pickle_factory(factory, 0))
        self._peers = peers
        self._timeout = timeout
        self._torch_threads = torch_threads
        self._world: LocalWorld | None = None

    def launch(self, worker_ids: Sequence[int]) -> Iterator[RpcWorker]:
        peers = self._peers
        if peers is None:
            self._world = LocalWorld(len(worker_ids), self._timeout, self._torch_threads)
            peers = self._world.peers
        key = uuid4().hex
        for worker_id, peer in zip(worker_ids, peers, strict=True):
            yield RpcWorker(peer, worker_id, key, self._factory, self._pickled)

    def end(self, workers: Collection[RpcWorker], timeout: float) -> None:
        left = timeout - _end_calls(workers, timeout)
        if self._world is None:
            _forget(workers, min(left, _ASKING))
        else:
            end_processes([w.peer for w in workers if isinstance(w.peer, ChildPeer)], left)

    def close(self, workers: Collection[RpcWorker], timeout: float) -> None:
        if self._world is None:
            self.end(workers, timeout)
        else:
            self._world.end(timeout - _end_calls(workers, timeout))


def _end_calls(workers: Collection[RpcWorker], timeout: float) -> float:
    """Give the calls in progress half of the timeout, and let no other begin.

    Returns:
        How many seconds that took.
    """
    begin = time.monotonic()
    for worker in workers:
        worker.ask_to_end()
    stuck = [worker for worker in workers if not worker.join(begin + min(timeout / 2, _ASKING))]
    for worker in stuck:
        worker.give_up()
    for worker in stuck:
        worker.join(begin + timeout * 3 / 4)
    return time.monotonic() - begin


def _forget(workers: Collection[RpcWorker], timeout: float) -> None:
    asked = [worker.forget(timeout) for worker in workers]
    wait([done for done in asked if done is not None], timeout)
