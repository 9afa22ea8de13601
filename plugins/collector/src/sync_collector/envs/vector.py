"""Adapts Gymnasium's vector environments."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.vector import (
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
)

from sync_collector.envs.arrays import (
    REAL,
    ArrayEnv,
    Arrays,
    ArrayStep,
    StepLostError,
    as_numpy,
    put_row,
)
from sync_collector.envs.gym import (
    EnvOptions,
    InfoKeys,
    InfoReader,
    next_seed,
    wrong_flag,
    wrong_reward,
)
from sync_collector.envs.simulators import autoreset_mode, obeys_masks, takes_seeds
from sync_collector.envs.spaces import (
    ObservationCodec,
    action_codec,
    check_maskable,
    mask_of,
)


class VectorGymEnv(ArrayEnv):
    """A Gymnasium vector environment as one batch; supports all autoreset modes.

    The last observation of an episode is under ``"next"``, and no frame is spent on a reset: a
    vector environment that would reset in the next step is reset before that step.

    Args:
        env: the vector environment.
        categorical: see `GymEnv`.
        info_keys: see `GymEnv`.
        action_mask: see `GymEnv`.

    Raises:
        TypeError: it resets only in the next step and cannot be reset earlier, or it cannot reset a
            part.

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
        self._mode = autoreset_mode(env)
        self._resets_some = self._mode is AutoresetMode.DISABLED or obeys_masks(env)
        if self._mode is AutoresetMode.NEXT_STEP and not self._resets_some:
            raise TypeError(
                f"{env} resets an environment with the step after its last one, so that this "
                "step's frame would be none, and is not known to reset a part; type "
                "gymnasium.make_vec(…, vectorization_mode='sync'), or make it with autoreset_mode="
                "gymnasium.vector.AutoresetMode.SAME_STEP, or with DISABLED if its reset() takes "
                "options={'reset_mask': …}"
            )
        if env.num_envs > 1 and _normalizes_all(env):
            raise TypeError(
                f"{env} normalizes the observations of all its environments together, and cannot "
                "reset one and continue with another; let each normalize its own: type "
                "gymnasium.make_vec(…, vectorization_mode='sync', "
                "wrappers=[gymnasium.wrappers.NormalizeObservation])"
            )
        self.batch_size = torch.Size((env.num_envs,))
        # A simulator of another library may lack this attribute.
        space = getattr(env, "action_space", None)
        self._space = batch_space(env.single_action_space, env.num_envs) if space is None else space
        self.is_closed = False
        self._options = EnvOptions(
            categorical=categorical, info_keys=info_keys, action_mask=action_mask
        )
        self._set_up()
        # The observations after the last step, and where the environment has reset ended episodes.
        self._fresh: Arrays = {}
        self._is_fresh = np.zeros(env.num_envs, np.bool_)
        # The last observations, for simulators that lose the last observation of an episode.
        self._before: Arrays | None = None
        self._warned = False
        self._gives_last = self._mode is not AutoresetMode.SAME_STEP
        # Whether a step has begun and not finished.
        self._is_lost = False
        # The device of actions if the environment returns tensors; None if it returns arrays.
        self._device: torch.device | None = None

    def configure(self, options: EnvOptions) -> None:
        """Set the collector's options; see `GymEnv.configure`."""
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
        added = _added_at_ends(env)
        # The entries that belong to the ended episode even if the next one has begun.
        self._of_ends = {
            key for key in extra if (key[0] if isinstance(key, tuple) else key) in added
        }
        if options.action_mask is not None:
            check_maskable(env.single_action_space)
        # The allowed actions of each environment, if actions are masked.
        self._masks: np.ndarray[Any, Any] | None = None

    def reset_arrays(self, mask: np.ndarray[Any, Any] | None = None) -> Arrays:
        """Begin an episode where the mask is True, unless the environment has already done so."""
        if mask is None:
            self._is_fresh[:] = False
            first = self._observed(*self._env.reset())
            self._is_lost = False
            self._keep(first)
            return first
        left = mask & ~self._is_fresh
        if not left.any():
            return self._fresh
        if not self._resets_some:
            raise RuntimeError(
                f"{self._env} cannot reset one environment and continue with another, so leave out "
                "max_frames_per_traj, or make it with autoreset_mode="
                "gymnasium.vector.AutoresetMode.DISABLED"
            )
        with _others_kept(self._env, left):
            made = self._observed(*self._env.reset(options={"reset_mask": left}))
        return {
            key: _where(self._is_fresh, self._fresh.get(key, row), row) for key, row in made.items()
        }

    def step_arrays(self, action: np.ndarray[Any, Any]) -> ArrayStep:
        """Act in all environments.

        Raises:
            StepLostError: the last step was interrupted; reset all environments.
        """
        given = self._action.decode_batch(action)
        if self._device is not None:
            given = torch.from_numpy(given).to(self._device)
        if self._is_lost:
            raise StepLostError(
                f"the last step of {self._env} was cut short, by Ctrl-C or an error, and some of "
                "its environments may have acted; reset all of them: reset()"
            )
        self._is_lost = True
        observation, *rest, infos = self._env.step(given)
        reward, *flags = map(as_numpy, rest)
        self._check_reward(reward)
        terminated, truncated = map(self._flags, flags, ("terminated", "truncated"))
        outcome = self._observed(observation, infos)
        self._is_fresh[:] = False
        if self._mode is AutoresetMode.SAME_STEP:
            self._is_fresh = terminated | truncated
            if self._is_fresh.any():
                self._fresh = self._begun(outcome)
                outcome = self._with_last(outcome, infos)
            self._keep(self._fresh if self._is_fresh.any() else outcome)
        self._is_lost = False
        return outcome, reward, terminated, truncated

    def sample_action(self) -> np.ndarray[Any, Any]:
        """Return a random action of the vector environment's action space; `set_seed` seeds it."""
        if self._masks is None:
            drawn = self._space.sample()
        else:
            drawn = [self._env.single_action_space.sample(mask) for mask in self._masks]
        samples = self._action.encode_batch(drawn)
        return np.array(samples, dtype=self._action.spec.dtype)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed by a reset; see `GymEnv.set_seed`."""
        self._space.seed(seed)
        self._env.single_action_space.seed(seed)
        seeds = [seed]
        for _ in range(self._env.num_envs):
            seeds.append(seed if static_seed else next_seed(seeds[-1]))
        # Those made of single environments accept a seed for each.
        first: Any = seeds[:-1] if takes_seeds(self._env) else seed
        self._env.reset(seed=first)
        return seeds[-1]

    def close(self) -> None:
        """Close the vector environment."""
        self.is_closed = True
        if (close := getattr(self._env, "close", None)) is not None:
            close()

    def _observed(self, observation: Any, infos: Any) -> Arrays:
        observation = self._arrays(observation)
        if self._options.action_mask is not None:
            self._masks = self._masks_of(self._options.action_mask, observation, infos)
        encoded: Arrays = self._codec.encode_batch(observation)
        if self._infos is None:
            return encoded
        return {**encoded, **self._infos.read_batch(infos, self._env.num_envs)}

    def _masks_of(self, key: str, observation: Any, infos: Any) -> np.ndarray[Any, Any]:
        if isinstance(observation, Mapping) and key in observation:
            return mask_of(key, observation, infos)
        if isinstance(infos, list):
            # After a partial reset, the other environments returned no entry.
            before: Any = [None] * len(infos) if self._masks is None else self._masks
            return np.stack(
                [
                    mask_of(key, None, info) if mask is None or key in info else mask
                    for mask, info in zip(before, infos, strict=True)
                ]
            )
        masks = mask_of(key, observation, infos)
        # The infos of a vector environment have a mask of the environments that gave an entry.
        given = infos.get(f"_{key}")
        if given is None or self._masks is None:
            return masks
        return np.where(np.asarray(given)[:, None], masks, self._masks)

    def _arrays(self, observation: Any) -> Any:
        """Return observations as arrays; if they are tensors, remember their device for actions."""
        if isinstance(observation, torch.Tensor):
            self._device = observation.device
            return as_numpy(observation)
        if isinstance(observation, Mapping):
            return {name: self._arrays(values) for name, values in observation.items()}
        return observation

    def _flags(self, flags: Any, name: str) -> np.ndarray[Any, Any]:
        """Return flags as an array, one for each environment."""
        values = np.asarray(flags)
        fits = values.shape == self.batch_size and values.dtype.kind in REAL
        if not fits or (values.dtype != np.bool_ and not np.isin(values, (0, 1)).all()):
            wanted = f"{self._env.num_envs} of True or False, one for each environment"
            raise wrong_flag(flags, self._env, name, wanted)
        return values.astype(np.bool_, copy=False)

    def _check_reward(self, reward: Any) -> None:
        """Raise `TypeError` unless each environment has a reward; numpy would broadcast one."""
        cause = None
        try:
            given = np.asarray(reward)
            if given.shape == self.batch_size and given.dtype.kind in REAL:
                return
        except ValueError as error:
            cause = error
        wanted = f"{self._env.num_envs} numbers, one for each environment"
        raise wrong_reward(reward, self._env, wanted) from cause

    def _keep(self, seen: Arrays) -> None:
        """Keep a copy, since the next step may overwrite the array."""
        if not self._gives_last:
            self._before = {key: np.array(row) for key, row in seen.items()}

    def _begun(self, outcome: Arrays) -> Arrays:
        """Return the first observations of the episodes."""
        if self._infos is None:
            return outcome
        lacking = self._infos.read_batch({}, self._env.num_envs)
        return {**outcome, **{key: lacking[key] for key in self._of_ends}}

    def _with_last(self, outcome: Arrays, infos: Any) -> Arrays:
        """Return the observations, with the last ones of ended episodes in place."""
        merged = {key: np.array(row) for key, row in outcome.items()}
        # Gymnasium's DictInfoToList returns a separate dict of infos for each environment.
        if isinstance(infos, list):
            for i in np.flatnonzero(self._is_fresh).tolist():
                self._put_last(merged, i, _last_of(infos[i]))
                if self._infos is not None:
                    final_info = self._infos.read(infos[i].get("final_info", {}))
                    for key in final_info.keys() - self._of_ends:
                        merged[key][i] = final_info[key]
            return merged
        last = _last_of(infos)
        if last is None or _is_batch(last):
            self._put_all_last(merged, None if last is None else self._arrays(last))
        else:
            for i in np.flatnonzero(self._is_fresh).tolist():
                self._put_last(merged, i, _part(last, i))
        if self._infos is not None:
            final = self._infos.read_batch(infos.get("final_info", {}), self._env.num_envs)
            for key in final.keys() - self._of_ends:
                merged[key][self._is_fresh] = final[key][self._is_fresh]
        return merged

    def _put_all_last(self, rows: dict[Any, Any], last: Any) -> None:
        """Write the last observations of ended episodes; if missing, those of the step before."""
        where = self._is_fresh
        if last is None:
            self._warn_of_lost()
            assert self._before is not None
            encoded: Arrays = {key: values[where] for key, values in self._before.items()}
        else:
            self._gives_last = True
            encoded = self._codec.encode_batch(_part(last, where))
        for key in self._codec.specs:
            rows[key][where] = encoded[key]

    def _put_last(self, rows: dict[Any, Any], i: int, last: Any) -> None:
        """Write the last observation of one environment into its row."""
        if last is None:
            self._warn_of_lost()
            assert self._before is not None
            encoded: Arrays = {key: values[i] for key, values in self._before.items()}
        else:
            self._gives_last = True
            encoded = self._codec.encode(self._arrays(last))
        put_row({key: rows[key] for key in encoded}, i, encoded)

    def _warn_of_lost(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._env} resets an environment in the step that ends its episode, without "
                "info['final_obs']: in ('next', …) of that frame, the observation before the step "
                "stands for the last one, which is lost; let it give the last observations there, "
                "or reset nothing in step(): metadata['autoreset_mode'] = "
                "gymnasium.vector.AutoresetMode.DISABLED",
                stacklevel=2,
            )


def _last_of(info: Mapping[str, Any]) -> Any:
    """Return the last observations in an info, also under their name before Gymnasium 1.0."""
    return info.get("final_obs", info.get("final_observation"))


def _is_batch(values: Any) -> bool:
    """Return whether values are numbers for all environments, not objects for some."""
    if isinstance(values, Mapping):
        return all(map(_is_batch, values.values()))
    return isinstance(values, torch.Tensor) or np.asarray(values).dtype != np.object_


def _normalizes_all(env: Any) -> bool:
    """Return whether one of the wrappers is a Gymnasium wrapper that refuses partial resets."""
    return any(isinstance(wrapper, NormalizeObservation) for wrapper in _wrappers(env))


def _wrappers(env: Any) -> Iterator[Any]:
    while isinstance(env, VectorWrapper):
        yield env
        env = env.env


def _added_at_ends(env: Any) -> set[str]:
    """Return the names of entries that Gymnasium's wrappers add to infos when episodes end."""
    recorders = (each for each in _wrappers(env) if isinstance(each, RecordEpisodeStatistics))
    return {getattr(each, "_stats_key", "episode") for each in recorders}


@contextmanager
def _others_kept(env: Any, mask: np.ndarray[Any, Any]) -> Iterator[None]:
    """For ``with``: a partial reset keeps the sums of the other environments in wrappers.

    Gymnasium's wrappers would reset all their sums: they ignore the mask, or the environment inside
    has already removed it from the options.

    Args:
        env: the vector environment with its wrappers.
        mask: the environments that are reset.
    """
    kept = [
        (wrapper, name, values.copy())
        for wrapper in _wrappers(env)
        if isinstance(wrapper, NormalizeReward | RecordEpisodeStatistics)
        for name, values in vars(wrapper).items()
        if isinstance(values, np.ndarray) and values.shape == mask.shape
    ]
    yield
    for wrapper, name, values in kept:
        setattr(wrapper, name, np.where(mask, getattr(wrapper, name), values))


def _part(batch: Any, i: Any) -> Any:
    """Return the rows of a batch, or of a mapping of batches, of some environments.

    Args:
        batch: the values of all environments.
        i: the index of one environment, or a mask.
    """
    if isinstance(batch, Mapping):
        return {name: _part(values, i) for name, values in batch.items()}
    return batch[i]


def _where(mask: np.ndarray[Any, Any], yes: Any, no: Any) -> Any:
    return np.where(mask.reshape(mask.shape + (1,) * (np.ndim(no) - 1)), yes, no)
