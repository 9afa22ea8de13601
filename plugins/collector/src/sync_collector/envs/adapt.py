"""Adapts environments of other libraries, and stacks several environments into one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, stack

from sync_collector.envs.agents import AgentsEnv
from sync_collector.envs.arrays import (
    ArrayEnv,
    Arrays,
    ArrayStep,
    Stepper,
    check_flags,
    new_rows,
    put_row,
    speaks_arrays,
)
from sync_collector.envs.gym import EnvOptions, GymEnv
from sync_collector.envs.normal import Conventions
from sync_collector.envs.protocol import (
    Env,
    close_env,
    following_of,
    load_env,
    optional,
    random_policy,
    reset_env,
    save_env,
    seed_env,
)
from sync_core import registry


def stack_envs(envs: Sequence[Env]) -> Env:
    """Stack environments: the batch gets a new first dimension, one entry per environment.

    Args:
        envs: one or more environments of the same kind.

    Raises:
        ValueError: their batches or observations differ.

    Example:
        >>> from sync_collector.envs import CountingEnv
        >>> stack_envs([CountingEnv(), CountingEnv()]).reset()["observation"]
        tensor([[0.],
                [0.]])
    """
    if len({tuple(env.batch_size) for env in envs}) > 1:
        raise ValueError(
            f"environments of one worker have the batch sizes "
            f"{[list(env.batch_size) for env in envs]}; make them alike"
        )
    arrays = [env for env in envs if speaks_arrays(env)]
    if len(arrays) == len(envs):
        return _ArrayStack(arrays)
    return _TensorDictStack(envs)


class _Members:
    """The methods that every stack shares: each is called on every environment."""

    _envs: Sequence[Env]
    is_closed = False

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments in order, each with the seed that the one before it returned."""
        for env in self._envs:
            seed = seed_env(env, seed, static_seed)
        return seed

    def save_state(self) -> list[Any] | None:
        """Return the states of all environments; None if one of them cannot be saved."""
        states = [save_env(env) for env in self._envs]
        return None if any(state is None for state in states) else states

    def load_state(self, states: list[Any]) -> None:
        """Restore the state of each environment."""
        self._forget_step()
        for env, state in zip(self._envs, states, strict=True):
            load_env(env, state)

    def _forget_step(self) -> None:
        """Start the next step with the first environment."""
        raise NotImplementedError

    def close(self) -> None:
        """Close all environments."""
        self.is_closed = True
        for env in self._envs:
            close_env(env)


class _ArrayStack(_Members, ArrayEnv):
    def __init__(self, envs: Sequence[ArrayEnv]) -> None:
        specs = envs[0].array_specs
        for env in envs:
            if env.array_specs != specs:
                raise ValueError(
                    f"environments of one worker observe {dict(specs)} and "
                    f"{dict(env.array_specs)}; make them alike"
                )
        self._envs = self._members = envs
        self._stepper = Stepper()
        self.array_specs = specs
        self.batch_size = torch.Size((len(envs), *envs[0].batch_size))

    def reset_arrays(self, mask: np.ndarray[Any, Any] | None = None) -> Arrays:
        self._forget_step()
        rows = new_rows(self.array_specs, self.batch_size)
        for i, env in enumerate(self._members):
            where = None if mask is None else np.asarray(mask[i])
            if where is None or where.all():
                put_row(rows, i, env.reset_arrays())
            elif where.any():
                put_row(rows, i, env.reset_arrays(where))
        return rows

    def step_arrays(self, action: np.ndarray[Any, Any]) -> ArrayStep:
        def step(i: int) -> ArrayStep:
            stepped = self._members[i].step_arrays(action[i])
            check_flags(self._members[i], stepped)
            return stepped

        return self._stepper.run(self, action, step)

    def _forget_step(self) -> None:
        self._stepper.restart()

    def sample_action(self) -> np.ndarray[Any, Any]:
        return np.stack([env.sample_action() for env in self._members])


class _TensorDictStack(_Members):
    def __init__(self, envs: Sequence[Env]) -> None:
        self._envs = envs
        self.batch_size = torch.Size((len(envs), *envs[0].batch_size))
        self.action_keys = optional(envs[0], "action_keys")
        self.reward_keys = optional(envs[0], "reward_keys")
        self.done_keys = optional(envs[0], "done_keys")
        self._conventions = Conventions(self)
        # A step that an exception interrupted, and the results of the environments already stepped.
        self._cut: tuple[TensorDictBase, list[TensorDictBase]] | None = None

    def reset(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        self._forget_step()
        where = None if tensordict is None else self._conventions.to_reset(tensordict)
        if tensordict is None or where is None:
            return self._stack([reset_env(env) for env in self._envs])
        which = where.flatten(1).any(1).tolist() if where.ndim > 1 else where.tolist()
        parts = tensordict.unbind(0)
        roots = {
            i: reset_env(env, parts[i]) if self.batch_size[1:] else reset_env(env)
            for i, env in enumerate(self._envs)
            if which[i]
        }
        keys = list(next(iter(roots.values())).keys(include_nested=True, leaves_only=True))
        return self._stack([roots.get(i, part).select(*keys) for i, part in enumerate(parts)])

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        # The environments before the failed one are not stepped twice.
        if self._cut is None or self._cut[0] is not tensordict:
            self._cut = tensordict, []
        followings = self._cut[1]
        parts = tensordict.unbind(0)
        for env, part in zip(self._envs[len(followings) :], parts[len(followings) :], strict=True):
            followings.append(following_of(env, part, env.step(part)))
        self._cut = None
        return tensordict.set("next", self._stack(followings))

    def rand_action(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        keys = self._conventions.action_keys
        pairs = zip(self._envs, tensordict.unbind(0), strict=True)
        actions = [random_policy(env, keys[0])(part).select(*keys) for env, part in pairs]
        return tensordict.update(self._stack(actions))

    def _forget_step(self) -> None:
        self._cut = None

    def _stack(self, parts: Sequence[TensorDictBase]) -> TensorDictBase:
        together: TensorDictBase = stack(list(parts))
        return together


#: The entry point group of environment adapters.
ADAPTERS = "sync.environments"


class EnvironmentAdapter(ABC):
    """Adapts environments of another library to `Env`.

    Distributions register instances in the entry point group ``sync.environments``. A worker asks
    every installed adapter, so an adapter must not import its library before it gets one of its
    environments.

    Example:
        >>> from sync_collector.envs import CountingEnv
        >>> class Counters(EnvironmentAdapter):
        ...     def accepts(self, made):
        ...         return isinstance(made, range)
        ...     def adapt(self, made, options):
        ...         return CountingEnv(len(made))
        >>> Counters().adapt(range(3), EnvOptions()).reset()["observation"]
        tensor([0.])
    """

    @abstractmethod
    def accepts(self, made: Any) -> bool:
        """Return whether this adapter knows the kind of an object."""

    @abstractmethod
    def adapt(self, made: Any, options: EnvOptions) -> Env:
        """Return the environment as an `Env`.

        Args:
            made: what ``create_env_fn`` returned.
            options: the collector's options. An adapter raises `TypeError` for options that it does
                not support.
        """


class _Gymnasium(EnvironmentAdapter):
    """Adapts single and vector environments of Gymnasium, and similar ones."""

    def accepts(self, made: Any) -> bool:
        if _is_of_agents(made):
            return False
        is_single = hasattr(made, "action_space") and hasattr(made, "observation_space")
        return is_single or _is_vector(made)

    def adapt(self, made: Any, options: EnvOptions) -> Env:
        _check_steps(made)
        if not _is_vector(made):
            env: Env = GymEnv(lambda: made, **options.given())
            return env
        # These import gymnasium, which only such an environment needs.
        from sync_collector.envs.simulators import resettable
        from sync_collector.envs.vector import VectorGymEnv

        return VectorGymEnv(resettable(made), **options.given())


def _is_vector(made: Any) -> bool:
    """Return whether an environment is a batch: of Gymnasium, of EnvPool or of a simulator."""
    return hasattr(made, "single_action_space") or hasattr(made, "all_env_ids")


def _is_of_agents(made: Any) -> bool:
    """Return whether an environment has several agents, each with its own space."""
    return hasattr(made, "possible_agents") or callable(getattr(made, "action_space", None))


class _PettingZoo(EnvironmentAdapter):
    """Adapts multi-agent environments whose agents act at once, as in PettingZoo's parallel API."""

    def accepts(self, made: Any) -> bool:
        return _is_of_agents(made) and not hasattr(made, "batch_size")

    def adapt(self, made: Any, options: EnvOptions) -> Env:
        _check_steps(made)
        return AgentsEnv(made, options)


_NONE = EnvOptions()

#: The adapter of Gymnasium's environments.
GYMNASIUM = _Gymnasium()
#: The adapter of PettingZoo's environments.
PETTINGZOO = _PettingZoo()
_OURS = (GYMNASIUM, PETTINGZOO)


def as_env(made: Any, options: EnvOptions = _NONE) -> Env:
    """Return an `Env` unchanged, or adapt another environment.

    An object with a ``batch_size`` counts as an `Env`, such as TorchRL's ``EnvBase``. The adapters
    of other distributions are asked before those of Gymnasium and PettingZoo.

    Args:
        made: an environment of any kind.
        options: options for the adapters.

    Raises:
        TypeError: no adapter or more than one knows the environment.
        ValueError: it is an empty batch of environments.

    Example:
        >>> import gymnasium
        >>> type(as_env(gymnasium.make("CartPole-v1"))).__name__
        'GymEnv'
    """
    if isinstance(getattr(made, "batch_size", None), torch.Size):
        # Checked first: a wrapper may also have the spaces of the environment inside.
        _check_steps(made)
        if given := options.given():
            configure: Callable[[EnvOptions], object] | None = optional(made, "configure")
            if configure is None:
                raise TypeError(
                    f"{', '.join(given)} is for environments of Gymnasium, and create_env_fn made "
                    f"a {type(made).__name__} without configure(options); let what makes the "
                    "environment do the same"
                )
            configure(options)
        env: Env = made
    else:
        env = _adapted(made, options)
    if not env.batch_size.numel():
        raise ValueError(
            f"{type(made).__name__} has the batch size {list(env.batch_size)}, so it "
            "holds no environment; make it with one or more"
        )
    return env


def _adapted(made: Any, options: EnvOptions) -> Env:
    adapters, broken = _installed_adapters()
    found = {name: each for name, each in adapters.items() if each.accepts(made)}
    if len(found) > 1:
        raise TypeError(
            f"several adapters know a {type(made).__name__}: {', '.join(found)}; leave out all but "
            f"one by their names: {registry.DISABLE}={next(iter(found))}"
        )
    ours = (each for each in _OURS if each.accepts(made))
    adapter = next(iter(found.values()), None) or next(ours, None)
    if adapter is not None:
        return adapter.adapt(made, options)
    _check_steps(made)
    raise TypeError(
        f"{type(made).__name__} has no batch_size that is a torch.Size, and no action_space and "
        "observation_space either; write batch_size = torch.Size() for a single environment, or "
        f"torch.Size([n]) for n that are stepped together{broken}"
    )


def _installed_adapters() -> tuple[dict[str, EnvironmentAdapter], str]:
    """Return the other distributions' adapters by name, and a remark about those that fail."""
    adapters: dict[str, EnvironmentAdapter] = {}
    broken = ""
    for entry in registry.installed(ADAPTERS):
        try:
            adapter = entry.load()
            if not isinstance(adapter, EnvironmentAdapter):
                raise TypeError(f"{entry.value} must be an EnvironmentAdapter, got {adapter!r}")
        except Exception as error:
            distribution, version = registry.owner_of(entry)
            broken += (
                f"; the adapter {entry.name!r} of {distribution} {version} does not load: {error!r}"
            )
        else:
            if adapter not in _OURS:
                adapters[entry.name] = adapter
    return adapters, broken


def _check_steps(made: Any) -> None:
    if not (callable(getattr(made, "reset", None)) and callable(getattr(made, "step", None))):
        raise TypeError(
            f"create_env_fn made a {type(made).__name__}, which has no reset() and step(); let it "
            "return an environment"
        )
