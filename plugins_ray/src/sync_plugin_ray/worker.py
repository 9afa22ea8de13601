"""The group's side of a Ray worker: its actor and its pending calls."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import ray
from ray.exceptions import RayActorError

from sync_core import RemoteCallError, WorkerLostError
from sync_plugin_ray.cluster import Cluster
from sync_plugin_ray.host import (
    BESIDE,
    WEIGHTS,
    Failed,
    Host,
    Outcome,
    Returned,
    decode,
    encode,
)

# How often a worker's thread checks for ray.shutdown, in seconds; Ray has no event for it.
_LOOKING = 1.0

# Threads by concurrency group: a call of its sender may be waiting for each receiver.
_GROUPS = {BESIDE: 2, WEIGHTS: 8}
_HOST: Any = ray.remote(concurrency_groups=_GROUPS)(Host)  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    name: str
    future: Future[Any]


class ActorWorker:
    """An actor, and the thread that completes the futures of its calls.

    Ray's own threads only queue results, since users' callbacks may be slow.

    Args:
        cluster: the cluster for the actor.
        worker_id: the worker's id, for the factory and for errors.
        factory_name: the factory's name in messages.
        factory: the pickled call of the factory.
        options: arguments for `ActorClass.options`.
    """

    def __init__(
        self,
        cluster: Cluster,
        worker_id: int,
        factory_name: str,
        factory: bytes,
        options: Mapping[str, Any],
    ) -> None:
        self.worker_id = worker_id
        self.options = options
        self._cluster = cluster
        # Reentrant, since the garbage collector may end a forgotten group on any of its threads.
        self._lock = threading.RLock()
        self._calls: dict[_Call, None] = {}
        self._running: _Call | None = None
        self._lost: str | None = None
        self._ending = False
        self._dead = threading.Event()
        self._events: SimpleQueue[tuple[_Call, Future[Any]] | None] = SimpleQueue()
        self._actor = _HOST.options(**options, max_restarts=0).remote()
        self._begun: Future[None] = self._actor.begin.remote().future()
        dying = self._actor.waits.options(concurrency_group=BESIDE).remote()
        dying.future().add_done_callback(self._on_death)
        self._thread = threading.Thread(
            target=self._deliver, name=f"sync worker {worker_id} actor", daemon=True
        )
        self._thread.start()
        self.ready: Future[None] = self._post(
            factory_name, lambda: self._actor.make.remote(factory, worker_id)
        )

    @property
    def alive(self) -> bool:
        return not self._ending and not self._dead.is_set() and self._cluster.connected

    @property
    def placed(self) -> bool:
        """True if the actor has its resources and has started."""
        return self._begun.done() and self._begun.exception() is None

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        name = name_of(function)
        try:
            message = encode((function, args, kwargs))
        except Exception as error:
            call = _Call(name, Future())
            failure = Failed.because("or its arguments cannot be pickled:", error)
            _settle_outcome(call, self.worker_id, failure)
            return call.future
        return self._post(name, lambda: self._actor.run.remote(message))

    def ask_to_end(self) -> Future[None] | None:
        """Let the call in progress finish, and start no other.

        Returns:
            A future that completes when the worker's object is closed; None if there is nothing to
            wait for.
        """
        self._ending = True
        if self._dead.is_set() or not self._cluster.connected or not self.placed:
            return None
        self._actor.end.options(concurrency_group=BESIDE).remote()
        closed: Future[None] = self._actor.close.remote().future()
        return closed

    def kill(self) -> None:
        """Kill the actor, if it is not dead already."""
        self._ending = True
        if self._cluster.connected:
            ray.kill(self._actor)

    def join(self, deadline: float) -> None:
        """After `kill`, wait until Ray reports the death and every call has ended."""
        if self._cluster.connected:
            self._dead.wait(max(0.0, deadline - time.monotonic()))
        # Called from a callback on this thread, which delivers the rest after it returns.
        if self._thread is threading.current_thread():
            return
        self._events.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._lose("was stopped")

    def _post(self, name: str, submit: Callable[[], Any]) -> Future[Any]:
        call = _Call(name, Future())
        # A submitted call cannot be cancelled, so cancel() must return False.
        call.future.set_running_or_notify_cancel()
        # One lock around both, so that calls are submitted in the order of their futures.
        with self._lock:
            if self._lost is None and self._dead.is_set():
                self._lost = self._epitaph
            lost = self._lost
            if lost is None:
                self._calls[call] = None
                self._submit(call, submit)
        if lost is not None:
            advice = (
                f"so it cannot run {name}; restart({self.worker_id}) of its group replaces it, and "
                "so does a Collector with on_worker_failure='restart'"
            )
            call.future.set_exception(WorkerLostError(self.worker_id, f"{lost}, {advice}"))
        return call.future

    def _submit(self, call: _Call, submit: Callable[[], Any]) -> None:
        try:
            reply = submit().future()
        except Exception as error:
            reply = Future()
            reply.set_exception(error)
        reply.add_done_callback(lambda reply: self._events.put((call, reply)))

    @property
    def _epitaph(self) -> str:
        if not self._cluster.connected:
            return "lost its cluster, as Ray was shut down,"
        return "was stopped" if self._ending else "its actor died"

    def _on_death(self, _: object) -> None:
        self._dead.set()
        self._events.put(None)

    def _deliver(self) -> None:
        while self._expects_more():
            self._deliver_next()
        self._lose(self._epitaph)

    def _expects_more(self) -> bool:
        with self._lock:
            unanswered = bool(self._calls) or not self._dead.is_set()
            return unanswered and self._lost is None and self._cluster.connected

    def _deliver_next(self) -> None:
        try:
            event = self._events.get(timeout=_LOOKING)
        except Empty:
            return
        if event is None:
            return
        call, reply = event
        error = reply.exception()
        with self._lock:
            if call not in self._calls:
                return
            if isinstance(error, RayActorError):
                self._note_running()
            del self._calls[call]
        self._settle(call, reply, error)

    def _settle(
        self, call: _Call, reply: Future[bytes | None], error: BaseException | None
    ) -> None:
        if isinstance(error, RayActorError):
            call.future.set_exception(self._lost_error(call, self._epitaph, error))
        elif error is not None:
            failure = Failed.because("gave no result:", error)
            _settle_outcome(call, self.worker_id, failure)
        elif (answer := reply.result()) is None:
            call.future.set_exception(self._lost_error(call, "was stopped", None))
        else:
            _settle_outcome(call, self.worker_id, decode(answer))

    def _lose(self, reason: str) -> None:
        """Fail all pending and all later calls."""
        with self._lock:
            if self._lost is None:
                self._lost = reason
            self._note_running()
            calls = list(self._calls)
            self._calls.clear()
        for call in calls:
            call.future.set_exception(self._lost_error(call, reason, None))

    def _note_running(self) -> None:
        # A worker that was never placed was not running when it was stopped.
        started = self.placed or not self._ending
        if self._running is None and self._calls and started:
            self._running = next(iter(self._calls))

    def _lost_error(self, call: _Call, reason: str, cause: BaseException | None) -> WorkerLostError:
        moment = "while running" if call is self._running else "before it could run"
        error = WorkerLostError(self.worker_id, f"{reason} {moment} {call.name}")
        error.__cause__ = cause
        return error


def name_of(function: Callable[..., Any]) -> str:
    """Return the function's name for messages."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return getattr(function, "__qualname__", None) or repr(function)


def _settle_outcome(call: _Call, worker_id: int, outcome: Outcome) -> None:
    if isinstance(outcome, Returned):
        call.future.set_result(outcome.value)
        return
    message = f"{call.name} {outcome.verdict}\n{outcome.traceback}".rstrip()
    error = RemoteCallError(worker_id, message)
    if isinstance(outcome.cause, BaseException):
        error.__cause__ = outcome.cause
    call.future.set_exception(error)
