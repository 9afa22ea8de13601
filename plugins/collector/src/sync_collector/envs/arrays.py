"""Environments that compute with numpy arrays, and their TensorDict methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeGuard

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from sync_collector.envs.normal import no_flags, outcome_of, spread

#: Arrays, or values that numpy converts to arrays, by key: a string, or a tuple for a nested one.
Arrays: TypeAlias = Mapping[Any, Any]
#: Observations, reward, terminated, truncated: scalars, or arrays of the batch shape.
ArrayStep: TypeAlias = tuple[Arrays, Any, Any, Any]

# The dtype kinds whose values must be preserved exactly: flags and integers. Floats are rounded.
_EXACT = "biu"
# The dtype kinds of real numbers; a cast from another kind, such as complex, loses information.
REAL = "biuf"
_TENSORDICT_METHODS = ("reset", "step", "step_and_maybe_reset", "rand_action")


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One entry of an observation.

    Args:
        shape: the shape without the batch dimensions of the environment.
        dtype: the dtype to which values are cast; integers and flags whose value would change are
            refused.
        info: whether the entry is only recorded and not chosen as the single observation of a
            policy.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    info: bool = False


class ArrayEnv(ABC):
    """Base class of environments that return arrays; a subclass writes only the array methods.

    The TensorDict methods call the array methods, so an instance is an `Env`. If the policy takes
    and returns plain tensors, a collector calls the array methods directly and makes one TensorDict
    per batch instead of several per step. If a subclass overrides a TensorDict method, the
    collector calls the TensorDict methods.

    Example:
        >>> class Coin(ArrayEnv):
        ...     array_specs = {"observation": ArraySpec((1,), np.dtype(np.float32))}
        ...     def reset_arrays(self, mask=None):
        ...         return {"observation": np.zeros(1, np.float32)}
        ...     def step_arrays(self, action):
        ...         return {"observation": action}, float(action[0]), True, False
        >>> td = Coin().reset().set("action", torch.ones(1))
        >>> Coin().step(td)["next", "reward"]
        tensor([1.])
    """

    batch_size: torch.Size = torch.Size()
    device: ClassVar[None] = None

    #: The entries of an observation, by key.
    array_specs: Mapping[Any, ArraySpec]

    @abstractmethod
    def reset_arrays(self, mask: np.ndarray[Any, Any] | None = None) -> Arrays:
        """Begin an episode.

        Args:
            mask: where to begin an episode in a batch: bool, of the shape ``batch_size``. None
                means everywhere.

        Returns:
            The first observations. Values outside the mask are ignored.
        """

    @abstractmethod
    def step_arrays(self, action: np.ndarray[Any, Any]) -> ArrayStep:
        """Act, and return the true outcome; the caller resets ended episodes."""

    def sample_action(self) -> np.ndarray[Any, Any]:
        """Return a random action; needed only for collecting without a policy."""
        raise NotImplementedError(
            f"{type(self).__name__} has no sample_action(); write it, or give a policy"
        )

    def reset(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        """Begin an episode in every environment, or only where ``tensordict["_reset"]`` is set."""
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None or mask.all():
            return self._root(self.reset_arrays())
        assert tensordict is not None
        mask = mask.reshape(self.batch_size)
        return self._reset_where(mask, tensordict.exclude("_reset", "next"))

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        """Act with ``tensordict["action"]``, and put the outcome under ``"next"``."""
        step = self.step_arrays(as_array(tensordict["action"].detach().cpu()))
        observation, reward, terminated, truncated = step
        outcome = self._observation(observation)
        outcome |= outcome_of(
            self._values(reward, torch.float32),
            self._values(terminated, torch.bool),
            self._values(truncated, torch.bool),
        )
        following = tensordict.get("next", TensorDict({}, batch_size=self.batch_size))
        return tensordict.set("next", following.update(outcome))

    def step_and_maybe_reset(
        self, tensordict: TensorDictBase, /
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Call `step`; also return the root of the next step, reset where the episode ended."""
        tensordict = self.step(tensordict)
        root = tensordict["next"].exclude("reward")
        done = root["done"].reshape(self.batch_size)
        if not done.any():
            return tensordict, root
        if done.all():
            return tensordict, self.reset()
        return tensordict, self._reset_where(done, root)

    def rand_action(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        """Set a random action under ``"action"``."""
        if tensordict is None:
            tensordict = TensorDict({}, batch_size=self.batch_size)
        return tensordict.set("action", torch.as_tensor(self.sample_action(), device="cpu"))

    def _root(self, arrays: Arrays) -> TensorDictBase:
        root = self._observation(arrays) | no_flags(self.batch_size)
        return TensorDict(root, batch_size=self.batch_size)

    def _reset_where(self, mask: Tensor, root: TensorDictBase) -> TensorDictBase:
        # Values that a policy carries from step to step are zero at the start of an episode.
        merged = root.copy()
        for key in root.keys(include_nested=True, leaves_only=True):
            old = root.get(key)
            merged.set(key, old.masked_fill(spread(mask, old), 0))
        for key, fresh in self._observation(self.reset_arrays(mask.numpy())).items():
            old = root.get(key, fresh)
            merged.set(key, torch.where(spread(mask, fresh), fresh, old))
        return merged.update(no_flags(self.batch_size))

    def _observation(self, arrays: Arrays) -> dict[Any, Tensor]:
        # Copied, since the environment may overwrite the array in its next step.
        rows = {
            key: np.empty((1, *self.batch_size, *spec.shape), spec.dtype)
            for key, spec in self.array_specs.items()
        }
        put_row(rows, 0, arrays)
        return {key: torch.from_numpy(array[0, ...]) for key, array in rows.items()}

    def _values(self, values: Any, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device="cpu").reshape(self.batch_size)


def entry(observation: Arrays, key: Any) -> Any:
    """Return the observations under a key.

    Raises:
        TypeError: the key is missing.
    """
    try:
        return observation[key]
    except KeyError as error:
        raise lacking(observation, key) from error


def lacking(observation: Any, key: Any) -> TypeError:
    """Return the error about an observation without an entry."""
    return TypeError(
        f"a {type(observation).__name__} was observed without {key!r}, which the environment "
        "declares; let reset() and step() give that in every observation, or take it out of its "
        "space, or spec"
    )


def put_row(rows: Mapping[Any, np.ndarray[Any, Any]], where: int, observation: Arrays) -> None:
    """Write an observation into a row of each array.

    Raises:
        TypeError: the shape does not fit the row, or the dtype would change a value.
    """
    for key, array in rows.items():
        values, row = entry(observation, key), array[where, ...]
        if type(values) is not np.ndarray or (
            values.dtype != row.dtype
            and (row.dtype.kind in _EXACT or values.dtype.kind not in REAL)
        ):
            values = _held(key, as_numpy(values), row)
        # Checked, since numpy would broadcast an observation that is too small.
        if values.size != row.size:
            raise _of_another_shape(key, values, row)
        try:
            row[...] = values
        except ValueError as error:
            raise _of_another_shape(key, values, row) from error


def _of_another_shape(key: Any, values: Any, row: Any) -> TypeError:
    return TypeError(
        f"{key!r} was observed with the shape {values.shape}, and the environment declares "
        f"{row.shape}; make its space, or spec, and what it gives alike"
    )


def _held(key: Any, values: Any, row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an observation as an array of a row's dtype."""
    try:
        return cast(values, row.dtype)
    except OtherValueError as error:
        raise TypeError(
            f"{key!r} was observed with {error}, and the environment declares {row.dtype} of the "
            f"shape {row.shape}; make its space, or spec, and what it gives alike"
        ) from error


class OtherValueError(ValueError):
    """A value that a dtype cannot hold; the message has the value and its dtype."""


def cast(values: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return values as an array of a dtype; floats may be rounded to other floats.

    Raises:
        OtherValueError: an integer or a flag would change, or a value is not a real number.

    Example:
        >>> cast([0.0, 2.0], np.dtype(np.uint8))
        array([0, 2], dtype=uint8)
        >>> cast([0.0, 0.5], np.dtype(np.uint8))
        Traceback (most recent call last):
        sync_collector.envs.arrays.OtherValueError: 0.5 (float64)
    """
    given = np.asarray(values)
    if given.dtype.kind not in REAL and given.dtype != dtype:
        odd = [each for each in given.flat if not isinstance(each, (int, float, np.number))]
        if odd or given.dtype.kind == "c":
            raise OtherValueError(f"{(odd or given.flat)[0]!r} ({given.dtype})")
    if dtype.kind not in _EXACT or given.dtype == dtype:
        return given.astype(dtype, copy=False)
    with np.errstate(invalid="ignore"):
        made = given.astype(dtype)
    differs = made != given
    if differs.any():
        raise OtherValueError(f"{given[differs].flat[0]} ({given.dtype})")
    return made


def check_flags(env: object, stepped: ArrayStep) -> None:
    """Raise `TypeError` for a step without flags, which numpy would convert to False."""
    if stepped[2] is None or stepped[3] is None:
        raise TypeError(
            f"{type(env).__name__}.step_arrays() gave None for terminated or truncated; let it "
            "return True or False, or an array of them"
        )


class StepLostError(RuntimeError):
    """A step was interrupted, and repeating it would step some environments twice."""


def new_rows(
    specs: Mapping[Any, ArraySpec], shape: Sequence[int]
) -> dict[Any, np.ndarray[Any, Any]]:
    """Return empty arrays for the observations of a batch of environments."""
    return {key: np.empty((*shape, *spec.shape), spec.dtype) for key, spec in specs.items()}


@dataclass(slots=True)
class _Step:
    """A step of several environments: the action, the results, and the number of stepped ones."""

    action: np.ndarray[Any, Any]
    rows: dict[Any, np.ndarray[Any, Any]]
    reward: np.ndarray[Any, Any]
    terminated: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    made: int = 0


class Stepper:
    """Steps several environments in order, as a batch.

    If an exception in an environment interrupts a step, the next step with the same action
    continues it, so that no environment is stepped twice.
    """

    def __init__(self) -> None:
        self._step: _Step | None = None

    def restart(self) -> None:
        """Start the next step with the first environment."""
        self._step = None

    def run(
        self, env: ArrayEnv, action: np.ndarray[Any, Any], step: Callable[[int], ArrayStep]
    ) -> ArrayStep:
        """Return the results of all environments.

        Args:
            env: the batched environment.
            action: the actions, one per environment.
            step: steps one environment, by index.
        """
        made = self._step
        if made is None or not np.array_equal(made.action, action):
            shape = env.batch_size
            rows, reward = new_rows(env.array_specs, shape), np.empty(shape, np.float32)
            made = self._step = _Step(action.copy(), rows, reward, *np.empty((2, *shape), np.bool_))
        while made.made < len(made.reward):
            i = made.made
            observation, made.reward[i], made.terminated[i], made.truncated[i] = step(i)
            put_row(made.rows, i, observation)
            made.made += 1
        self._step = None
        return made.rows, made.reward, made.terminated, made.truncated


def as_numpy(values: Any) -> Any:
    """Return a tensor as an array, and other values unchanged."""
    return as_array(values.detach().cpu()) if isinstance(values, Tensor) else values


def as_array(action: Tensor) -> np.ndarray[Any, Any]:
    """Return an action as an array for `ArrayEnv.step_arrays`."""
    # numpy has no bfloat16; float32 represents all of its values.
    return (action.float() if action.dtype == torch.bfloat16 else action).numpy()


def speaks_arrays(env: object) -> TypeGuard[ArrayEnv]:
    """Return whether an environment's array methods are equivalent to its TensorDict methods."""
    return isinstance(env, ArrayEnv) and all(
        getattr(type(env), name) is getattr(ArrayEnv, name) for name in _TENSORDICT_METHODS
    )
