"""Environments that compute with numpy arrays, and how they speak TensorDict."""

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

#: Arrays, or what numpy makes arrays of, by key: a string, or a tuple of them if nested.
Arrays: TypeAlias = Mapping[Any, Any]
#: Observations, reward, terminated, truncated: scalars, or arrays of the shape of the batch.
ArrayStep: TypeAlias = tuple[Arrays, Any, Any, Any]

# The kinds of dtypes that hold a value or another one: flags and integers. Floats are rounded.
_EXACT = "biu"
# The kinds that numbers have; a cast from another one, such as complex, loses something.
REAL = "biuf"
_TENSORDICT_METHODS = ("reset", "step", "step_and_maybe_reset", "rand_action")


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One entry of an observation.

    Args:
        shape: its shape, without the batch dimensions of the environment.
        dtype: its dtype. Values of the environment are cast to it; integers and flags that would
            have other values are refused.
        info: whether it is recorded only: no policy is given it for want of another observation.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    info: bool = False


class ArrayEnv(ABC):
    """An environment that gives arrays; a subclass writes the array methods and inherits the rest.

    The TensorDict methods below call the array methods, so it is an `Env` like any other. A
    collector whose policy takes and gives plain tensors calls the array methods itself and so
    makes one TensorDict in a batch, not several in a step. It calls the TensorDict methods as
    soon as a subclass overrides one of them.

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
            mask: for a batch, where: bool, of the shape ``batch_size``. None means everywhere.

        Returns:
            The first observations. Outside the mask, they are not read.
        """

    @abstractmethod
    def step_arrays(self, action: np.ndarray[Any, Any]) -> ArrayStep:
        """Act, and give the true outcome; the caller resets what has ended."""

    def sample_action(self) -> np.ndarray[Any, Any]:
        """A random action; needed only for collecting without a policy."""
        raise NotImplementedError(
            f"{type(self).__name__} has no sample_action(); write it, or give a policy"
        )

    def reset(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        """Begin an episode, in every environment or where ``tensordict["_reset"]`` says."""
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None or mask.all():
            return self._root(self.reset_arrays())
        assert tensordict is not None
        mask = mask.reshape(self.batch_size)
        return self._reset_where(mask, tensordict.exclude("_reset", "next"))

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        """Act as ``tensordict["action"]`` says, and put the outcome under ``"next"``."""
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
        """`step`, and the root of the step after it: begun again where the episode has ended."""
        tensordict = self.step(tensordict)
        root = tensordict["next"].exclude("reward")
        done = root["done"].reshape(self.batch_size)
        if not done.any():
            return tensordict, root
        if done.all():
            return tensordict, self.reset()
        return tensordict, self._reset_where(done, root)

    def rand_action(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        """Put a random action under ``"action"``."""
        if tensordict is None:
            tensordict = TensorDict({}, batch_size=self.batch_size)
        return tensordict.set("action", torch.as_tensor(self.sample_action(), device="cpu"))

    def _root(self, arrays: Arrays) -> TensorDictBase:
        root = self._observation(arrays) | no_flags(self.batch_size)
        return TensorDict(root, batch_size=self.batch_size)

    def _reset_where(self, mask: Tensor, root: TensorDictBase) -> TensorDictBase:
        # Values that a policy carries from step to step are zero where an episode begins.
        merged = root.copy()
        for key in root.keys(include_nested=True, leaves_only=True):
            old = root.get(key)
            merged.set(key, old.masked_fill(spread(mask, old), 0))
        for key, fresh in self._observation(self.reset_arrays(mask.numpy())).items():
            old = root.get(key, fresh)
            merged.set(key, torch.where(spread(mask, fresh), fresh, old))
        return merged.update(no_flags(self.batch_size))

    def _observation(self, arrays: Arrays) -> dict[Any, Tensor]:
        # Copied, since environments may give the array that their next step overwrites.
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
        TypeError: nothing was.
    """
    try:
        return observation[key]
    except KeyError as error:
        raise lacking(observation, key) from error


def lacking(observation: Any, key: Any) -> TypeError:
    """The error about an observation without an entry."""
    return TypeError(
        f"a {type(observation).__name__} was observed without {key!r}, which the environment "
        "declares; let reset() and step() give that in every observation, or take it out of its "
        "space, or spec"
    )


def put_row(rows: Mapping[Any, np.ndarray[Any, Any]], where: int, observation: Arrays) -> None:
    """Write what was observed into a row of each array.

    Raises:
        TypeError: there is more of it, or less, than a row has, or a row would have other values.
    """
    for key, array in rows.items():
        values, row = entry(observation, key), array[where, ...]
        if type(values) is not np.ndarray or (
            values.dtype != row.dtype
            and (row.dtype.kind in _EXACT or values.dtype.kind not in REAL)
        ):
            values = _held(key, as_numpy(values), row)
        # Of too few, numpy would make a row by repeating them.
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
    """Return what was observed as an array of a row's dtype."""
    try:
        return cast(values, row.dtype)
    except OtherValueError as error:
        raise TypeError(
            f"{key!r} was observed with {error}, and the environment declares {row.dtype} of the "
            f"shape {row.shape}; make its space, or spec, and what it gives alike"
        ) from error


class OtherValueError(ValueError):
    """A value that a dtype cannot hold; the message is the value and its own dtype."""


def cast(values: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return values as an array of a dtype; floats may be rounded to other floats.

    Raises:
        OtherValueError: an integer or a flag would be another one, or a value is not a real number.

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
    """Raise `TypeError` for a step without flags, which numpy would take for False."""
    if stepped[2] is None or stepped[3] is None:
        raise TypeError(
            f"{type(env).__name__}.step_arrays() gave None for terminated or truncated; let it "
            "return True or False, or an array of them"
        )


class StepLostError(RuntimeError):
    """A step was cut short, and environments that have acted in it would act twice."""


def new_rows(
    specs: Mapping[Any, ArraySpec], shape: Sequence[int]
) -> dict[Any, np.ndarray[Any, Any]]:
    """Return arrays for the observations of a batch of environments, still without values."""
    return {key: np.empty((*shape, *spec.shape), spec.dtype) for key, spec in specs.items()}


@dataclass(slots=True)
class _Step:
    """A step of several environments: the action, their results, and how many have stepped."""

    action: np.ndarray[Any, Any]
    rows: dict[Any, np.ndarray[Any, Any]]
    reward: np.ndarray[Any, Any]
    terminated: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    made: int = 0


class Stepper:
    """Steps several environments one after the other, as a batch.

    A step that an exception has cut short, in one of them, is continued by the next one with that
    action: the environments before that one do not act twice.
    """

    def __init__(self) -> None:
        self._step: _Step | None = None

    def restart(self) -> None:
        """Begin with the first environment in the next step."""
        self._step = None

    def run(
        self, env: ArrayEnv, action: np.ndarray[Any, Any], step: Callable[[int], ArrayStep]
    ) -> ArrayStep:
        """Return the results of all.

        Args:
            env: the batch.
            action: of each.
            step: steps one, by its place.
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
    """Return a tensor as an array; what is not a tensor is returned as it is."""
    return as_array(values.detach().cpu()) if isinstance(values, Tensor) else values


def as_array(action: Tensor) -> np.ndarray[Any, Any]:
    """An action for `ArrayEnv.step_arrays`."""
    # numpy has no bfloat16, and float32 has all of its values.
    return (action.float() if action.dtype == torch.bfloat16 else action).numpy()


def speaks_arrays(env: object) -> TypeGuard[ArrayEnv]:
    """Return whether stepping an environment by its array methods is the same as by its others."""
    return isinstance(env, ArrayEnv) and all(
        getattr(type(env), name) is getattr(ArrayEnv, name) for name in _TENSORDICT_METHODS
    )
