"""Worker group `ray`: each worker is an actor, on any node of the cluster."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, ClassVar, TypeVar

from sync_core import (
    ClosedError,
    RemoteCallError,
    UnknownWorkerError,
    WorkerGroup,
    WorkerTimeoutError,
)
from sync_plugin_ray.cluster import Cluster
from sync_plugin_ray.host import encode
from sync_plugin_ray.resources import check_configs, describe_shortage, usual_options
from sync_plugin_ray.worker import ActorWorker, name_of

Result = TypeVar("Result")

# The longest that stopping waits for the calls in progress.
_ASKING = 5.0
# Time for workers that nobody waits for any more: the group failed to start, or was forgotten.
_SHORT = 2.0


class RayGroup(WorkerGroup):
    """Objects that live in Ray actors of their own.

    The factory, functions, arguments, results and exceptions travel by cloudpickle; what arrives
    is a copy, and can be written to. Arguments are pickled by `call`, so changing them afterwards
    changes nothing. Stopping asks first: the call in progress has half of the timeout (at most
    5 s) to finish; then the actor is killed.

    Calls run in one thread of the actor's process, not its main thread. Ray itself gives torch
    there as many threads as the actor has CPUs, unless ``OMP_NUM_THREADS`` is in ``runtime_env``.

    Ray that runs in this process is used; else a cluster is joined or started, and left by `stop`.

    Args:
        factory: see `WorkerGroup`.
        num_workers: likewise.
        timeout: likewise.
        ray_init_config: arguments for `ray.init`, where Ray is not initialised yet.
        remote_configs: what `ActorClass.options` takes (``num_cpus``, ``num_gpus``, ``memory``,
            ``resources``, ``scheduling_strategy``, ``runtime_env``, …): one mapping for all
            workers, or a list with one for each, of which workers that are added get the last.
            What it leaves open is 1 CPU, 0.2 GPUs and 2 GiB of memory, or an equal share where
            the cluster has less.
        shutdown_ray: shut Ray down in `stop`, even where it was not begun here.

    Raises:
        ValueError: ``remote_configs`` is a list of another length.
        OptionError: ``remote_configs`` has an option that is the group's own matter.

    Example:
        >>> with RayGroup(lambda worker_id: [worker_id], 2) as group:  # doctest: +SKIP
        ...     group.call(1, list.__len__).result()
        1
    """

    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"parallel", "cross_process", "cross_host", "restart", "add"}
    )

    def __init__(
        self,
        factory: Callable[[int], Any],
        num_workers: int,
        *,
        timeout: float = 60.0,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        shutdown_ray: bool = False,
    ) -> None:
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}; give 0 or more")
        self._configs = check_configs(remote_configs, num_workers)
        self._factory = factory
        self._timeout = timeout
        self._shutdown_ray = shutdown_ray
        self._workers: dict[int, ActorWorker] = {}
        self._next_id = num_workers
        self._closed = False
        # `_lock` guards the fields above for an instant; `_changes` lets one change of members
        # finish, which takes seconds, before the next. `call` and `stop` take the first only.
        self._lock = threading.Lock()
        self._changes = threading.Lock()
        self._cluster = Cluster(ray_init_config)
        try:
            usual = usual_options(num_workers)
            self._workers.update(self._start(dict.fromkeys(range(num_workers), usual)))
        except BaseException:
            self._cluster.leave()
            raise
        weakref.finalize(self, _end_forgotten, os.getpid(), self._workers, self._cluster)

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
        with self._changes:
            with self._lock:
                self._check_open()
                worker_id = self._next_id
                self._next_id += 1
            self._admit(self._start({worker_id: usual_options(1)}))
        return worker_id

    def restart(self, worker_id: int) -> None:
        with self._changes:
            worker = self._member(worker_id)
            _end([worker], self._timeout)
            self._admit(self._start({worker.worker_id: worker.options}))

    def remove(self, worker_id: int) -> None:
        with self._changes:
            worker = self._member(worker_id)
            with self._lock:
                del self._workers[worker_id]
            _end([worker], self._timeout)

    def stop(self, timeout: float | None = None) -> None:
        with self._lock:
            self._closed = True
            workers = tuple(self._workers.values())
        _end(workers, self._timeout if timeout is None else timeout)
        self._cluster.leave(shutdown=self._shutdown_ray)

    def _start(self, usual: Mapping[int, Mapping[str, Any]]) -> dict[int, ActorWorker]:
        """Start workers and wait until all have made their object; all of them or none.

        Args:
            usual: for each worker's id, the options where the user's leave them open.
        """
        deadline = time.monotonic() + self._timeout
        name = name_of(self._factory)
        started: dict[int, ActorWorker] = {}
        try:
            factory = self._encode_factory(next(iter(usual), 0))
            for worker_id, options in usual.items():
                config = {**options, **self._config(worker_id)}
                started[worker_id] = ActorWorker(self._cluster, worker_id, name, factory, config)
            waits = {worker.ready: worker for worker in started.values()}
            done, late = wait(waits, deadline - time.monotonic(), return_when=FIRST_EXCEPTION)
            for ready in done:
                ready.result()
            for worker in sorted((waits[ready] for ready in late), key=lambda w: w.worker_id):
                raise self._too_late(worker)
        except BaseException:
            _end(started.values(), min(self._timeout, _SHORT))
            raise
        return started

    def _encode_factory(self, worker_id: int) -> bytes:
        try:
            return encode((self._factory, (), {}))
        except Exception as error:
            name = name_of(self._factory)
            message = f"was not started, its factory {name} cannot be pickled: {error}"
            raise RemoteCallError(worker_id, message) from error

    def _config(self, worker_id: int) -> Mapping[str, Any]:
        return self._configs[min(worker_id, len(self._configs) - 1)] if self._configs else {}

    def _too_late(self, worker: ActorWorker) -> WorkerTimeoutError:
        late = f"did not start within {self._timeout:g} s"
        if worker.placed or not self._cluster.connected:
            return WorkerTimeoutError(worker.worker_id, f"{late}; give the group a longer timeout")
        return WorkerTimeoutError(worker.worker_id, f"{late}: {describe_shortage(worker.options)}")

    def _admit(self, started: dict[int, ActorWorker]) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._workers.update(started)
        if closed:
            _end(started.values(), self._timeout)
            self._check_open()

    def _member(self, worker_id: int) -> ActorWorker:
        with self._lock:
            self._check_open()
            return self._find(worker_id)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this worker group was stopped; make a new one")
        self._cluster.check()

    def _find(self, worker_id: int) -> ActorWorker:
        # True and False would pass for the workers 1 and 0.
        if isinstance(worker_id, bool) or worker_id not in self._workers:
            ids = ", ".join(map(str, sorted(self._workers))) or "none"
            raise UnknownWorkerError(f"no worker {worker_id!r} in this group; there are: {ids}")
        return self._workers[worker_id]


def _end(workers: Collection[ActorWorker], timeout: float) -> None:
    """End the workers, ended ones included, within ``timeout`` seconds."""
    begin = time.monotonic()
    asked = [worker.ask_to_end() for worker in workers]
    wait([idle for idle in asked if idle is not None], min(timeout / 2, _ASKING))
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(begin + timeout)


def _end_forgotten(owner: int, workers: dict[int, ActorWorker], cluster: Cluster) -> None:
    # A fork of the owner has the group in its memory; the workers are not its to end.
    if os.getpid() != owner:
        return
    _end(workers.values(), _SHORT)
    cluster.leave()
