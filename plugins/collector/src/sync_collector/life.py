"""The workers of a collector: how they come, are seeded and go, and how it ends itself."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

from sync_collector.background import BackgroundCollection
from sync_collector.delivery import BatchDelivery
from sync_collector.models_elsewhere import ModelsElsewhere
from sync_collector.multi_model import MultiModelWeights
from sync_collector.options import check_acts, count_workers, factories, per_worker
from sync_collector.policy_module import module_of
from sync_collector.policy_weights import MOMENT, PolicyWeights
from sync_collector.relay import Relay
from sync_collector.replacement import Replacement
from sync_collector.requests import Requests
from sync_collector.schemes import POLICY
from sync_collector.state import State
from sync_collector.warmup import Warmup
from sync_collector.worker_options import WorkerOptions, changed_options
from sync_collector.worker_pool import WorkerPool
from sync_collector.worker_spec import WorkerSpecs
from sync_core import ClosedError, Layout, ModelError, OptionError
from sync_core.checks import check_count, check_integer, check_seconds
from sync_core.models import check_match, named_tensors
from sync_core.workers import normalize

Result = TypeVar("Result")


class Life:
    """The part of `Collector` about its workers; not for use alone."""

    _timeout: float
    _pool: WorkerPool
    _specs: WorkerSpecs
    _replacement: Replacement
    _requests: Requests
    _weights: PolicyWeights | MultiModelWeights
    _elsewhere: ModelsElsewhere
    _delivery: BatchDelivery
    _warmup: Warmup
    _background: BackgroundCollection
    _relay: Relay
    _close: weakref.finalize[Any, Any]

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The ids of the workers."""
        return self._pool.ids

    def add_workers(
        self,
        num_workers: int | None = None,
        create_env_fn: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
    ) -> tuple[int, ...]:
        """Start more workers, which act with the newest weights from their first frame on.

        With ``sync=True``, batches have one more row for each of them from the next one on.

        Args:
            num_workers: how many; None for as many as there are functions, or 1.
            create_env_fn: makes an environment; or a list, one for each new worker. None for the
                functions that the collector was made with, from the first on.

        Returns:
            Their ids, never used before.

        Raises:
            RemoteCallError: an environment or a policy could not be made; workers added before
                that one stay.
            ClosedError: the collector was shut down, or has delivered all its frames.

        Example:
            >>> from sync_collector import Collector
            >>> from sync_collector.envs import CountingEnv
            >>> with Collector(CountingEnv, scheme="none", frames_per_batch=4, sync=True) as c:
            ...     c.add_workers(2), next(c).batch_size
            ((1, 2), torch.Size([3, 4]))
        """
        self._check_working()
        num_workers = count_workers(num_workers, create_env_fn)
        if create_env_fn is None:
            return tuple(self._pool.add() for _ in range(num_workers))
        env_fns = factories(create_env_fn, num_workers, "create_env_fn")
        return tuple(self._pool.add(env_fn=env_fn) for env_fn in env_fns)

    def add_collectors(
        self,
        create_env_fn: Callable[[], Any] | Sequence[Callable[[], Any]],
        num_envs: int = 1,
        policy: Any = None,
        collector_kwargs: WorkerOptions | Sequence[WorkerOptions] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[int, ...]:
        """Start a worker for each function, as `add_workers` does; the name is that of TorchRL.

        Args:
            create_env_fn: makes an environment; or a list, one for each new worker.
            num_envs: the number of environments that each new worker makes and steps together.
            policy: what the new workers act with, in place of a copy of the collector's policy. It
                gets the weights that the other workers get, so that names, shapes and dtypes of
                its own must be the same.
            collector_kwargs: how the new workers make batches, as in `Collector`: a mapping, or a
                list with one for each. Options that are left out are as with the first worker.
            remote_configs: options of the new workers' actors, with ``workers="ray"``: a mapping,
                or a list with one for each.

        Returns:
            The ids of the new workers.

        Raises:
            LayoutMismatchError: the policy's weights are others than those of the collector's.
            RemoteCallError: as for `add_workers`; workers added before that one stay.
            ModelError: one of the given and the collector's policy has weights, the other none.
            OptionError: the worker group has no ``remote_configs``, or the workers act with the
                trainer's own policy.
            TypeError: something that cannot differ between workers.
            ValueError: a list of another length.
        """
        self._check_working()
        num_envs = check_count(num_envs, "num_envs")
        num_workers = count_workers(None, create_env_fn)
        env_fns = factories(create_env_fn, num_workers, "create_env_fn")
        configs = per_worker(remote_configs, num_workers, "remote_configs")
        given = per_worker(collector_kwargs, num_workers, "collector_kwargs")
        options = [
            changed_options(self._specs.options[0], {} if each is None else each) for each in given
        ]
        changes: dict[str, Any] = {"num_envs": num_envs}
        if policy is not None:
            self._check_policy(policy)
            changes |= {"policy": policy, "policy_fn": None}
        return tuple(
            self._pool.add(
                {} if config is None else {"remote_configs": config},
                env_fn=env_fn,
                options=option,
                **changes,
            )
            for env_fn, option, config in zip(env_fns, options, configs, strict=True)
        )

    def _check_policy(self, policy: Any) -> None:
        """Raise unless a new worker may begin with this policy."""
        check_acts(policy, "policy is")
        if self._specs.share_policy:
            raise OptionError(
                "workers act with the trainer's own policy, so new ones have no other; leave out "
                "policy=, or use scheme='thread'"
            )
        module = module_of(policy)
        if POLICY not in self._weights.names:
            return
        own = self._weights.models.get(POLICY)
        held = self._relay.read_model(POLICY) if own is None else named_tensors(own, "tensordict")
        given = {} if module is None else named_tensors(module, "tensordict")
        if bool(held) != bool(given):
            raise ModelError(
                "the given policy has no weights, but the collector's policy has; give policy= a "
                "module with the same weights, or leave it out"
                if held
                else "the given policy has weights, but the collector's policy has no weights, so "
                "they would never be updated; give policy= a function, or leave it out"
            )
        if held:
            check_match(Layout.of(held), Layout.of(given))

    def remove_workers(self, worker_ids: int | Iterable[int]) -> None:
        """End some workers; batches that were not taken yet are lost, uncounted.

        Raises:
            ValueError: no worker would be left; nothing was done.
            UnknownWorkerError: no such worker; nothing was done.
        """
        self._check_working()
        ids = normalize(worker_ids, self._pool.ids)
        if set(ids) == set(self._pool.ids):
            raise ValueError("no worker would be left; to end the collector, type shutdown()")
        for worker_id in ids:
            self._pool.remove(worker_id)
            self._requests.drop(worker_id)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the workers' environments, one after the other, and begin their episodes again.

        Each worker gets the seed that the one before it returned. Batches made before and
        was not taken yet is dropped: no frame that comes is older than the seed. With the same
        seed and the same weights, each worker makes the same batches. Workers with a process of
        their own seed its whole random state. Others share this process's: seed that yourself
        (``torch.manual_seed``) for a policy that draws from it. Several threads draw in no settled
        order; one does not, nor do workers that are ``"process"`` or ``"inline"``.

        Args:
            seed: for the first worker.
            static_seed: give all of them the same.

        Returns:
            The seed that the last worker returned.

        Raises:
            WorkerTimeoutError: a worker was not ready in time.
        """
        seed = check_integer(seed, "seed", "give one such as 0")
        return self._at_rest(lambda: self._state.seed(seed, static_seed))

    def state_dict(self) -> dict[str, Any]:
        """Return the state to continue from exactly, as something that pickles (``torch.save``).

        That is what was counted, and of each worker the weights, the environment, the trajectory,
        the random state of its own process, and a batch that was not taken yet:
        workers finish their batches first. Environments without ``save_state`` (see
        `sync_collector.envs.Env`) will begin new episodes, of which a warning tells now. The random
        state of this process and the trainer's own policy are the caller's to save. After the last
        batch there are counts only.

        Raises:
            WorkerTimeoutError: a worker was not ready in time.
        """
        return self._at_rest(self._state.save, whole_batches=True)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, here or in another process.

        Batches that were made before and not taken yet are dropped. They act with the
        weights that they had, until the next update.

        Args:
            state_dict: the state, of a collector with as many workers, whose batches have as many
                frames.

        Raises:
            ValueError: it is that of another kind of collector; nothing was done.
        """
        self._check_working()
        self._at_rest(lambda: self._state.load(state_dict))

    def shutdown(self, timeout: float | None = None) -> None:
        """End the workers; batches under way are lost. Doing so again does nothing.

        Args:
            timeout: seconds for the workers to end by themselves; None for the collector's.
        """
        seconds = self._timeout if timeout is None else check_seconds(timeout)
        self._background.abandon()
        self._relay.close()
        if self._close.detach() is not None:
            end(self._pool, self._weights, self._elsewhere, seconds)
        self._background.end(seconds)

    async def async_shutdown(self) -> None:
        """`shutdown`, while other tasks of the event loop continue."""
        await asyncio.to_thread(self.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def __len__(self) -> int:
        """Return how many batches there are in all, those delivered included.

        Raises:
            TypeError: the number is unknown: there is no end, or batches differ in size.
        """
        return self._delivery.count_batches()

    def __bool__(self) -> bool:
        return True

    def _check_open(self) -> None:
        self._background.check()
        if not self._close.alive:
            raise ClosedError("the collector was shut down; make a new one")

    def _check_working(self) -> None:
        self._check_open()
        if self._pool.dismissed:
            raise ClosedError(
                "the collector has delivered all its frames and ended its workers; make a new one "
                "with more total_frames"
            )

    @property
    def _state(self) -> State:
        return State(
            self._pool, self._requests, self._delivery, self._weights, self._warmup, self._timeout
        )

    def _at_rest(self, function: Callable[[], Result], *, whole_batches: bool = False) -> Result:
        """Do something while every worker lives, none is at work, and none comes or goes.

        Args:
            function: what to do; again, if a worker has died in it and was replaced.
            whole_batches: let none be in the middle of a batch either, after Ctrl-C.
        """

        def do() -> Result:
            with self._pool.lock:
                if whole_batches:
                    self._state.finish_batches()
                with self._requests.settled():
                    # A version that was sent and not committed belongs to the workers' weights.
                    self._weights.let_end(self._timeout)
                    return function()

        self._check_open()
        with self._background.paused(self._timeout):
            self._replacement.replace_dead()
            return self._replacement.repeat(do)


def end(
    pool: WorkerPool,
    weights: PolicyWeights | MultiModelWeights,
    held: ModelsElsewhere,
    timeout: float | None = None,
) -> None:
    """End workers and senders, come what may."""
    try:
        # A refresh may have been sent just now; its workers have it in a moment.
        weights.let_end(MOMENT if timeout is None else min(MOMENT, timeout))
        pool.stop(timeout)
    except BaseException:
        # Such as a second Ctrl-C: end without waiting, and leave nothing behind.
        pool.stop(0.0)
        raise
    finally:
        weights.close()
        held.close()
