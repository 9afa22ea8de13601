"""Prepares vector environments and simulators for `VectorGymEnv`."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

__all__ = [
    "EnvPoolVector",
    "autoreset_mode",
    "is_pool",
    "obeys_masks",
    "resettable",
    "takes_seeds",
]


def autoreset_mode(env: Any) -> AutoresetMode:
    """Return when an environment begins its next episode.

    If it has no ``autoreset_mode``, a Gymnasium vector environment resets in the next step, and any
    other simulator in the step that ends an episode, as GPU simulators do.
    """
    default = AutoresetMode.NEXT_STEP if isinstance(env, VectorEnv) else AutoresetMode.SAME_STEP
    return AutoresetMode((getattr(env, "metadata", None) or {}).get("autoreset_mode", default))


def obeys_masks(env: Any) -> bool:
    """Return whether ``reset(options={"reset_mask": …})`` is known to reset only a part."""
    inner = _inner(env)
    if isinstance(inner, AsyncVectorEnv):
        # Only with shared memory does a reset by mask cancel a worker's pending autoreset.
        return bool(inner.shared_memory)
    named = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(inner).__mro__}
    is_ours = isinstance(inner, EnvPoolVector) or getattr(inner.reset, "resets_parts", False)
    return is_ours or isinstance(inner, SyncVectorEnv) or not named.isdisjoint(_OBEDIENT)


#: Classes of other distributions whose ``reset`` accepts a mask.
_OBEDIENT = frozenset({"ale_py.vector_env.AtariVectorEnv"})


def takes_seeds(env: Any) -> bool:
    """Return whether ``reset(seed=…)`` accepts one seed per environment."""
    return isinstance(_inner(env), AsyncVectorEnv | SyncVectorEnv)


def resettable(env: Any) -> Any:
    """Return a simulator that can reset a part of its environments, if possible.

    Args:
        env: a vector environment, or a simulator with the same interface.

    Returns:
        The environment itself; or a vector of single environments, if it can reset only in the next
        step.

    Warns:
        UserWarning: another environment was made in its place.
    """
    if is_pool(env):
        return EnvPoolVector(env)
    if autoreset_mode(env) is not AutoresetMode.NEXT_STEP or obeys_masks(env):
        return env
    inner = _inner(env)
    kind = type(inner)
    if isinstance(inner, CartPoleVectorEnv) and kind.reset is CartPoleVectorEnv.reset:
        _let_reset_parts(inner)
        return env
    # A new environment would lack the wrappers around this one.
    if env is not inner or env.spec is None:
        return env
    warnings.warn(
        f"{kind.__name__} resets an environment with the step after its last one, so that "
        f"this step's frame would have no action; single environments of {env.spec.id} are stepped "
        "in its place; type gymnasium.make_vec(…, vectorization_mode='sync') for them",
        stacklevel=2,
    )
    options = {k: v for k, v in env.spec.kwargs.items() if k not in _OF_VECTORS}
    single = gymnasium.make_vec(env.spec.id, env.num_envs, "sync", **options)
    env.close()
    return single


# Arguments that make_vec itself takes; the others go to the environment.
_OF_VECTORS = ("num_envs", "vectorization_mode")


def _let_reset_parts(env: CartPoleVectorEnv) -> None:
    """Let Gymnasium's CartPole reset the environments of a mask at once, not in its next step."""
    whole = env.reset

    def reset(*, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        mask = (options or {}).get("reset_mask")
        if mask is None:
            return whole(seed=seed, options=options)
        state: Any = env.state
        state[:, mask] = env.np_random.uniform(env.low, env.high, (len(state), int(mask.sum())))
        env.steps[mask], env.prev_done[mask] = 0, False
        return state.T.astype(np.float32), {}

    reset.resets_parts = True  # type: ignore[attr-defined]
    env.reset = reset  # type: ignore[method-assign]


def is_pool(env: Any) -> bool:
    """Return whether an environment is an EnvPool, whose methods take environment ids."""
    return hasattr(env, "all_env_ids") and hasattr(env, "config")


class EnvPoolVector(VectorEnv[Any, Any, Any]):
    """Adapts an EnvPool to Gymnasium's vector interface.

    A pool resets an environment in the step after its episode ended, or when ``reset`` gets its id.

    Args:
        pool: a pool of ``envpool.make_gymnasium`` or ``envpool.make(…, env_type="gymnasium")``
            whose ``batch_size`` is the number of environments.

    Raises:
        TypeError: its steps return only some of the environments.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.num_envs = len(pool.all_env_ids)
        if pool.config.get("batch_size", self.num_envs) not in (0, self.num_envs):
            raise TypeError(
                f"the pool gives {pool.config['batch_size']} of its {self.num_envs} environments "
                "in each step, and a collector steps all of them; make it without batch_size="
            )
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = pool.observation_space
        self.single_action_space = pool.action_space
        self.observation_space = batch_space(pool.observation_space, self.num_envs)
        self.action_space = batch_space(pool.action_space, self.num_envs)
        self._seen: Any = None

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in all environments, or in those of ``options["reset_mask"]``."""
        if seed is not None:
            raise TypeError(
                "a pool of EnvPool takes its seed when it is made; type envpool.make_gymnasium(…, "
                "seed=0), with another seed for each worker, in place of set_seed()"
            )
        mask = (options or {}).get("reset_mask")
        if mask is None:
            self._seen, info = self._pool.reset()
            return self._seen, info
        where = np.flatnonzero(mask)
        part, _ = self._pool.reset(where.astype(np.int32))
        self._seen = _merged(self._seen, part, where)
        return self._seen, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Act in all environments."""
        self._seen, reward, terminated, truncated, info = self._pool.step(np.asarray(actions))
        return self._seen, reward, terminated, truncated, info

    def close_extras(self, **_: Any) -> None:
        """Close the pool."""
        self._pool.close()


def _merged(seen: Any, part: Any, where: Any) -> Any:
    if isinstance(seen, dict):
        return {name: _merged(values, part[name], where) for name, values in seen.items()}
    merged = np.array(seen)
    merged[where] = part
    return merged


def _inner(env: Any) -> Any:
    return getattr(env, "unwrapped", env)
