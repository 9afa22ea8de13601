"""The worker group `ray`: each worker is a Ray actor on any node of the cluster."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any, ClassVar

import ray

from sync_core import OptionError, RemoteCallError
from sync_core.checks import check_count, check_mapping
from sync_plugin_ray.cluster import Cluster
from sync_plugin_ray.host import encode
from sync_plugin_ray.worker import ActorWorker, name_of
from sync_plugin_std.workers import LaunchedGroup, Launcher

_USUAL = {"num_cpus": 1.0, "num_gpus": 0.2, "memory": 2.0 * 1024**3}
_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}

# With these, a worker could run two calls at once, restart without its object, or never end.
_FIXED = ("max_concurrency", "max_restarts", "max_task_retries", "lifetime")


def usual_options(num_workers: int) -> dict[str, Any]:
    """Return default options with which all workers can start at once.

    Each worker requests 1 CPU, 0.2 GPUs and 2 GiB of memory, or an equal share if the cluster has
    less: of a machine, with equally many workers on each, and of the free resources.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    # Only machines with a GPU, if any, so that all workers are alike.
    hosts = next(filter(None, ([n for n in nodes if n.get(kind)] for kind in ("GPU", "CPU"))), [])
    free = ray.available_resources()
    per_host = math.ceil(num_workers / max(1, len(hosts)))
    options: dict[str, Any] = {}
    for option, usual in _USUAL.items():
        name = _NAMES[option]
        share = min((host.get(name, 0.0) for host in hosts), default=0.0) / max(1, per_host)
        demand = min(usual, share, free.get(name, 0.0) / max(1, num_workers))
        # Ray counts memory in bytes and other resources in ten-thousandths.
        options[option] = int(demand) if option == "memory" else int(demand * 10_000) / 10_000
    return options


def check_configs(
    remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, num_workers: int
) -> tuple[Mapping[str, Any], ...]:
    """Return the user's options for each worker; empty to use `usual_options`.

    Raises:
        TypeError: this is neither a mapping nor a list of mappings.
        ValueError: the list has the wrong length.
        OptionError: an option may be set only by the group itself.
    """
    example = "{'num_cpus': 1}"
    if isinstance(remote_configs, str) or not isinstance(remote_configs, Mapping | Sequence | None):
        raise TypeError(
            f"remote_configs must be a mapping such as {example} or a list of them, got "
            f"{remote_configs!r}"
        )
    if remote_configs is None or isinstance(remote_configs, Mapping):
        configs = (remote_configs or {},) * max(1, num_workers)
    else:
        configs = tuple(remote_configs)
        if len(configs) != num_workers:
            raise ValueError(
                f"remote_configs has {len(configs)} entries for {num_workers} workers; "
                "give one for each, or a single mapping for all"
            )
        for config in configs:
            check_mapping(config, "an entry of remote_configs", example)
    for name in _FIXED:
        if any(name in config for config in configs):
            raise OptionError(
                f"remote_configs has {name!r}, which the worker group decides itself; leave it "
                "out (a lost worker is replaced by restart(worker_id))"
            )
    return configs


def describe_shortage(options: Mapping[str, Any]) -> str:
    """Return a phrase for messages about a worker that the cluster cannot place."""
    demand = {
        name: amount
        for name, amount in options.items()
        if name in {*_NAMES, "resources", "accelerator_type", "scheduling_strategy"}
    }
    total, free = _brief(ray.cluster_resources()), _brief(ray.available_resources())
    return (
        f"it demands {demand}, and the cluster has {total}, of which free: {free}; "
        "give remote_configs={'num_cpus': …} that demands less"
    )


def _brief(resources: Mapping[str, float]) -> dict[str, float]:
    # Ray lists each node as a resource too, such as node:192.0.2.1.
    return {name: amount for name, amount in resources.items() if not name.startswith("node:")}


# The longest time that `stop` waits for calls in progress, in seconds.
_ASKING = 5.0


class RayGroup(LaunchedGroup[ActorWorker]):
    """Hosts each object in its own Ray actor.

    The factory, functions, arguments, results and exceptions are sent with cloudpickle and arrive
    as writable copies. `call` pickles arguments at once, so later changes to them have no effect.
    `stop` gives calls in progress half of the timeout (at most 5 s) to finish, and then kills the
    actors.

    Calls run in one thread of the actor's process, which is not the main thread. Ray gives torch as
    many threads as the actor has CPUs, unless ``runtime_env`` sets ``OMP_NUM_THREADS``.

    If Ray is not initialised, the group joins or starts a cluster, and `stop` leaves it.

    Args:
        factory: see `WorkerGroup`.
        num_workers: see `WorkerGroup`.
        timeout: see `WorkerGroup`.
        ray_init_config: arguments for `ray.init`, if Ray is not initialised yet.
        remote_configs: arguments for `ActorClass.options` (``num_cpus``, ``num_gpus``, ``memory``,
            ``resources``, ``scheduling_strategy``, ``runtime_env``, …): one mapping for all
            workers, or a list with one mapping per worker, whose last is for added workers. The
            defaults are 1 CPU, 0.2 GPUs and 2 GiB of memory, or an equal share if the cluster has
            less.
        shutdown_ray: shut Ray down in `stop`, even if the user initialised it.

    Raises:
        ValueError: ``remote_configs`` is a list of the wrong length.
        OptionError: ``remote_configs`` has an option that only the group may set.

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
        num_workers = check_count(num_workers, "num_workers", least=0)
        configs = check_configs(remote_configs, num_workers)
        self._cluster = Cluster(ray_init_config)
        self._shutdown_ray = shutdown_ray
        launcher = self._actor_launcher = _ActorLauncher(self._cluster, factory, configs)
        super().__init__(launcher, num_workers, timeout=timeout)

    def add(self, *, remote_configs: Mapping[str, Any] | None = None) -> int:
        """Start one more worker; see `WorkerGroup.add`.

        Args:
            remote_configs: options of its actor; None for those of the group's last original
                worker.
        """
        if remote_configs is None:
            return super().add()
        (config,) = check_configs(remote_configs, 1)
        return self.add_prepared(partial(self._actor_launcher.configure, config))

    def stop(self, timeout: float | None = None) -> None:
        super().stop(timeout)
        if self._shutdown_ray:
            self._cluster.shut_down()


class _ActorLauncher(Launcher[ActorWorker]):
    def __init__(
        self,
        cluster: Cluster,
        factory: Callable[[int], Any],
        configs: Sequence[Mapping[str, Any]],
    ) -> None:
        self._cluster = cluster
        self._factory = factory
        self._configs = configs
        self._added: dict[int, Mapping[str, Any]] = {}
        # By worker id: a restarted worker gets its old options.
        self._actors: weakref.WeakValueDictionary[int, ActorWorker] = weakref.WeakValueDictionary()

    def launch(self, worker_ids: Sequence[int]) -> Iterator[ActorWorker]:
        name, factory = name_of(self._factory), self._encode_factory(next(iter(worker_ids), 0))
        options = {i: actor.options for i in worker_ids if (actor := self._actors.get(i))}
        usual = usual_options(len(worker_ids)) if len(options) < len(worker_ids) else {}
        for worker_id in worker_ids:
            chosen = options.get(worker_id) or {**usual, **self._config(worker_id)}
            actor = ActorWorker(self._cluster, worker_id, name, factory, chosen)
            self._actors[worker_id] = actor
            yield actor

    def end(self, workers: Collection[ActorWorker], timeout: float) -> None:
        begin = time.monotonic()
        asked = [worker.ask_to_end() for worker in workers]
        wait([closed for closed in asked if closed is not None], min(timeout / 2, _ASKING))
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join(begin + timeout)

    def close(self, workers: Collection[ActorWorker], timeout: float) -> None:
        self.end(workers, timeout)
        self._cluster.leave()

    def check(self) -> None:
        self._cluster.check()

    def explain_delay(self, worker: ActorWorker) -> str:
        if worker.placed or not self._cluster.connected:
            return super().explain_delay(worker)
        return f": {describe_shortage(worker.options)}"

    def _encode_factory(self, worker_id: int) -> bytes:
        try:
            return encode((self._factory, (), {}))
        except Exception as error:
            name = name_of(self._factory)
            message = f"was not started, its factory {name} cannot be pickled: {error}"
            raise RemoteCallError(worker_id, message) from error

    def configure(self, config: Mapping[str, Any], worker_id: int) -> None:
        """Set the options with which a worker is launched."""
        self._added[worker_id] = config

    def _config(self, worker_id: int) -> Mapping[str, Any]:
        if worker_id in self._added:
            return self._added[worker_id]
        return self._configs[min(worker_id, len(self._configs) - 1)] if self._configs else {}
