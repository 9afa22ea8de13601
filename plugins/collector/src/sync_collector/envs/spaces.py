"""Converts values of Gymnasium spaces to arrays and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from itertools import pairwise
from operator import getitem
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from sync_collector.envs.arrays import ArraySpec, OtherValueError, as_numpy, cast, lacking
from sync_collector.envs.protocol import RESERVED

Array: TypeAlias = np.ndarray[Any, Any]
Key: TypeAlias = str | tuple[str, ...]


class Codec(ABC):
    """Converts the values of one space."""

    spec: ArraySpec

    @abstractmethod
    def encode(self, value: Any) -> Any:
        """Return a value of the space as an array."""

    @abstractmethod
    def decode(self, array: Array) -> Any:
        """Return the value of the space that an array encodes."""

    def encode_batch(self, values: Any) -> Any:
        """Return several values of the space as one array."""
        return np.stack([self.encode(value) for value in values])

    def decode_batch(self, arrays: Array) -> Any:
        """Return several values of the space in the form of Gymnasium's vector environments."""
        return np.array([self.decode(array) for array in arrays])


class Same(Codec):
    """For Box and similar spaces, whose values are arrays already."""

    def __init__(self, space: Any) -> None:
        self.spec = ArraySpec(tuple(space.shape), np.dtype(space.dtype))
        self._space = space
        # Whether a cast from another dtype may lose the value; floats may be rounded to floats.
        self._is_exact = self.spec.dtype.kind in "biu"
        self._is_binary = isinstance(space, spaces.MultiBinary)

    def encode(self, value: Any) -> Any:
        if self._is_exact and (type(value) is not np.ndarray or value.dtype != self.spec.dtype):
            return self._cast(as_numpy(value), "observation", _FIT_OBSERVATION)
        return value

    def encode_batch(self, values: Any) -> Any:
        return self.encode(values)

    def decode(self, array: Array) -> Any:
        _check_shape(array, self.spec)
        return self._decoded(array)

    def decode_batch(self, arrays: Array) -> Any:
        _check_shape(arrays[0], self.spec)
        return self._decoded(arrays)

    def _decoded(self, array: Array) -> Any:
        # For such short arrays, a set is faster than numpy.
        if self._is_binary and not _BINARY.issuperset(array.ravel().tolist()):
            raise _outside("action", f"{array.tolist()}", self._space, _FIT_BINARY)
        if self._is_binary or not self._is_exact or array.dtype == self.spec.dtype:
            # Copied, since an environment that keeps its action would see the next one in the same
            # memory.
            return array.astype(self.spec.dtype)
        return self._cast(array, "action", _FIT_INTEGER)

    def _cast(self, value: Any, what: str, advice: str) -> Array:
        try:
            return cast(value, self.spec.dtype)
        except OtherValueError as error:
            raise _outside(what, str(error), self._space, advice) from error


class Index(Codec):
    """A discrete space, encoded as an index from 0."""

    def __init__(self, space: Any) -> None:
        self._space = space
        self._n, self._start = int(space.n), int(space.start)
        self.spec = ArraySpec((), np.dtype(np.int64))

    def encode(self, value: Any) -> Any:
        return _index(value, self._space, self._n, self._start)

    def encode_batch(self, values: Any) -> Any:
        return _observed_indices(values, self._n, self._start, self._space)

    def decode(self, array: Array) -> Any:
        if array.size != 1 or array.dtype.kind not in "iu":
            raise TypeError(
                f"a categorical action is one integer, not {array.dtype} of shape {array.shape}; "
                "leave out categorical=True if the policy gives one-hot actions"
            )
        index = array.item()
        if not 0 <= index < self._n:
            raise _outside("action", str(index), self._space, f"{_FIT_INDEX} {self._n - 1}")
        return index + self._start

    def decode_batch(self, arrays: Array) -> Any:
        outside = (arrays < 0) | (arrays >= self._n)
        if arrays.size != len(arrays) or arrays.dtype.kind not in "iu" or outside.any():
            return super().decode_batch(arrays)
        return arrays.reshape(-1).astype(np.int64) + self._start


class Indices(Codec):
    """A MultiDiscrete space, encoded as indices from 0."""

    def __init__(self, space: Any) -> None:
        self._space = space
        self._sizes, self._start = space.nvec, getattr(space, "start", 0)
        self._dtype = space.dtype
        self.spec = ArraySpec(tuple(space.shape), np.dtype(np.int64))

    def encode(self, value: Any) -> Any:
        return self.encode_batch(value)

    def encode_batch(self, values: Any) -> Any:
        return _observed_indices(values, self._sizes, self._start, self._space)

    def decode(self, array: Array) -> Any:
        _check_shape(array, self.spec)
        if array.dtype.kind not in "iu":
            raise TypeError(f"categorical actions are integers, not {array.dtype}")
        indices = _checked_indices(array, self._sizes, array, self._space, "action")
        return (indices + self._start).astype(self._dtype)


class OneHot(Codec):
    """A discrete space, encoded as a one-hot vector."""

    def __init__(self, space: Any) -> None:
        self._space = space
        self._n, self._start = int(space.n), int(space.start)
        self._rows = np.eye(self._n, dtype=np.int64)
        self.spec = ArraySpec((self._n,), np.dtype(np.int64))

    def encode(self, value: Any) -> Any:
        return self._rows[_index(value, self._space, self._n, self._start)]

    def encode_batch(self, values: Any) -> Any:
        indices = _observed_indices(values, self._n, self._start, self._space)
        return self._rows[indices.astype(np.int64, copy=False)]

    def decode(self, array: Array) -> Any:
        # For such short lists, Python is faster than numpy.
        values = array.tolist()
        if not isinstance(values, list) or len(values) != len(self._rows):
            raise _not_one_hot(values, len(self._rows))
        if values.count(1) != 1 or values.count(0) != len(values) - 1:
            raise _not_one_hot(values, len(self._rows))
        return values.index(1) + self._start

    def decode_batch(self, arrays: Array) -> Any:
        fits = arrays.shape[1:] == (self._n,) and bool(
            (((arrays == 0) | (arrays == 1)).all(-1) & (arrays.sum(-1) == 1)).all()
        )
        if not fits:
            # Decoded one by one, so that the error names the wrong one.
            return super().decode_batch(arrays)
        return arrays.argmax(-1) + self._start


class OneHots(Codec):
    """A MultiDiscrete space, encoded as concatenated one-hot vectors."""

    def __init__(self, space: Any) -> None:
        starts = getattr(space, "start", np.zeros_like(space.nvec))
        self._parts = [
            _Part(int(n), int(start)) for n, start in zip(space.nvec, starts, strict=True)
        ]
        self._cuts = np.cumsum([0, *space.nvec]).tolist()
        self._codecs = [OneHot(part) for part in self._parts]
        self._dtype = space.dtype
        self.spec = ArraySpec((int(self._cuts[-1]),), np.dtype(np.int64))

    def encode(self, value: Any) -> Any:
        pairs = zip(self._codecs, value, strict=True)
        return np.concatenate([codec.encode(part) for codec, part in pairs])

    def decode(self, array: Array) -> Any:
        _check_shape(array, self.spec)
        pieces = [array[begin:end] for begin, end in pairwise(self._cuts)]
        pairs = zip(self._codecs, pieces, strict=True)
        return np.array([codec.decode(piece) for codec, piece in pairs], dtype=self._dtype)


class Inferred(Codec):
    """Discrete actions in the form that the policy returns: one-hot vectors or indices.

    The form is recognised by dtype and shape. Random actions are one-hot until the policy has
    returned an index.

    Args:
        one_hot: the codec of one-hot vectors.
        index: the codec of indices.
    """

    def __init__(self, one_hot: Codec, index: Codec) -> None:
        self._used, self._index = one_hot, index
        self._has_sampled = False
        self.spec = one_hot.spec

    def encode(self, value: Any) -> Any:
        self._has_sampled = True
        return self._used.encode(value)

    def encode_batch(self, values: Any) -> Any:
        self._has_sampled = True
        return self._used.encode_batch(values)

    def decode(self, array: Array) -> Any:
        if array.shape != self.spec.shape and self._used is not self._index:
            self._look_for_index(array)
        return self._used.decode(array)

    def decode_batch(self, arrays: Array) -> Any:
        if arrays.shape[1:] != self.spec.shape and self._used is not self._index:
            self._look_for_index(arrays[0])
        return self._used.decode_batch(arrays)

    def _look_for_index(self, array: Array) -> None:
        alone = self._index.spec.shape == () and array.shape == (1,)
        if array.dtype.kind not in "iu" or not (alone or array.shape == self._index.spec.shape):
            return
        if self._has_sampled:
            raise TypeError(
                "the policy gives actions as indices, and random actions were made as one-hot "
                "vectors; type Collector(…, categorical=True), or GymEnv(…, categorical=True)"
            )
        self._used = self._index


class _Part:
    def __init__(self, n: int, start: int) -> None:
        self.n, self.start = n, start

    def __str__(self) -> str:
        return f"Discrete({self.n}, start={self.start})"


def action_codec(space: Any, *, categorical: bool | None) -> Codec:
    """Return the codec of an action space.

    Args:
        space: a Gymnasium space.
        categorical: whether discrete actions are indices; None to accept what the policy returns.

    Raises:
        TypeError: a kind of space without a codec.
    """
    is_discrete = isinstance(space, spaces.Discrete)
    is_vector = isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1
    if categorical is not None or not (is_discrete or is_vector):
        return codec(space, categorical=bool(categorical))
    return Inferred(codec(space, categorical=False), codec(space, categorical=True))


def codec(space: Any, *, categorical: bool) -> Codec:
    """Return the codec of a space whose values fit one array.

    Args:
        space: a Gymnasium space.
        categorical: whether discrete values are encoded as indices.

    Raises:
        TypeError: a kind of space without a codec.
    """
    kinds: list[tuple[Any, Callable[[Any], Codec]]] = [
        ((spaces.Box, spaces.MultiBinary), Same),
        (spaces.Discrete, Index if categorical else OneHot),
    ]
    if isinstance(space, spaces.MultiDiscrete):
        if categorical:
            return Indices(space)
        if len(space.shape) == 1:
            return OneHots(space)
        raise TypeError(f"one-hot vectors of the space {space} would differ; give categorical=True")
    for kind, make in kinds:
        if isinstance(space, kind):
            return make(space)
    raise TypeError(
        f"no arrays can be made of the space {space}; wrap the environment so that it has Box, "
        "Discrete, MultiDiscrete or MultiBinary spaces (for observations, also a Dict of these)"
    )


class ObservationCodec:
    """Converts observations: a Dict space entry by entry, other spaces as a whole.

    Args:
        space: the observation space; Dicts may be nested.
        categorical: whether discrete values are encoded as indices.

    Raises:
        TypeError: an entry that cannot be expressed with arrays, or whose name is used for
            something else in a batch.
    """

    def __init__(self, space: Any, *, categorical: bool) -> None:
        self._nested = isinstance(space, spaces.Dict)
        leaves = dict(_leaves((), space)) if self._nested else {("observation",): space}
        for name in RESERVED.intersection(path[0] for path in leaves):
            raise TypeError(
                f"{name!r} is observed, and a batch has {name!r} of its own; rename it: "
                "gymnasium.wrappers.TransformObservation"
            )
        codecs = {path: codec(leaf, categorical=categorical) for path, leaf in leaves.items()}
        self.specs = {_key(path): found.spec for path, found in codecs.items()}
        self._encoders = [(_key(path), path, found.encode) for path, found in codecs.items()]
        self._batch_encoders = [
            (_key(path), path, found.encode_batch) for path, found in codecs.items()
        ]

    def encode(self, observation: Any) -> dict[Key, Any]:
        """Return an observation as arrays, by key."""
        if not self._nested:
            key, _, encode = self._encoders[0]
            return {key: encode(observation)}
        return {key: encode(_entry(observation, path)) for key, path, encode in self._encoders}

    def encode_batch(self, observations: Any) -> dict[Key, Any]:
        """Return the observations of a vector environment as arrays, by key."""
        return {
            key: encode(_entry(observations, path) if self._nested else observations)
            for key, path, encode in self._batch_encoders
        }


def _leaves(path: tuple[str, ...], space: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(space, spaces.Dict):
        yield path, space
        return
    for name, subspace in space.items():
        yield from _leaves((*path, name), subspace)


def _entry(observation: Any, path: tuple[str, ...]) -> Any:
    try:
        return reduce(getitem, path, observation)
    except (KeyError, IndexError, TypeError) as error:
        raise lacking(observation, _key(path)) from error


def _key(path: tuple[str, ...]) -> Key:
    return path[0] if len(path) == 1 else path


def _check_shape(array: Array, spec: ArraySpec) -> None:
    if array.shape != spec.shape:
        raise TypeError(f"an action must have the shape {spec.shape}, not {array.shape}")


_FIT_OBSERVATION = (
    "let what changes the observations declare their space: "
    "gymnasium.wrappers.TransformObservation(env, function, space)"
)


def mask_of(key: str, observation: Any, info: Any) -> Array:
    """Return the mask of allowed actions that came with an observation.

    Args:
        key: the name of the mask, looked up in the observation and then in ``info``.
        observation: the observation; of a Dict space if it has the mask.
        info: the ``info`` that came with the observation.

    Raises:
        TypeError: neither has the mask.
    """
    for given in (observation, info):
        if isinstance(given, Mapping) and key in given:
            return np.asarray(as_numpy(given[key])).astype(np.int8)
    raise TypeError(
        f"action_mask={key!r} is neither in the observation nor in info; give the name of the "
        "entry that has 1 for each action that is allowed, and else 0"
    )


def check_maskable(space: Any) -> None:
    """Raise `TypeError` unless random actions of a space can be masked."""
    if not isinstance(space, spaces.Discrete):
        raise TypeError(f"action_mask= is for Discrete actions, and the space is {space}")


_BINARY = frozenset((0, 1))
_FIT_BINARY = "let the policy give 0 and 1, such as (logits > 0).to(torch.int8), or sample them"
_FIT_INTEGER = "let the policy round its actions, and keep them within the space"
_FIT_INDEX = "let the policy give an index from 0 to"


def _index(value: Any, space: Any, n: int, start: int) -> int:
    """Return a discrete observation as an index from 0."""
    try:
        index = int(value) - start
    except (TypeError, ValueError, OverflowError) as error:
        raise _outside("observation", f"{value}", space, _FIT_OBSERVATION) from error
    if not 0 <= index < n or index + start != value:
        raise _outside("observation", f"{value}", space, _FIT_OBSERVATION)
    return index


def _observed_indices(values: Any, sizes: Any, start: Any, space: Any) -> Array:
    """Return discrete observations as indices from 0."""
    given = np.asarray(as_numpy(values))
    # The difference may overflow the dtype of the observations.
    wide = given.astype(np.int64) if given.dtype.kind in "iu" else given
    return _checked_indices(wide - start, sizes, values, space, "observation")


def _checked_indices(indices: Array, sizes: Any, given: Any, space: Any, what: str) -> Array:
    """Return indices from 0; raise if one is outside of its space."""
    fits = (indices >= 0) & (indices < sizes)
    if indices.dtype.kind == "f":
        fits &= indices == np.floor(indices)
    if not fits.all():
        advice = _FIT_OBSERVATION if what == "observation" else f"{_FIT_INDEX} n - 1 for each part"
        raise _outside(what, f"{as_numpy(given)}", space, advice)
    return indices


def _outside(what: str, value: str, space: Any, advice: str) -> TypeError:
    return TypeError(f"the {what} {value} is not in the space {space}; {advice}")


def _not_one_hot(values: Any, size: int) -> TypeError:
    return TypeError(
        f"an action must be one-hot, {size} numbers with a single 1, not {values}; let the policy "
        "choose (torch.nn.functional.one_hot(logits.argmax(-1), n), or sample), or return an index "
        "as an integer"
    )
