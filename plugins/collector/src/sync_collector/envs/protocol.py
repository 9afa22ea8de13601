"""The interface of environments; any class with these members is one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase, is_tensor_collection

#: The flags of an episode. Each has a trailing dimension of size 1.
FLAGS = ("done", "terminated", "truncated")
#: Keys that stand beside observations in a batch, and that observations must not use.
RESERVED = frozenset({*FLAGS, "action", "reward", "next", "policy_version", "collector"})


class Env(Protocol):
    """An environment, or a batch of them that are stepped together.

    Every flag and the reward have a trailing dimension of size 1; flags are bool, the reward is
    float32, and ``done`` is ``terminated | truncated``.

    An environment may have these optional members:

    - ``step_and_maybe_reset(td)``: call `step` and then reset the ended episodes; return the
      TensorDict of the step and the root of the next one. Without it, a collector calls `reset`,
      with a ``"_reset"`` mask for a batch.
    - ``rand_action(td)``: set a random action in ``td``. A collector without a policy needs this
      method or ``action_spec.rand()``.
    - ``set_seed(seed)``: seed, and return the seed for the next environment.
    - ``save_state()`` and ``load_state(state)``: save and restore the state, as a picklable object;
      None if it cannot be saved. Without them, a collector that continues from a saved state begins
      new episodes.
    - ``close()``, and ``is_closed``.

    TorchRL's ``EnvBase`` has all of them except ``save_state`` and ``load_state``. For an
    environment that computes with arrays, subclass `sync_collector.envs.ArrayEnv`: a collector
    steps it without making TensorDicts.
    """

    @property
    def batch_size(self) -> torch.Size:
        """The shape of the batch of environments; empty for a single one."""

    def reset(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        """Begin an episode in every environment, or only where ``tensordict["_reset"]`` is set.

        Returns:
            The observation, and all flags False. Rows outside the mask are ignored.
        """

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        """Act with ``tensordict["action"]``.

        Returns:
            The same TensorDict, with the true outcome under ``"next"``: the observation, the reward
            and the flags, also at the end of an episode. Values that a policy set there for its
            next step are kept.
        """


def reset_env(env: Env, request: TensorDictBase | None = None) -> TensorDictBase:
    """Begin an episode, and return its first observation.

    Args:
        env: the environment.
        request: a TensorDict that says where to reset; None for everywhere.

    Raises:
        TypeError: the environment did not return a TensorDict.
    """
    root = env.reset() if request is None else env.reset(request)
    if not is_tensor_collection(root):
        raise TypeError(
            f"{type(env).__name__}.reset() gave a {type(root).__name__}; it must return a "
            "TensorDict of the first observations: "
            f"TensorDict({{'observation': …}}, batch_size={list(env.batch_size)})"
        )
    return root


def following_of(env: Env, given: TensorDictBase, stepped: Any) -> TensorDictBase:
    """Return the outcome in the result of a step.

    Args:
        env: the environment.
        given: the TensorDict passed to the step.
        stepped: the result of the step.

    Raises:
        TypeError: the result is not a TensorDict with an outcome.
    """
    cause = None
    # Checked first, since it holds in every step of most environments and costs nothing.
    if stepped is given or is_tensor_collection(stepped):
        try:
            following: TensorDictBase = stepped["next"]
        except KeyError as error:
            cause = error
        else:
            return following
    lacking = "" if cause is None else " without 'next'"
    raise TypeError(
        f"{type(env).__name__}.step() gave a {type(stepped).__name__}{lacking}; it must return "
        "the TensorDict that it was given, with the outcome (observation, reward, done) under "
        "'next': tensordict.set('next', outcome)"
    ) from cause


def seed_env(env: Env, seed: int, static_seed: bool = False) -> int:
    """Seed an environment, and return the seed for the next one.

    Raises:
        TypeError: it cannot be seeded.
    """
    set_seed = optional(env, "set_seed")
    if set_seed is None:
        raise TypeError(f"{type(env).__name__} has no set_seed(); write one to seed it")
    return int(set_seed(seed, static_seed=True) if static_seed else set_seed(seed))


def save_env(env: Env) -> Any:
    """Return the state of an environment; None if it cannot be saved."""
    save = optional(env, "save_state")
    return None if save is None else save()


def load_env(env: Any, state: Any) -> None:
    """Restore the saved state of an environment."""
    env.load_state(state)


def close_env(env: Any) -> None:
    """Close an environment, unless it is closed or has no ``close()``."""
    close = optional(env, "close")
    if close is not None and not optional(env, "is_closed"):
        close()


@contextmanager
def closed_on_error(envs: Collection[Env]) -> Iterator[None]:
    """Close environments if the block raises; add a note if closing fails too."""
    try:
        yield
    except BaseException as error:
        for env in envs:
            try:
                close_env(env)
            except Exception as unclosed:
                error.add_note(f"{type(env).__name__}.close() then raised {unclosed!r}")
        raise


def optional(env: Env, name: str) -> Callable[..., Any] | None:
    """Return an optional member of an environment; None if it has none."""
    member: Callable[..., Any] | None = getattr(env, name, None)
    return member


def random_policy(
    env: Env, action_key: Any = "action"
) -> Callable[[TensorDictBase], TensorDictBase]:
    """Return the policy of random actions.

    Raises:
        TypeError: the environment has no way to make random actions.
    """
    rand_action = optional(env, "rand_action")
    if rand_action is not None:
        return rand_action
    spec: Any = optional(env, "action_spec")
    if spec is None:
        raise TypeError(
            f"{type(env).__name__} has neither rand_action(td) nor action_spec, so there are no "
            "random actions; write one of them, or give the collector a policy"
        )
    return lambda tensordict: tensordict.set(action_key, spec.rand())
