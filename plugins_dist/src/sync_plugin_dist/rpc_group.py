"""Worker group `rpc`: each worker is a peer in a world of `torch.distributed.rpc`."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, ClassVar, NoReturn
from uuid import uuid4

from torch.distributed import rpc

from sync_core import OptionError
from sync_core.checks import check_count
from sync_core.workers import CallOutcome, LaunchedGroup, Launcher, RemoteCall, pickle_factory
from sync_plugin_dist import rpc_host
from sync_plugin_dist.rpc_host import Message, pack, unpack
from sync_plugin_dist.rpc_join import initialised
from sync_plugin_dist.rpc_world import ChildPeer, LocalWorld, RpcPeer, end_processes, find_peers

# How often a worker with nothing to do is asked whether it can be reached: torch RPC notices the
# end of a connection only while a call waits for an answer.
_PING_INTERVAL = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    call: RemoteCall
    function: Callable[..., Any]
    args: tuple[Any, ...]


class RpcWorker:
    """One hosted object, and the thread that sends its calls and ends their futures.

    A call is sent when the one before it has its answer, so that what has not begun when the
    worker is stopped never begins. RPC's own threads only queue what they learn, as users'
    callbacks may take their time.

    Args:
        peer: the process that hosts the object.
        worker_id: given to the factory, and named by the errors.
        key: by which the process knows the object.
        factory: makes the object.
        pickled_factory: the same, as it travels.
    """

    def __init__(
        self,
        peer: RpcPeer,
        worker_id: int,
        key: str,
        factory: Callable[[int], Any],
        pickled_factory: Message,
    ) -> None:
        self.peer = peer
        self.worker_id = worker_id
        self._key = f"{key}/{worker_id}"
        # Reentrant, as the garbage collector may end a forgotten group in any of its threads.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[_Request] = deque()
        self._lost: str | None = None
        self._ending = False
        # Answers to what is being asked; None ends the waiting for it.
        self._answers: SimpleQueue[Any] = SimpleQueue()
        call = RemoteCall(worker_id, factory)
        self.ready: Future[None] = call.future
        self._post(_Request(call, rpc_host.make, (self._key, worker_id, pickled_factory)))
        self._thread = threading.Thread(
            target=self._work, name=f"sync worker {worker_id} rpc", daemon=True
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        return not self._ending and self._lost is None and self.peer.alive

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        call = RemoteCall(self.worker_id, function)
        parts = call.pickle(args, kwargs)
        if parts is not None:
            self._post(_Request(call, rpc_host.run, (self._key, pack(parts))))
        return call.future

    def ask_to_end(self) -> None:
        """Let the call in progress finish, and no other begin."""
        with self._lock:
            self._ending = True
            self._changed.notify_all()

    def give_up(self) -> None:
        """After `ask_to_end`: wait for the call in progress no longer."""
        self._answers.put(None)

    def join(self, deadline: float) -> bool:
        """After `ask_to_end`: whether every call has ended before the deadline."""
        # What this thread is at ends the rest when its callback returns.
        if self._thread is threading.current_thread():
            return True
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def forget(self, timeout: float) -> Future[Any] | None:
        """After `ask_to_end`: let the process forget the object.

        Returns:
            What ends when it has, or cannot be reached; None where that is known already.
        """
        if self._lost is not None or not initialised():
            return None
        done: Future[Any] = Future()
        try:
            reply = rpc.rpc_async(
                self.peer.name, rpc_host.forget, args=(self._key,), timeout=max(0.1, timeout)
            )
        except RuntimeError:
            # Nothing is left there to forget.
            return None
        reply.add_done_callback(done.set_result)
        # Asked once.
        self._lost = "was stopped"
        return done

    def _post(self, request: _Request) -> None:
        with self._lock:
            ended = self._lost or ("was stopped" if self._ending else None)
            if ended is None:
                self._waiting.append(request)
                self._changed.notify_all()
        if ended is not None:
            _refuse(request.call, ended)

    def _work(self) -> None:
        while not self._ending and self._lost is None:
            request = self._next()
            if request is not None:
                self._run(request)
            elif not self._ending:
                self._look()
            # Not to be kept until the next one.
            del request
        with self._lock:
            reason = self._lost or "was stopped"
            requests, self._waiting = self._waiting, deque()
        for request in requests:
            request.call.lose(f"{reason} before it could run {request.call.name}")

    def _next(self) -> _Request | None:
        with self._lock:
            self._changed.wait_for(lambda: self._waiting or self._ending, _PING_INTERVAL)
            return self._waiting.popleft() if self._waiting and not self._ending else None

    def _run(self, request: _Request) -> None:
        call = request.call
        if not self.peer.alive:
            _refuse(call, self._lose())
            return
        answer = self._ask(request.function, request.args)
        if isinstance(answer, list):
            call.finish(CallOutcome.unpickle(unpack(answer)))
        elif answer is not None and self._look():
            call.finish(CallOutcome.failure("gave no result:", answer))
        else:
            call.lose(f"{self._lost or 'was stopped'} while running {call.name}", answer)

    def _look(self) -> bool:
        """Return whether the worker can be reached. It is lost otherwise, unless it was stopped."""
        answer = self._ask(rpc_host.ping, ())
        if isinstance(answer, BaseException):
            self._lose()
        return isinstance(answer, list)

    def _ask(
        self, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> Message | Exception | None:
        """Run a function there, without a deadline.

        Returns:
            The answer, empty without a result; the error that RPC reported; None if the group
            has given up waiting.
        """
        try:
            reply = rpc.rpc_async(self.peer.name, function, args=args, timeout=0)
            reply.add_done_callback(self._answers.put)
            answer = self._answers.get()
            return None if answer is None else answer.value() or []
        except Exception as error:
            return error

    def _lose(self) -> str:
        reason = self.peer.epitaph() if initialised() else "RPC was shut down in this process"
        with self._lock:
            self._lost = "was stopped" if self._ending else reason
            return self._lost


def _refuse(call: RemoteCall, reason: str) -> None:
    call.lose(f"{reason}, so it cannot run {call.name}; make a new group")


# The longest that stopping waits for the calls in progress, and for a peer to forget.
_ASKING = 5.0


class RpcGroup(LaunchedGroup[RpcWorker]):
    """Objects that live in the processes of a torch RPC world, each in its own thread.

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
    and no process can join one without a fixed size once a member has died.

    The factory, functions, arguments, results and exceptions travel by cloudpickle; tensors among
    them are copied. Arguments are pickled by `call`, so changing them afterwards changes nothing.

    Args:
        factory: see `WorkerGroup`.
        num_workers: see `WorkerGroup`.
        timeout: see `WorkerGroup`; in the group's own world also for RPC calls that set no other.
        names: the workers' names, where RPC is initialised and not all others are workers.
        torch_threads: threads that torch uses in each interpreter that is started; None shares
            the cores out.

    Raises:
        ValueError: the RPC world has other workers, or another number of them.
        OptionError: ``names`` where RPC is not initialised, or ``torch_threads`` where it is.
        PluginError: this process has a group with its own world already.

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
        peers: Sequence[RpcPeer] | None,
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
