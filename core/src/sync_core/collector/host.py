"""What a collector's workers host: at first nothing, then what a recipe says."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from sync_core.address import Address
from sync_core.collector.order import Order
from sync_core.collector.recipe import WorkerRecipe
from sync_core.collector.rollout import Rollout, seed_process


class Host:
    """A rollout, once it is built; every method is called from the driver, by its worker group."""

    def __init__(self) -> None:
        self._rollout: Rollout | None = None

    def build(self, recipe: WorkerRecipe) -> int:
        """Make environment and policy.

        Returns:
            How many frames a batch of theirs has.
        """
        if recipe.options.owns_process:
            # Every fresh process has torch's one default seed: workers would act all alike.
            seed_process(recipe.seed)
            if recipe.one_thread:
                # One step is too little work to share out, and threads that wait for each other
                # hold cores that the trainer and other workers need.
                torch.set_num_threads(1)
        env = recipe.env_fn()
        self._rollout = Rollout(env, recipe.make_policy(), recipe.seat, recipe.options)
        return self._rollout.frames_per_batch()

    def collect(self, order: Order) -> TensorDictBase:
        """See `Rollout.collect`."""
        return self._built.collect(order)

    def connect(self, address: Address) -> None:
        """See `Refresher.connect`."""
        self._built.refresher.connect(address)

    def receive(self, timeout: float) -> int | None:
        """See `Refresher.receive`."""
        return self._built.refresher.receive(timeout)

    def increment_version(self, by: int) -> None:
        """See `Refresher.increment_version`."""
        self._built.refresher.increment_version(by)

    def set_seed(self, seed: int) -> int:
        """See `Rollout.set_seed`."""
        return self._built.set_seed(seed)

    @property
    def _built(self) -> Rollout:
        if self._rollout is None:
            raise RuntimeError("this worker has no environment: it could not be built")
        return self._rollout


def new_host(worker_id: int) -> Host:
    """The factory for a worker group: small, so that starting a worker sends nothing big."""
    del worker_id
    return Host()
