"""The object that each worker of a collector hosts."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from sync_collector.envs.protocol import closed_on_error
from sync_collector.rollout import BatchRequest, Rollout, seed_process
from sync_collector.worker_models import WorkerModels
from sync_collector.worker_spec import WorkerSpec, detached_copy
from sync_core import Address


class CollectorWorker:
    """A rollout and its models, once they are made; every method is called from the driver."""

    def __init__(self) -> None:
        self._rollout: Rollout | None = None
        self._models = WorkerModels(SimpleNamespace())
        self._shares_policy = self._owns_process = False
        # Held by every call that uses the models.
        self._at_work = threading.RLock()
        # Whether something has arrived, in a thread of the scheme's, that is not committed yet.
        self._has_arrived = False
        # Whether what calls return is pickled while a version may be committed beside them.
        self._copies = False

    def build(self, spec: WorkerSpec) -> int:
        """Make environment and policy; the number of frames of a batch of theirs."""
        self._shares_policy = spec.share_policy
        self._owns_process = spec.options.owns_process
        if self._owns_process:
            # Every fresh process has torch's one default seed: workers would act all alike.
            seed_process(spec.seed)
            if spec.one_thread:
                # One step is too little work to share out, and threads that wait for each other
                # hold cores that the trainer and other workers need.
                torch.set_num_threads(1)
        env = spec.make_env()
        with closed_on_error([env]):
            policy, models = spec.make_models()
            parts = SimpleNamespace(env=env, policy=policy, **models)
            self._models = WorkerModels(parts, rests=spec.options.parallel)
            self._rollout = Rollout(
                env, policy, spec.seat, spec.options, self._models.between_steps
            )
        return self._rollout.frames_per_batch()

    def connect(self, name: str, address: Address, single: bool) -> bool:
        """Get a model's weights from a sender from now on; see `WorkerModels.connect`.

        Returns:
            Whether the worker commits what comes while it rests.
        """
        with self._in_use():
            receiver = self._models.connect(name, address, single=single)
            attentive = single and receiver.on_arrival(self._arrived)
            self._copies = attentive and self._owns_process
            return attentive

    def collect(self, request: BatchRequest) -> TensorDictBase | None:
        """The next batch; None without the weights that the request names."""
        with self._in_use():
            if not self._models.has(request.versions, request.patience):
                return None
            self._models.look()
            return self._built.collect(request)

    def reach(self, versions: Mapping[str, int], timeout: float) -> bool:
        """Commit versions that were sent; see `WorkerModels.reach`."""
        with self._in_use():
            return self._models.reach(versions, timeout)

    def begin_with(self, weights: Mapping[str, Mapping[str, Tensor]], version: int) -> None:
        """Act with these weights of some models, and have this version of the policy."""
        with self._in_use():
            self._models.write(weights)
            self._models.set_version(version)

    def set_version(self, version: int) -> None:
        """Have this version of the policy, which came another way."""
        self._models.set_version(max(version, self._models.version))

    def execute(self, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what is at a path, or the result of calling it; see `WorkerModels.execute`."""
        with self._in_use():
            found = self._models.execute(path, args, kwargs)
            return detached_copy(found) if self._copies else found

    def set_seed(self, seed: int, static_seed: bool) -> int:
        """Seed the environment, and begin again; the seed for the next worker."""
        return self._built.set_seed(seed, static_seed)

    def midway(self, number: int) -> bool:
        """Return whether the batch that will be asked for with this number was cut short."""
        return self._built.midway(number)

    def read_model(self, name: str) -> Mapping[str, Tensor]:
        """Return a copy of the weights of one model; see `WorkerModels.read`."""
        with self._in_use():
            return self._models.read(name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the worker's next batch; see `Rollout.state_dict`."""
        with self._in_use():
            if self._shares_policy:
                # It has the trainer's weights whether their version was looked at or not.
                self._models.look()
            models = {} if self._shares_policy else self._models.read_all()
            return {
                **self._built.state_dict(),
                "models": models,
                "version": self._models.version,
            }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise `LayoutMismatchError` unless the weights in a state fit those of the worker."""
        if not self._shares_policy:
            self._models.check(state["models"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of this worker, or of another one alike."""
        with self._in_use():
            if not self._shares_policy:
                self._models.write(state["models"])
            self._models.set_version(state["version"])
            self._built.load_state_dict(state)

    def start_over(self, seat: int, before: int, version: int) -> None:
        """Begin new episodes, with the weights that the worker has.

        Args:
            seat: see `Rollout.start_over`.
            before: the newest version until now.
            version: the number that it has from now on.
        """
        if self._models.version == before:
            self._models.set_version(version)
        self._built.start_over(seat)

    def close(self) -> None:
        """Close the receivers and the environment; the worker group calls it at the end."""
        with closing(self._models):
            if self._rollout is not None:
                self._rollout.close()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """For ``with``: no other thread commits; what arrives meanwhile is committed after it."""
        try:
            with self._at_work:
                yield
        finally:
            self._commit_arrived()

    def _arrived(self) -> None:
        """Commit what has arrived; a worker in a batch does so on its own, after its step."""
        self._has_arrived = True
        self._models.look_soon()
        self._commit_arrived()

    def _commit_arrived(self) -> None:
        # If another thread has the lock, it comes here when it releases that.
        while self._has_arrived and self._at_work.acquire(blocking=False):
            try:
                self._has_arrived = False
                self._models.commit()
            finally:
                self._at_work.release()

    @property
    def _built(self) -> Rollout:
        if self._rollout is None:
            raise RuntimeError("this worker has no environment: it could not be built")
        return self._rollout


def new_worker(worker_id: int) -> CollectorWorker:
    """The factory for a worker group: small, so that starting a worker sends nothing big."""
    del worker_id
    return CollectorWorker()
