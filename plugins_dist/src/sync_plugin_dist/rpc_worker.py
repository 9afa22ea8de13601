"""One worker of an RPC group, as its group sees it: its calls, sent one after the other."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from torch.distributed import rpc

from sync_core.workers import CallOutcome, RemoteCall
from sync_plugin_dist import rpc_host
from sync_plugin_dist.rpc_join import initialised
from sync_plugin_dist.rpc_message import Message, pack, unpack
from sync_plugin_dist.rpc_peer import Peer

# How often a worker with nothing to do is asked whether it can be reached: torch RPC notices the
# end of a connection only where somebody waits for an answer.
_ASKING = 1.0


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
        peer: Peer,
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
            self._changed.wait_for(lambda: self._waiting or self._ending, _ASKING)
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
        """Whether the worker can be reached. It is lost otherwise, unless it was stopped."""
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
