"""The worker group `rpc`: each worker is a member of a `torch.distributed.rpc` world."""

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
from sync_plugin_dist import rpc_host
from sync_plugin_dist.rpc_host import Message, pack, unpack
from sync_plugin_dist.rpc_world import choose_workers, initialised
from sync_plugin_std.workers import CallOutcome, LaunchedGroup, Launcher, RemoteCall, pickle_factory

# How often an idle worker is pinged, in seconds: torch RPC notices the end of a connection only
# while a call waits for its answer.
_PING_INTERVAL = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    call: RemoteCall
    function: Callable[..., Any]
    args: tuple[Any, ...]


class RpcWorker:
    """A hosted object, and the thread that sends its calls and completes their futures.

    Each call is sent after the answer to the one before, so calls that have not started when the
    worker is stopped never start. RPC's own threads only queue results, since users' callbacks may
    be slow.

    Args:
        name: the RPC name of the process that hosts the object.
        worker_id: the worker's id, for the factory and for errors.
        key: the key of the object in that process.
        factory: makes the object.
        pickled_factory: the pickled factory, as it is sent.
    """

    def __init__(
        self,
        name: str,
        worker_id: int,
        key: str,
        factory: Callable[[int], Any],
        pickled_factory: Message,
    ) -> None:
        self.name = name
        self.worker_id = worker_id
        self._key = f"{key}/{worker_id}"
        # Reentrant, since the garbage collector may end a forgotten group on any of its threads.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[_Request] = deque()
        self._lost: str | None = None
        self._ending = False
        # Answers to the call in progress; None ends the wait for it.
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
        return not self._ending and self._lost is None

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        call = RemoteCall(self.worker_id, function)
        parts = call.pickle(args, kwargs)
        if parts is not None:
            self._post(_Request(call, rpc_host.run, (self._key, pack(parts))))
        return call.future

    def ask_to_end(self) -> None:
        """Let the call in progress finish, and start no other."""
        with self._lock:
            self._ending = True
            self._changed.notify_all()

    def give_up(self) -> None:
        """After `ask_to_end`, stop waiting for the call in progress."""
        self._answers.put(None)

    def join(self, deadline: float) -> bool:
        """After `ask_to_end`, return whether all calls have ended before the deadline."""
        # Called from a callback on this thread, which ends the rest after it returns.
        if self._thread is threading.current_thread():
            return True
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def forget(self, timeout: float) -> Future[Any] | None:
        """After `ask_to_end`, make the process drop the object.

        Returns:
            A future that completes when the object is dropped or out of reach; None if it is
            already.
        """
        if self._lost is not None or not initialised():
            return None
        done: Future[Any] = Future()
        try:
            reply = rpc.rpc_async(
                self.name, rpc_host.forget, args=(self._key,), timeout=max(0.1, timeout)
            )
        except RuntimeError:
            # The process has no object to drop.
            return None
        reply.add_done_callback(done.set_result)
        # Ask only once.
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
            # Free it before the wait for the next.
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
        answer = self._ask(request.function, request.args)
        if isinstance(answer, list):
            call.finish(CallOutcome.unpickle(unpack(answer)))
        elif answer is not None and self._look():
            call.finish(CallOutcome.failure("gave no result:", answer))
        else:
            call.lose(f"{self._lost or 'was stopped'} while running {call.name}", answer)

    def _look(self) -> bool:
        """Return whether the worker can be reached; if not, and it was not stopped, it is lost."""
        answer = self._ask(rpc_host.ping, ())
        if isinstance(answer, BaseException):
            self._lose()
        return isinstance(answer, list)

    def _ask(
        self, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> Message | Exception | None:
        """Run a function in the worker, without a deadline.

        Returns:
            The answer, which is empty without a result, or the error from RPC; None if the group
            has stopped waiting.
        """
        try:
            reply = rpc.rpc_async(self.name, function, args=args, timeout=0)
            reply.add_done_callback(self._answers.put)
            answer = self._answers.get()
            return None if answer is None else answer.value() or []
        except Exception as error:
            return error

    def _lose(self) -> None:
        reason = f"RPC has lost {self.name!r}"
        if not initialised():
            reason = "RPC was shut down in this process"
        with self._lock:
            self._lost = "was stopped" if self._ending else reason


def _refuse(call: RemoteCall, reason: str) -> None:
    call.lose(f"{reason}, so it cannot run {call.name}; make a new group")


# How long `stop` waits at most for calls in progress and for dropped objects, in seconds.
_ASKING = 5.0


class RpcGroup(LaunchedGroup[RpcWorker]):
    """Hosts objects in the processes of a torch RPC world, each object in its own thread.

    This process and the workers' processes must have called `torch.distributed.rpc.init_rpc`. The
    workers are the other members of that world, in the order of their ids, and need this package
    installed. `stop` only makes them drop their objects; call it before RPC is shut down. If a
    worker's machine vanishes without closing its connections, torch RPC does not notice it, and
    neither does this group.

    Workers cannot be added or restarted: the members of a torch RPC world with a given size are
    fixed at its start, and no process can join a world without a fixed size after a member has
    died.

    The factory, functions, arguments, results and exceptions are sent with cloudpickle, and tensors
    among them are copied. `call` pickles arguments at once, so later changes to them have no
    effect.

    Args:
        factory: see `WorkerGroup`.
        num_workers: see `WorkerGroup`.
        timeout: see `WorkerGroup`.
        names: the workers' names, if not all other members are workers.

    Raises:
        OptionError: RPC is not initialised in this process.
        ValueError: the names or the number of workers do not match the RPC world.

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
    ) -> None:
        num_workers = check_count(num_workers, "num_workers", least=0)
        chosen = choose_workers(num_workers, names) if num_workers else []
        super().__init__(RpcLauncher(factory, chosen), num_workers, timeout=timeout)

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


class RpcLauncher(Launcher[RpcWorker]):
    """Makes members of a torch RPC world host objects, and drop them at the end.

    Args:
        factory: makes the objects.
        names: the members.
    """

    def __init__(self, factory: Callable[[int], Any], names: Sequence[str]) -> None:
        self._factory, self._pickled = factory, pack(pickle_factory(factory, 0))
        self._names = names

    def launch(self, worker_ids: Sequence[int]) -> Iterator[RpcWorker]:
        key = uuid4().hex
        for worker_id, name in zip(worker_ids, self._names, strict=True):
            yield RpcWorker(name, worker_id, key, self._factory, self._pickled)

    def end(self, workers: Collection[RpcWorker], timeout: float) -> None:
        left = timeout - _end_calls(workers, timeout)
        asked = [worker.forget(min(left, _ASKING)) for worker in workers]
        wait([done for done in asked if done is not None], min(left, _ASKING))


def _end_calls(workers: Collection[RpcWorker], timeout: float) -> float:
    """Give calls in progress half of the timeout to finish, and start no other.

    Returns:
        The elapsed time in seconds.
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
