"""Everything that one worker needs to know to begin."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

from sync_collector.devices import Devices
from sync_collector.envs.adapt import EnvOptions, as_env, stack_envs
from sync_collector.envs.protocol import Env, closed_on_error
from sync_collector.options import check_acts
from sync_collector.policies import check_takes_something
from sync_collector.policy_module import called_module, is_lazy
from sync_collector.rollout import Rollout, RolloutOptions
from sync_core import OptionError

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WorkerSpec:
    """The specification of one worker: environments, policy, models and options.

    Args:
        seat: its number, which no other worker of the collector ever had, not even one of the same
            id that it replaces.
        env_fn: makes its environment.
        env_options: what is asked of them.
        policy: its policy; None for random actions, or where ``policy_fn`` makes it.
        policy_fn: makes its policy.
        models: what it has beside the policy, by name.
        share_policy: let it act with the very object ``policy``, not with a copy.
        seed: where its random state begins, if it has its own process.
        one_thread: let torch use one thread there.
        options: how it makes batches.
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
        """Make the environment, in the worker; several as one.

        Raises:
            TypeError: what was made is not an environment.
            ValueError: environments differ, or there are none in what was made.
        """
        envs: list[Env] = []
        with closed_on_error(envs):
            for _ in range(self.options.num_envs):
                made = self._make_one()
                with closed_on_error([made]):
                    envs.append(self.options.devices.place_env(as_env(made, self.env_options)))
            return envs[0] if self.options.num_envs == 1 else stack_envs(envs)

    def make_models(self) -> tuple[Any, dict[str, Any]]:
        """The policy, and the models beside it, made in the worker.

        Copies are made of all of them as one: a policy that uses a model uses the worker's copy.

        Raises:
            TypeError: what was made is not a policy.
        """
        if self.share_policy:
            self.options.devices.check_shared(self.policy)
            return self.policy, {}
        given = self.policy, dict(self.models)
        # Objects from another process are copies already.
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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WorkerSpecs:
    """The specs of all workers of a collector, also of those that come later.

    Args:
        env_fns: a function that makes an environment, for each of the first workers; one that is
            added later begins again with the first function.
        policy: the policy of all; None for random actions, or where functions make them.
        policy_fns: a function that makes a policy, or None, for each of the first workers.
        models: see `WorkerSpec`.
        share_policy: see `WorkerSpec`.
        seed: of the first seat; every other one is derived from it.
        one_thread: see `WorkerSpec`.
        env_options: see `WorkerSpec`.
        options: how each of the first workers makes batches.
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
        """Raise `PolicyError` if no environment could make the policy's arguments right."""
        if self.policy is not None and not all(each.trust_policy for each in self.options):
            check_takes_something(self.policy)

    def give_shapes(self) -> None:
        """Let a lazy policy act once, so that there are weights to send."""
        module = called_module(self.policy)
        if module is None or not is_lazy(module):
            return
        first = self(0, 0)
        here = Devices(policy=next(module.parameters()).device)
        alone = replace(first, options=replace(first.options, num_envs=1))
        env = alone.make_env()
        with closed_on_error([env]):
            rollout = Rollout(env, self.policy, 0, replace(alone.options, devices=here))
        rollout.close()

    def __call__(self, worker_id: int, seat: int) -> WorkerSpec:
        """The spec for a worker."""
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
    """A deep copy; of a tensor with a graph, which torch does not copy, its values.

    A policy has one when it has kept what it computed in a training step, or a weight that it
    computes from others (``torch.nn.utils.weight_norm``).

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
            # Something else may have its id next.
            memo.pop(id(detached), None)
            return copied
        return func(*args, **(kwargs or {}))
