"""A worker of a collector: its specification, and the object that it hosts."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sync_collector.envs.adapt import as_env, stack_envs
from sync_collector.envs.gym import EnvOptions
from sync_collector.envs.protocol import Env, closed_on_error
from sync_collector.options import check_acts
from sync_collector.policies import called_module, check_takes_something, is_lazy
from sync_collector.rollout import BatchRequest, Devices, Rollout, RolloutOptions, seed_process
from sync_collector.worker_models import WorkerModels
from sync_core import Address, OptionError

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WorkerSpec:
    """The specification of one worker: environments, policy, models and options.

    Args:
        seat: its number, unique over the collector's lifetime. A worker that replaces another has
            the same id but a new seat.
        env_fn: makes its environment.
        env_options: options for the environments.
        policy: its policy; None for random actions, or if ``policy_fn`` makes the policy.
        policy_fn: makes its policy.
        models: its models other than the policy, by name.
        share_policy: act with the object ``policy`` itself instead of a copy.
        seed: seeds its random state, if it is a process.
        one_thread: let torch use one thread in the worker.
        options: the options for its batches.
    """

    seat: int
    env_fn: Callable[[], Any]
    env_options: EnvOptions = field(default_factory=EnvOptions)
    policy: Any = None
    policy_fn: Callable[[], Any] | None = None
    models: Mapping[str, Any] = field(default_factory=dict)
    share_policy: bool = False
    seed: int = 0
    one_thread: bool = True
    options: RolloutOptions

    def __repr__(self) -> str:
        return f"WorkerSpec(seat={self.seat})"

    def make_env(self) -> Env:
        """Make the environment in the worker; stack several into one.

        Raises:
            TypeError: the function returned something other than an environment, or an environment
                that is in use already.
            ValueError: environments differ, or a batch of environments is empty.
        """
        envs: list[Env] = []
        with closed_on_error(envs):
            for _ in range(self.options.num_envs):
                made = self._make_one()
                with closed_on_error([made]):
                    env = as_env(made, self.env_options)
                _check_is_new(made, env, envs)
                with closed_on_error([made]):
                    envs.append(self.options.devices.place_env(env))
            return envs[0] if self.options.num_envs == 1 else stack_envs(envs)

    def make_models(self) -> tuple[Any, dict[str, Any]]:
        """Make the policy and the other models in the worker.

        They are copied together: a policy that uses another model then uses the worker's copy.

        Raises:
            TypeError: ``policy_fn`` did not return a policy.
        """
        if self.share_policy:
            self.options.devices.check_shared(self.policy)
            return self.policy, {}
        given = self.policy, dict(self.models)
        # Objects from another process are already copies.
        policy, models = given if self.options.owns_process else detached_copy(given)
        place = self.options.devices.place_policy
        if self.policy_fn is not None:
            policy = self.policy_fn()
            check_acts(policy, "policy_factory made")
        return place(policy), {name: place(model) for name, model in models.items()}

    def _make_one(self) -> Any:
        try:
            return self.env_fn()
        except Exception as error:
            unknown = getattr(sys.modules.get("gymnasium.error"), "UnregisteredEnv", ())
            if not self.options.owns_process or not isinstance(error, unknown):
                raise
            raise OptionError(
                f"{error} create_env_fn runs in the worker's process, in which nothing of this "
                "script has registered an id: call gymnasium.register(…) inside of create_env_fn, "
                "or name the module that does, as in gymnasium.make('my_module:MyEnv-v0')"
            ) from error


# The adapters of this process's environments, by the id of the adapted environment. `_kept` keeps
# each environment as long as its adapter, so that no other environment gets its id.
_adapted: WeakValueDictionary[int, Env] = WeakValueDictionary()
_kept: WeakKeyDictionary[Env, Any] = WeakKeyDictionary()


def _check_is_new(made: Any, env: Env, others: Sequence[Env]) -> None:
    """Raise `TypeError` if an environment is in use already, perhaps by another thread.

    Args:
        made: what ``create_env_fn`` returned.
        env: the same as an `Env`.
        others: the worker's environments so far.
    """
    if env is made:
        is_new = not any(other is made for other in others)
    else:
        _kept[env] = made
        first = _adapted.setdefault(id(made), env)
        is_new = first is env or bool(getattr(first, "is_closed", False))
        if is_new:
            _adapted[id(made)] = env
    if not is_new:
        raise TypeError(
            f"create_env_fn returned a {type(made).__name__} that is stepped already: by another "
            "worker, by evaluate(), or as one of num_workers_per_collector; let it make a new one "
            "in each call, such as lambda: gymnasium.make(…)"
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WorkerSpecs:
    """The specs of all workers of a collector, including workers added later.

    Args:
        env_fns: a function that makes an environment, for each initial worker; workers added later
            use the functions again from the first.
        policy: the policy of all workers; None for random actions, or if functions make the
            policies.
        policy_fns: a function that makes a policy, or None, for each initial worker.
        models: see `WorkerSpec`.
        share_policy: see `WorkerSpec`.
        seed: the seed of the first seat; the other seeds are derived from it.
        one_thread: see `WorkerSpec`.
        env_options: see `WorkerSpec`.
        options: the options for batches of each initial worker.
    """

    env_fns: tuple[Callable[[], Any], ...]
    policy: Any
    policy_fns: tuple[Callable[[], Any] | None, ...]
    models: Mapping[str, Any]
    share_policy: bool
    seed: int
    one_thread: bool
    options: tuple[RolloutOptions, ...]
    env_options: EnvOptions = field(default_factory=EnvOptions)

    def check_policy(self) -> None:
        """Raise `PolicyError` if the policy's arguments would fit no environment."""
        if self.policy is not None and not all(each.trust_policy for each in self.options):
            check_takes_something(self.policy)

    def give_shapes(self) -> None:
        """Call a lazy policy once, so that there are weights to send."""
        module = called_module(self.policy)
        if module is None or not is_lazy(module):
            return
        first = self(0, 0)
        here = Devices(policy=next(module.parameters()).device)
        # Two represent any number: shapes may depend on whether observations have a batch
        # dimension.
        few = replace(
            first, options=replace(first.options, num_envs=min(2, first.options.num_envs))
        )
        env = few.make_env()
        with closed_on_error([env]):
            rollout = Rollout(env, self.policy, 0, replace(few.options, devices=here))
        rollout.close()

    def __call__(self, worker_id: int, seat: int) -> WorkerSpec:
        """Return the spec for a worker."""
        return WorkerSpec(
            seat=seat,
            env_fn=self.env_fns[worker_id % len(self.env_fns)],
            policy=self.policy,
            policy_fn=self.policy_fns[worker_id % len(self.policy_fns)],
            models=self.models,
            share_policy=self.share_policy,
            seed=self.seed + seat,
            one_thread=self.one_thread,
            env_options=self.env_options,
            options=self.options[worker_id % len(self.options)],
        )


def detached_copy(value: Value) -> Value:
    """Return a deep copy; a tensor with a graph, which torch refuses to copy, is detached.

    A policy has such a tensor if it stores a result of a training step, or computes a weight from
    others (``torch.nn.utils.weight_norm``).

    Example:
        >>> import torch
        >>> weight = torch.ones(1, requires_grad=True)
        >>> detached_copy([weight, 2 * weight])
        [tensor([1.], requires_grad=True), tensor([2.])]
    """
    with _Detaching():
        return copy.deepcopy(value)


class _Detaching(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            detached = tensor.detach()
            copied = detached.__deepcopy__(memo)
            # The id may be reused by another object.
            memo.pop(id(detached), None)
            return copied
        return func(*args, **(kwargs or {}))


class CollectorWorker:
    """The object that a worker hosts: a rollout and its models. The driver calls its methods."""

    def __init__(self) -> None:
        self._rollout: Rollout | None = None
        self._models = WorkerModels(SimpleNamespace())
        self._shares_policy = self._owns_process = False
        # Held during every call that uses the models.
        self._at_work = threading.RLock()
        # Whether weights arrived on a thread of the scheme and are not committed yet.
        self._has_arrived = False
        # Whether results are copied, because they are pickled while another thread may commit.
        self._copies = False

    def build(self, spec: WorkerSpec) -> int:
        """Make environment and policy; return the number of frames in a batch."""
        self._shares_policy = spec.share_policy
        self._owns_process = spec.options.owns_process
        if self._owns_process:
            # All fresh processes have torch's default seed, so workers would draw the same numbers.
            seed_process(spec.seed)
            if spec.one_thread:
                # One step is too little work for several threads, and threads that wait for each
                # other occupy cores that the trainer and other workers need.
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
        """Receive a model's weights from a sender from now on; see `WorkerModels.connect`.

        Returns:
            Whether the worker commits weights that arrive between batches.
        """
        with self._in_use():
            receiver = self._models.connect(name, address, single=single)
            attentive = single and receiver.on_arrival(self._arrived)
            self._copies = attentive and self._owns_process
            return attentive

    def collect(self, request: BatchRequest) -> TensorDictBase | None:
        """Return the next batch; None if the weights that the request requires do not arrive."""
        with self._in_use():
            if not self._models.has(request.versions, request.patience):
                return None
            self._models.look()
            return self._built.collect(request)

    def reach(self, versions: Mapping[str, int], timeout: float) -> bool:
        """Commit versions that were sent; see `WorkerModels.reach`."""
        with self._in_use():
            return self._models.reach(versions, timeout)

    def begin_with(
        self,
        weights: Mapping[str, Mapping[str, Tensor]],
        version: int,
        kept: Sequence[str] = (),
    ) -> None:
        """Load the initial weights of some models, and set the policy's version.

        Args:
            weights: the weights of each model.
            version: the version.
            kept: parts of these models whose weights are not overwritten.
        """
        with self._in_use():
            self._models.write({**weights, **{name: self._models.read(name) for name in kept}})
            self._models.set_version(version)

    def resemble(self, policy: Any) -> None:
        """Copy the modes and numbers of another policy; see `WorkerModels.resemble`."""
        with self._in_use():
            self._models.resemble(policy)

    def set_version(self, version: int) -> None:
        """Set the version of a policy whose weights were not sent by the sender."""
        self._models.set_version(max(version, self._models.version))

    def execute(self, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the object at a path, or the result of calling it; see `WorkerModels.execute`."""
        with self._in_use():
            found = self._models.execute(path, args, kwargs)
            return detached_copy(found) if self._copies else found

    def set_seed(self, seed: int, static_seed: bool) -> int:
        """Seed the environment and start over; return the seed for the next worker."""
        return self._built.set_seed(seed, static_seed)

    def midway(self, number: int) -> bool:
        """Return whether the batch with this request number was interrupted."""
        return self._built.midway(number)

    def read_model(self, name: str) -> Mapping[str, Tensor]:
        """Return a copy of the weights of one model; see `WorkerModels.read`."""
        with self._in_use():
            return self._models.read(name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the worker's next batch; see `Rollout.state_dict`."""
        with self._in_use():
            if self._shares_policy:
                # The shared policy already has the trainer's weights; make the version match them.
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
        """Continue from a state of this worker, or of one with the same environments."""
        with self._in_use():
            if not self._shares_policy:
                self._models.write(state["models"])
            self._models.set_version(state["version"])
            self._built.load_state_dict(state)

    def start_over(self, seat: int, before: int, version: int) -> None:
        """Begin new episodes with the worker's current weights.

        Args:
            seat: see `Rollout.start_over`.
            before: the newest version before the load.
            version: the version number that replaces it.
        """
        if self._models.version == before:
            self._models.set_version(version)
        self._built.start_over(seat)

    def close(self) -> None:
        """Close the receivers and the environment; the worker group calls this at the end."""
        with closing(self._models):
            if self._rollout is not None:
                self._rollout.close()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """For ``with``: no other thread commits; weights that arrive are committed at the end."""
        try:
            with self._at_work:
                yield
        finally:
            self._commit_arrived()

    def _arrived(self) -> None:
        """Commit arrived weights; a worker that is in a batch commits them after its step."""
        self._has_arrived = True
        self._models.look_soon()
        self._commit_arrived()

    def _commit_arrived(self) -> None:
        # If another thread holds the lock, that thread calls this after it releases the lock.
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
    """Make an empty worker. This factory is small, so starting a worker pickles nothing large."""
    del worker_id
    return CollectorWorker()
