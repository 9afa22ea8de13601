"""Adapts Gymnasium environments, and records entries of their infos."""

from __future__ import annotations

import inspect
import pickle
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from sync_collector.envs.arrays import (
    REAL,
    ArrayEnv,
    Arrays,
    ArraySpec,
    ArrayStep,
    Stepper,
    as_numpy,
    cast,
    new_rows,
    put_row,
)
from sync_collector.envs.protocol import RESERVED, close_env

#: Names of entries of ``info``, or a mapping from names to a dtype or an `ArraySpec`; the default
#: is a float32 number. A tuple of names is a path into nested dicts.
InfoKeys: TypeAlias = Sequence[Any] | Mapping[Any, Any]


class InfoReader:
    """Reads some entries of ``info``; a missing one is NaN, or 0 for integers.

    Args:
        info_keys: the entries.
        observed: the keys of observations, which entries must not have.

    Raises:
        ValueError: an entry has a name that is used for something else in a frame.

    Example:
        >>> InfoReader(["x"]).read({"x": 1, "y": 2})
        {'x': array(1., dtype=float32)}
    """

    def __init__(self, info_keys: InfoKeys, observed: Sequence[Any] = ()) -> None:
        given = info_keys if isinstance(info_keys, Mapping) else dict.fromkeys(info_keys, "float32")
        self.specs = {key: _spec(key, kind) for key, kind in given.items()}
        for key in self.specs:
            if key in observed or key in RESERVED:
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
            infos: a list of dicts, one per environment, or a dict of arrays with masks.
            number: the number of environments.
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
    values: Any = infos
    given = np.ones(number, np.bool_)
    column = np.stack([_missing(spec)] * number)
    for name in _path(key):
        if not isinstance(values, Mapping) or name not in values:
            return column
        # If only some environments gave the entry, there is also a mask.
        given = given & np.asarray(values.get(f"_{name}", True), np.bool_)
        values = values[name]
    for i in np.flatnonzero(given):
        column[i] = _checked(key, spec, values[i])
    return column


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvOptions:
    """Options that a collector passes to environments; see `GymEnv`.

    Args:
        info_keys: entries of ``info`` to record beside observations.
        categorical: whether discrete values are indices; None to accept what the policy returns.
        action_mask: the entry of the observation or of ``info`` with the mask of allowed actions.
    """

    info_keys: InfoKeys = ()
    categorical: bool | None = None
    action_mask: str | None = None

    def given(self) -> dict[str, Any]:
        """Return the options that are set, by name."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, (), [], {})}

    def joined(self, others: EnvOptions) -> EnvOptions:
        """Merge these options with others.

        Raises:
            ValueError: an option has different values.
        """
        mine, theirs = self.given(), others.given()
        for name in mine.keys() & theirs.keys():
            if mine[name] != theirs[name]:
                raise ValueError(
                    f"the environment was made with {name}={mine[name]!r}, and the collector with "
                    f"{theirs[name]!r}; leave out one of them"
                )
        return EnvOptions(**mine, **{n: v for n, v in theirs.items() if n not in mine})


class GymEnv(ArrayEnv):
    """A Gymnasium environment, or several that are stepped together.

    Observations are under ``"observation"``, those of a Dict space under the keys of the space. A
    reset never hides the last observation of an episode: ``"next"`` has it.

    Args:
        env: the id of a registered environment, or a function that makes one.
        num_envs: the number of environments that are stepped in order as one batch; None for a
            single environment without a batch dimension.
        categorical: whether discrete values are int64 indices or int64 one-hot vectors. By default,
            the policy's first action decides for actions, and other values are one-hot.
        info_keys: entries of ``info`` to record beside observations, such as ``["x_position"]``:
            float32 numbers, NaN for missing ones. A mapping sets the dtype or `ArraySpec` of each,
            and a tuple is a path: ``("episode", "r")``.
        action_mask: the entry of the observation, or of ``info``, that has 1 for each allowed
            action and 0 for others; random actions respect it. Only for Discrete actions.
        **make_options: arguments of ``gymnasium.make``.

    Raises:
        ImportError: gymnasium is not installed.
        TypeError: a space cannot be expressed with arrays.

    Example:
        >>> env = GymEnv("CartPole-v1")
        >>> _ = env.set_seed(0)
        >>> td = env.step(env.rand_action(env.reset()))
        >>> td["action"].dtype, td["next", "observation"].shape
        (torch.int64, torch.Size([4]))
    """

    def __init__(
        self,
        env: str | Callable[[], Any],
        *,
        num_envs: int | None = None,
        categorical: bool | None = None,
        info_keys: InfoKeys = (),
        action_mask: str | None = None,
        **make_options: Any,
    ) -> None:
        make = _maker(env, make_options)
        if num_envs is not None and num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}; give 1 or more, or None for a single one")
        self._envs = [make() for _ in range(1 if num_envs is None else num_envs)]
        self._single = num_envs is None
        self.batch_size = torch.Size(() if num_envs is None else (num_envs,))
        self.is_closed = False
        self._stepper = Stepper()
        first = self._envs[0]
        if hasattr(first, "single_action_space"):
            raise TypeError(
                f"{first!r} is a vector environment, and GymEnv takes single ones; give the "
                "vector environment itself to the collector (create_env_fn=lambda: "
                "gymnasium.make_vec(…, vectorization_mode='sync')), or GymEnv an id and num_envs"
            )
        self._options = EnvOptions(
            categorical=categorical, info_keys=info_keys, action_mask=action_mask
        )
        self._set_up()

    def configure(self, options: EnvOptions) -> None:
        """Set the collector's options; options from the constructor are kept.

        Raises:
            ValueError: an option has another value in the constructor.
        """
        self._options = self._options.joined(options)
        self._set_up()

    def _set_up(self) -> None:
        # Imported here, since gymnasium may not be installed.
        from sync_collector.envs.spaces import ObservationCodec, action_codec, check_maskable

        options, first = self._options, self._envs[0]
        self._action = action_codec(first.action_space, categorical=options.categorical)
        observation = ObservationCodec(
            first.observation_space, categorical=bool(options.categorical)
        )
        self._encode = observation.encode
        keys = options.info_keys
        self._infos = InfoReader(keys, list(observation.specs)) if keys else None
        extra = {} if self._infos is None else self._infos.specs
        self.array_specs = {**observation.specs, **extra}
        if options.action_mask is not None:
            check_maskable(first.action_space)
        # The allowed actions of each environment, if actions are masked.
        self._masks: list[Any] = [None] * len(self._envs)

    @property
    def envs(self) -> tuple[Any, ...]:
        """The Gymnasium environments."""
        return tuple(self._envs)

    def reset_arrays(self, mask: np.ndarray[Any, Any] | None = None) -> Arrays:
        """Begin an episode, in a batch only where the mask is True."""
        if self._single:
            return self._begun(0)
        self._stepper.restart()
        rows = new_rows(self.array_specs, self.batch_size)
        for i in range(len(self._envs)):
            if mask is None or mask[i]:
                put_row(rows, i, self._begun(i))
        return rows

    def step_arrays(self, action: np.ndarray[Any, Any]) -> ArrayStep:
        """Act in each environment."""
        if self._single:
            return self._stepped(0, action)
        return self._stepper.run(self, action, lambda i: self._stepped(i, action[i]))

    def sample_action(self) -> np.ndarray[Any, Any]:
        """Return a random action from each action space; `set_seed` seeds them."""
        drawn = (
            env.action_space.sample() if mask is None else env.action_space.sample(mask)
            for env, mask in zip(self._envs, self._masks, strict=True)
        )
        samples = [self._action.encode(action) for action in drawn]
        return np.array(samples[0] if self._single else samples, dtype=self._action.spec.dtype)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed by ``reset(seed=seed)``; each environment of a batch gets its own seed.

        Args:
            seed: for the first environment; each next one gets a seed derived from it.
            static_seed: give all environments the same seed.

        Returns:
            The seed for the next environment.
        """
        for env in self._envs:
            check_takes_seed(env)
            env.reset(seed=seed)
            env.action_space.seed(seed)
            if not static_seed:
                seed = next_seed(seed)
        return seed

    def save_state(self) -> bytes | None:
        """Return the pickled environments; None if pickling would lose their state.

        MuJoCo and Box2D environments pickle only their constructor arguments.
        """
        if any(map(_is_made_anew, self._envs)):
            return None
        try:
            return pickle.dumps((self._envs, self._masks))
        except Exception:
            # Objects with a lock or a pointer raise exceptions of their own when pickled.
            return None

    def load_state(self, state: bytes) -> None:
        """Restore the pickled environments."""
        self._stepper.restart()
        for env in self._envs:
            close_env(env)
        self._envs, self._masks = pickle.loads(state)

    def close(self) -> None:
        """Close the Gymnasium environments."""
        self.is_closed = True
        for env in self._envs:
            close_env(env)

    def _begun(self, i: int) -> Arrays:
        env = self._envs[i]
        made = env.reset()
        if not isinstance(made, tuple) or len(made) != 2:
            raise _of_another_interface(env, "reset", "the observation and a dict")
        return self._observed(i, made[0], made[1])

    def _stepped(self, i: int, action: np.ndarray[Any, Any]) -> ArrayStep:
        env = self._envs[i]
        made = env.step(self._action.decode(action))
        if not isinstance(made, tuple) or len(made) != 5:
            wanted = "observation, reward, terminated, truncated and a dict"
            raise _of_another_interface(env, "step", wanted)
        observation, reward, terminated, truncated, info = made
        if terminated is not True and terminated is not False:
            terminated = flag_of(terminated, env, "terminated")
        if truncated is not True and truncated is not False:
            truncated = flag_of(truncated, env, "truncated")
        return self._observed(i, observation, info), number_of(reward, env), terminated, truncated

    def _observed(self, i: int, observation: Any, info: Any) -> Arrays:
        if self._options.action_mask is not None:
            from sync_collector.envs.spaces import mask_of

            self._masks[i] = mask_of(self._options.action_mask, observation, info)
        encoded = self._encode(observation)
        return encoded if self._infos is None else {**encoded, **self._infos.read(info)}


def _is_made_anew(env: Any) -> bool:
    """Return whether an environment pickles only its constructor's arguments."""
    from gymnasium import Wrapper
    from gymnasium.utils import EzPickle

    while isinstance(env, Wrapper) and not isinstance(env, EzPickle):
        env = env.env
    return isinstance(env, EzPickle)


def _of_another_interface(env: Any, method: str, wanted: str) -> TypeError:
    return TypeError(
        f"{type(env).__name__}.{method}() must return {wanted}, as those of Gymnasium's "
        "environments do; those of gym, its predecessor, return one value less"
    )


def unwrapped(env: Any) -> Any:
    """Return the environment inside Gymnasium wrappers, or the environment itself."""
    return getattr(env, "unwrapped", env)


def check_takes_seed(env: Any) -> None:
    """Raise `TypeError` unless an environment can be seeded."""
    arguments = inspect.signature(env.reset).parameters
    if not ("seed" in arguments or any(a.kind is a.VAR_KEYWORD for a in arguments.values())):
        raise TypeError(
            f"{type(env).__name__}.reset() takes no seed; write it as Gymnasium's environments do: "
            "reset(self, *, seed=None, options=None)"
        )


def wrong_reward(reward: Any, env: Any, wanted: str) -> TypeError:
    """Return the error about a reward that is not a number."""
    given = " ".join(reprlib.repr(reward).split())
    return TypeError(
        f"{type(unwrapped(env)).__name__} gave the reward {given}; let its step() return {wanted}"
    )


def number_of(reward: Any, env: Any) -> float:
    """Return a reward without the dimension of size 1 that some environments add."""
    try:
        return float(reward.reshape(()) if isinstance(reward, np.ndarray) else reward)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise wrong_reward(reward, env, "a number") from error


def wrong_flag(flag: Any, env: Any, name: str, wanted: str) -> TypeError:
    """Return the error about a flag that is neither True nor False."""
    given = " ".join(reprlib.repr(flag).split())
    return TypeError(
        f"{type(unwrapped(env)).__name__} gave {given} for {name!r}; let its step() return {wanted}"
    )


def flag_of(flag: Any, env: Any, name: str) -> bool:
    """Return a flag, such as one of numpy or torch, as a bool."""
    value = np.asarray(as_numpy(flag))
    if value.size != 1 or value.dtype.kind not in REAL or value.item() not in (0, 1):
        raise wrong_flag(flag, env, name, "True or False")
    return bool(value.item())


def next_seed(seed: int) -> int:
    """Return a seed for the next environment, with unrelated random numbers.

    Example:
        >>> next_seed(0), next_seed(1)
        (2968811710, 1835504127)
    """
    return int(np.random.SeedSequence(seed).generate_state(1)[0])


def _maker(env: str | Callable[[], Any], options: dict[str, Any]) -> Callable[[], Any]:
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError(
            "GymEnv needs gymnasium; type: pip install 'sync-collector[gym]'"
        ) from error
    if not isinstance(env, str):
        if options:
            raise TypeError(f"options {sorted(options)} go with an id; {env!r} takes none")
        return env
    # Gymnasium's checker tests for mistakes of an environment's author at each step.
    return lambda: gymnasium.make(env, **{"disable_env_checker": True, **options})
