"""Entries of Gymnasium's ``info``, recorded beside observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from sync_collector.envs.arrays import Arrays, ArraySpec, as_numpy, cast
from sync_collector.envs.protocol import FLAGS

#: The names of entries, whose values are float32 numbers; or a dtype or an `ArraySpec` for each. A
#: tuple of names is a path into nested dicts.
InfoKeys: TypeAlias = Sequence[Any] | Mapping[Any, Any]

_RESERVED = {*FLAGS, "reward", "action", "next", "collector", "policy_version"}


class InfoReader:
    """Reads some entries of ``info``; where one is missing, it is NaN, or 0 for integers.

    Args:
        info_keys: which entries.
        observed: the keys of observations, which no entry may have.

    Raises:
        ValueError: an entry has the name of something else in a frame.

    Example:
        >>> InfoReader(["x"]).read({"x": 1, "y": 2})
        {'x': array(1., dtype=float32)}
    """

    def __init__(self, info_keys: InfoKeys, observed: Sequence[Any] = ()) -> None:
        given = info_keys if isinstance(info_keys, Mapping) else dict.fromkeys(info_keys, "float32")
        self.specs = {key: _spec(key, kind) for key, kind in given.items()}
        for key in self.specs:
            if key in observed or key in _RESERVED:
                raise ValueError(
                    f"info_keys has {key!r}, which is the name of something else in a frame; let "
                    "the environment give it under another name"
                )

    def read(self, info: Mapping[str, Any]) -> Arrays:
        """Return the entries of one environment's ``info``."""
        return {key: self._value(key, spec, info) for key, spec in self.specs.items()}

    def read_batch(self, infos: Any, number: int) -> dict[Any, np.ndarray[Any, Any]]:
        """Return the entries of a vector environment's infos.

        Args:
            infos: a list with a dict for each environment, or a dict of arrays with masks.
            number: how many environments there are.
        """
        if isinstance(infos, Mapping):
            return {key: _column(key, spec, infos, number) for key, spec in self.specs.items()}
        rows = [self.read(info) for info in infos]
        return {key: np.stack([row[key] for row in rows]) for key in self.specs}

    def _value(self, key: Any, spec: ArraySpec, info: Any) -> np.ndarray[Any, Any]:
        for name in _path(key):
            if not isinstance(info, Mapping) or name not in info:
                return _missing(spec)
            info = info[name]
        return _checked(key, spec, info)


def _spec(key: Any, kind: Any) -> ArraySpec:
    if isinstance(kind, ArraySpec):
        return replace(kind, info=True)
    try:
        return ArraySpec((), np.dtype(kind), info=True)
    except TypeError as error:
        raise TypeError(
            f"info_keys has {kind!r} for {key!r}; give a dtype such as 'float32' or 'bool', or an "
            "ArraySpec with shape and dtype"
        ) from error


def _path(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _missing(spec: ArraySpec) -> np.ndarray[Any, Any]:
    value = np.nan if np.issubdtype(spec.dtype, np.inexact) else 0
    return np.full(spec.shape, value, spec.dtype)


def _checked(key: Any, spec: ArraySpec, value: Any) -> np.ndarray[Any, Any]:
    try:
        array = cast(as_numpy(value), spec.dtype)
    except (TypeError, ValueError) as error:
        raise _unfit(key, spec, value) from error
    if array.shape != spec.shape:
        raise _unfit(key, spec, value)
    return array


def _unfit(key: Any, spec: ArraySpec, value: Any) -> TypeError:
    return TypeError(
        f"info has {value!r} for {key!r}, not a {spec.dtype} of the shape {spec.shape}; write "
        f"info_keys={{{key!r}: ArraySpec(shape, dtype)}}, or leave it out"
    )


def _column(
    key: Any, spec: ArraySpec, infos: Mapping[str, Any], number: int
) -> np.ndarray[Any, Any]:
    *outer, name = _path(key)
    column = np.stack([_missing(spec)] * number)
    for each in outer:
        infos = infos.get(each, {})
    if name in infos:
        # An entry that only some environments gave has a mask beside it.
        mask = infos.get(f"_{name}", np.ones(number, np.bool_))
        for i in np.flatnonzero(mask):
            column[i] = _checked(key, spec, infos[name][i])
    return column
