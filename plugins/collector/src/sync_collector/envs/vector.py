"""Vector environments of Gymnasium, as environments of the collector's kind."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import (
    AsyncVectorEnv,
    AutoresetMode,
    SyncVectorEnv,
    VectorEnv,
    VectorWrapper,
)
from gymnasium.wrappers.vector import NormalizeObservation

from sync_collector.envs.arrays import ArrayEnv, Arrays, ArrayStep, as_numpy, put_row
from sync_collector.envs.gym import (
    EnvOptions,
    InfoKeys,
    InfoReader,
    next_seed,
    wrong_flag,
    wrong_reward,
)
from sync_collector.envs.spaces import (
    ObservationCodec,
    action_codec,
    check_maskable,
    mask_of,
)


class VectorGymEnv(ArrayEnv):
    """A Gymnasium vector environment, stepped as one batch; it may have any autoreset mode.

    What an episode ended with is found under ``"next"``, and no frame is spent on a reset: where
    the vector environment would reset with the next step, it is set to do so before that.

    Args:
        env: the vector environment.
        categorical: see `GymEnv`.
        info_keys: see `GymEnv`.
        action_mask: see `GymEnv`.

    Raises:
        TypeError: it would reset with the next step and cannot be set to do so earlier, or cannot
            reset a part.

    Example:
        >>> import gymnasium
        >>> env = VectorGymEnv(gymnasium.make_vec("Pendulum-v1", num_envs=3))
        >>> env.batch_size, env.reset()["observation"].shape
        (torch.Size([3]), torch.Size([3, 3]))
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        *,
        categorical: bool | None = None,
        info_keys: InfoKeys = (),
        action_mask: str | None = None,
    ) -> None:
        self._env = env
        self._mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self._resets_some = self._mode is AutoresetMode.DISABLED or _obeys_masks(env.unwrapped)
        if self._mode is AutoresetMode.NEXT_STEP and not self._resets_some:
            raise TypeError(
                f"{env} resets an environment with the step after its last one, and by itself "
                "only, so that this step's frame would be none; type gymnasium.make_vec(…, "
                "vectorization_mode='sync'), or make it with autoreset_mode="
                "gymnasium.vector.AutoresetMode.DISABLED or SAME_STEP"
            )
        if env.num_envs > 1 and _normalizes_all(env):
            raise TypeError(
                f"{env} normalizes the observations of all its environments together, and cannot "
                "reset one and continue with another; let each normalize its own: type "
                "gymnasium.make_vec(…, vectorization_mode='sync', "
                "wrappers=[gymnasium.wrappers.NormalizeObservation])"
            )
        self.batch_size = torch.Size((env.num_envs,))
        self.is_closed = False
        self._options = EnvOptions(
            categorical=categorical, info_keys=info_keys, action_mask=action_mask
        )
        self._set_up()
        # The observations after the last step, where it has reset what had ended, and where.
        self._fresh: Arrays = {}
        self._is_fresh = np.zeros(env.num_envs, np.bool_)
        # The device of actions where the environment gives tensors; None where it gives arrays.
        self._device: torch.device | None = None

    def configure(self, options: EnvOptions) -> None:
        """Take what a collector asks for; see `GymEnv.configure`."""
        self._options = self._options.joined(options)
        self._set_up()

    def _set_up(self) -> None:
        options, env = self._options, self._env
        self._action = action_codec(env.single_action_space, categorical=options.categorical)
        self._codec = ObservationCodec(
            env.single_observation_space, categorical=bool(options.categorical)
        )
        keys = options.info_keys
        self._infos = InfoReader(keys, list(self._codec.specs)) if keys else None
        extra = {} if self._infos is None else self._infos.specs
        self.array_specs = {**self._codec.specs, **extra}
        if options.action_mask is not None:
            check_maskable(env.single_action_space)
        # The allowed actions of each environment, where they are masked.
        self._masks: np.ndarray[Any, Any] | None = None

    def reset_arrays(self, mask: np.ndarray[Any, Any] | None = None) -> Arrays:
        """Begin an episode where the mask says, if the vector environment has not done so."""
        if mask is None:
            self._is_fresh[:] = False
            return self._observed(*self._env.reset())
        left = mask & ~self._is_fresh
        if not left.any():
            return self._fresh
        if not self._resets_some:
            raise RuntimeError(
                f"{self._env} cannot reset one environment and continue with another, so leave out "
                "max_frames_per_traj, or make it with autoreset_mode="
                "gymnasium.vector.AutoresetMode.DISABLED"
            )
        made = self._observed(*self._env.reset(options={"reset_mask": left}))
        return {
            key: _where(self._is_fresh, self._fresh.get(key, row), row) for key, row in made.items()
        }

    def step_arrays(self, action: np.ndarray[Any, Any]) -> ArrayStep:
        """Act in all of them."""
        given = self._action.decode_batch(action)
        if self._device is not None:
            given = torch.from_numpy(given).to(self._device)
        observation, *rest, infos = self._env.step(given)
        reward, *flags = map(as_numpy, rest)
        self._check_reward(reward)
        terminated, truncated = map(self._flags, flags, ("terminated", "truncated"))
        outcome = self._observed(observation, infos)
        self._is_fresh[:] = False
        if self._mode is AutoresetMode.SAME_STEP:
            self._is_fresh = terminated | truncated
            if self._is_fresh.any():
                self._fresh = outcome
                outcome = self._with_last(outcome, infos)
        return outcome, reward, terminated, truncated

    def sample_action(self) -> np.ndarray[Any, Any]:
        """A random action of the vector environment's own stream; `set_seed` seeds it."""
        if self._masks is None:
            drawn = self._env.action_space.sample()
        else:
            drawn = [self._env.single_action_space.sample(mask) for mask in self._masks]
        samples = self._action.encode_batch(drawn)
        return np.array(samples, dtype=self._action.spec.dtype)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed by a reset; see `GymEnv.set_seed`."""
        self._env.action_space.seed(seed)
        self._env.single_action_space.seed(seed)
        seeds = [seed]
        for _ in range(self._env.num_envs):
            seeds.append(seed if static_seed else next_seed(seeds[-1]))
        # Those that are made of single environments take a seed for each.
        made_of_single = _obeys_masks(self._env.unwrapped)
        first: Any = seeds[:-1] if made_of_single else seed
        self._env.reset(seed=first)
        return seeds[-1]

    def close(self) -> None:
        """Close the vector environment."""
        self.is_closed = True
        self._env.close()

    def _observed(self, observation: Any, infos: Any) -> Arrays:
        observation = self._arrays(observation)
        if self._options.action_mask is not None:
            self._masks = self._masks_of(self._options.action_mask, observation, infos)
        encoded: Arrays = self._codec.encode_batch(observation)
        if self._infos is None:
            return encoded
        return {**encoded, **self._infos.read_batch(infos, self._env.num_envs)}

    def _masks_of(self, key: str, observation: Any, infos: Any) -> np.ndarray[Any, Any]:
        if isinstance(infos, list):
            return np.stack([mask_of(key, None, info) for info in infos])
        masks = mask_of(key, observation, infos)
        # Infos of a vector environment tell which environments gave one.
        given = infos.get(f"_{key}")
        if given is None or self._masks is None:
            return masks
        return np.where(np.asarray(given)[:, None], masks, self._masks)

    def _arrays(self, observation: Any) -> Any:
        """Return observations as arrays; an environment that gives tensors takes them too."""
        if isinstance(observation, torch.Tensor):
            self._device = observation.device
            return as_numpy(observation)
        if isinstance(observation, Mapping):
            return {name: self._arrays(values) for name, values in observation.items()}
        return observation

    def _flags(self, flags: Any, name: str) -> np.ndarray[Any, Any]:
        """Return flags as an array, one for each environment."""
        values = np.asarray(flags)
        if values.shape != self.batch_size or values.dtype.kind not in "biuf":
            wanted = f"{self._env.num_envs} of True or False, one for each environment"
            raise wrong_flag(flags, self._env, name, wanted)
        return values.astype(np.bool_, copy=False)

    def _check_reward(self, reward: Any) -> None:
        """Raise `TypeError` unless there is one for each; numpy gives a single one to all."""
        cause = None
        try:
            if np.shape(reward) == self.batch_size:
                return
        except ValueError as error:
            cause = error
        wanted = f"{self._env.num_envs} numbers, one for each environment"
        raise wrong_reward(reward, self._env, wanted) from cause

    def _with_last(self, outcome: Arrays, infos: Any) -> Arrays:
        """Return the observations, with the last ones of episodes that ended."""
        # Gymnasium's DictInfoToList gives the infos of each environment separately.
        of_each = isinstance(infos, list)
        merged = {key: np.array(row) for key, row in outcome.items()}
        for i in np.flatnonzero(self._is_fresh).tolist():
            last = self._codec.encode(self._last(infos[i] if of_each else infos, i, of_each))
            put_row({key: merged[key] for key in last}, i, last)
            if of_each and self._infos is not None:
                for key, value in self._infos.read(infos[i].get("final_info", {})).items():
                    merged[key][i] = value
        if self._infos is not None and not of_each:
            final = self._infos.read_batch(infos.get("final_info", {}), self._env.num_envs)
            for key, values in final.items():
                merged[key][self._is_fresh] = values[self._is_fresh]
        return merged

    def _last(self, info: Any, i: int, of_each: bool) -> Any:
        """Return what an environment observed last in the episode that has ended."""
        last = info.get("final_obs")
        if last is None:
            raise TypeError(
                f"{self._env} has reset an environment in the step that ended its episode, without "
                "info['final_obs'], so that its last observation is lost; let it give the last "
                "observations there, or reset nothing in step(): make it with autoreset_mode="
                "gymnasium.vector.AutoresetMode.DISABLED"
            )
        last = self._arrays(last)
        return last if of_each else _part(last, i)


def resettable(env: Any) -> Any:
    """Return the vector environment, or one of single environments where it cannot reset a part.

    Args:
        env: a vector environment, made by ``gymnasium.make_vec`` or otherwise.

    Warns:
        UserWarning: another one was made in its place.
    """
    mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
    # With wrappers around it, another one would lack them.
    made_by_id = env is env.unwrapped and env.spec is not None
    if mode is not AutoresetMode.NEXT_STEP or _obeys_masks(env.unwrapped) or not made_by_id:
        return env
    warnings.warn(
        f"{type(env).__name__} resets an environment with the step after its last one, so that "
        f"this step's frame would have no action; single environments of {env.spec.id} are stepped "
        "in its place; type gymnasium.make_vec(…, vectorization_mode='sync') for them",
        stacklevel=2,
    )
    options = {k: v for k, v in env.spec.kwargs.items() if k not in _OF_VECTORS}
    single = gymnasium.make_vec(env.spec.id, env.num_envs, "sync", **options)
    env.close()
    return single


# Arguments of make_vec that it adds to those of the environment.
_OF_VECTORS = ("num_envs", "vectorization_mode")


def _obeys_masks(env: Any) -> bool:
    """Return whether ``reset(options={"reset_mask": …})`` resets a part only."""
    if isinstance(env, AsyncVectorEnv):
        # Its workers forget a reset that is due only where they share memory.
        return bool(env.shared_memory)
    return isinstance(env, SyncVectorEnv)


def _normalizes_all(env: Any) -> bool:
    """Return whether one of the wrappers is Gymnasium's that refuses to reset a part."""
    while isinstance(env, VectorWrapper):
        if isinstance(env, NormalizeObservation):
            return True
        env = env.env
    return False


def _part(batch: Any, i: int) -> Any:
    """Return what one environment has of a batch, which may be a mapping."""
    if isinstance(batch, Mapping):
        return {name: _part(values, i) for name, values in batch.items()}
    return batch[i]


def _where(mask: np.ndarray[Any, Any], yes: Any, no: Any) -> Any:
    return np.where(mask.reshape(mask.shape + (1,) * (np.ndim(no) - 1)), yes, no)
