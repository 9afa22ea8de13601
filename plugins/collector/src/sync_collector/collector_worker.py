"""The object that each worker of a collector hosts."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from sync_collector.batch_request import BatchRequest
from sync_collector.detached_copy import detached_copy
from sync_collector.envs.protocol import closed_on_error
from sync_collector.random_state import seed_process
from sync_collector.rollout import Rollout
from sync_collector.schemes import POLICY
from sync_collector.worker_models import (
    ModelReceivers,
    check_models,
    execute,
    read_model,
    read_models,
    write_models,
)
from sync_collector.worker_spec import WorkerSpec
from sync_core import Address, Receiver


class CollectorWorker:
    """A rollout, once it is built; every method is called from the driver, by its worker group."""

    def __init__(self) -> None:
        self._rollout: Rollout | None = None
        self._parts = SimpleNamespace()
        self._model_receivers = ModelReceivers(self._parts)
        self._shares_policy = self._owns_process = False
        # Held by every call that uses the policy.
        self._at_work = threading.RLock()
        # Whether what calls return is pickled while a version may be committed beside them.
        self._copies = False

    def build(self, spec: WorkerSpec) -> int:
        """Make environment and policy.

        Returns:
            How many frames a batch of theirs has.
        """
        if spec.options.owns_process:
            # Every fresh process has torch's one default seed: workers would act all alike.
            seed_process(spec.seed)
            if spec.one_thread:
                # One step is too little work to share out, and threads that wait for each other
                # hold cores that the trainer and other workers need.
                torch.set_num_threads(1)
        env = spec.make_env()
        self._shares_policy = spec.share_policy
        self._owns_process = spec.options.owns_process
        with closed_on_error([env]):
            policy, models = spec.make_models()
            self._rollout = Rollout(env, policy, spec.seat, spec.options)
        self._parts = SimpleNamespace(env=env, policy=policy, **models)
        self._model_receivers = ModelReceivers(self._parts)
        return self._rollout.frames_per_batch()

    def collect(self, order: BatchRequest) -> TensorDictBase | None:
        """See `Rollout.collect`; None where the weights did not come that the order names."""
        with self._at_work:
            return self._built.collect(order) if self._has_weights(order) else None

    def connect(self, address: Address) -> bool:
        """See `Refresher.connect`; whether what comes while the worker rests is committed then."""
        with self._at_work:
            attentive = self._built.refresher.connect(address).on_arrival(self._arrived)
            self._copies = attentive and self._owns_process
            return attentive

    def reach(self, version: int, timeout: float) -> bool:
        """See `Refresher.reach`."""
        with self._at_work:
            return self._built.refresher.reach(version, timeout)

    def connect_model(self, name: str, address: Address) -> None:
        """See `ModelReceivers.connect`."""
        self._model_receivers.connect(name, address)

    def receive_together(self, versions: Mapping[str, int], timeout: float) -> bool:
        """See `ModelReceivers.receive`."""
        before = self._model_receivers.version
        received = self._model_receivers.receive(versions, timeout)
        self._built.refresher.increment_version(self._model_receivers.version - before)
        return received

    def begin_with(self, weights: Mapping[str, Mapping[str, Tensor]], version: int) -> None:
        """Act with these weights of some models, and have this version of the policy."""
        with self._at_work:
            write_models(self._parts, self._receivers, weights)
            self._built.refresher.restore(version, 0)

    def execute(self, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """See `sync_collector.worker_models.execute`."""
        with self._at_work:
            found = execute(self._parts, path, args, kwargs)
            return detached_copy(found) if self._copies else found

    def increment_version(self, by: int) -> None:
        """See `Refresher.increment_version`."""
        self._built.refresher.increment_version(by)

    def set_seed(self, seed: int, static_seed: bool) -> int:
        """See `Rollout.set_seed`."""
        return self._built.set_seed(seed, static_seed)

    def midway(self, number: int) -> bool:
        """See `Rollout.midway`."""
        return self._built.midway(number)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the worker's next batch; see `Rollout.state_dict`."""
        refresher = self._built.refresher
        with self._at_work:
            if self._shares_policy:
                # It has the trainer's weights whether their version was looked at or not.
                refresher.look()
            models = {} if self._shares_policy else read_models(self._parts, self._receivers)
            return {**self._built.state_dict(), "models": models, "version": refresher.version}

    def read_model(self, name: str) -> Mapping[str, Tensor]:
        """Return a copy of the weights of one model; empty if it has none.

        Raises:
            ModelPathError: there is no such model here.
        """
        with self._at_work:
            return read_model(self._parts, name)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise `LayoutMismatchError` unless the weights in a state fit those of the worker."""
        if not self._shares_policy:
            check_models(self._parts, self._receivers, state["models"])

    def load_state_dict(self, state: dict[str, Any], increments: int) -> None:
        """Go on from there.

        Args:
            state: of this worker, or of another one alike.
            increments: see `Refresher.restore`.
        """
        refresher = self._built.refresher
        with self._at_work:
            if not self._shares_policy:
                write_models(self._parts, self._receivers, state["models"])
            refresher.restore(state["version"], increments)
            self._built.load_state_dict(state)

    def start_over(self, seat: int, increments: int) -> None:
        """See `Rollout.start_over`; with the weights that the worker has."""
        self._built.refresher.increment_version(increments)
        self._built.start_over(seat)

    def _arrived(self) -> None:
        """Commit what has arrived; a worker in a batch does so on its own, after its step."""
        refresher = self._built.refresher
        if not self._at_work.acquire(blocking=False):
            refresher.look_soon()
            return
        try:
            refresher.commit()
        finally:
            self._at_work.release()

    def close(self) -> None:
        """Close the environment; the worker group calls it when the worker ends."""
        if self._rollout is not None:
            self._rollout.close()

    def _has_weights(self, order: BatchRequest) -> bool:
        if order.version <= self._model_receivers.version:
            return True
        try:
            return self._built.refresher.reach(order.version, order.patience)
        except Exception:
            # The sender learns why, and reports it to the trainer.
            return False

    @property
    def _receivers(self) -> Mapping[str, Receiver]:
        """Return the receiver of each model, by name."""
        receiver = self._built.refresher.receiver
        return self._model_receivers.receivers | ({} if receiver is None else {POLICY: receiver})

    @property
    def _built(self) -> Rollout:
        if self._rollout is None:
            raise RuntimeError("this worker has no environment: it could not be built")
        return self._rollout


def new_worker(worker_id: int) -> CollectorWorker:
    """The factory for a worker group: small, so that starting a worker sends nothing big."""
    del worker_id
    return CollectorWorker()
