"""The interface of environments; any class with these members is one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase, is_tensor_collection

#: The flags that say whether an episode continues. Each has a trailing dimension of size 1.
FLAGS = ("done", "terminated", "truncated")
#: What stands beside the observations in a batch, so that nothing observed has such a name.
RESERVED = frozenset({*FLAGS, "action", "reward", "next", "policy_version", "collector"})


class Env(Protocol):
    """An environment, or a batch of them that are stepped together.

    Every flag and the reward have a trailing dimension of size 1; flags are bool, the reward is
    float32, and ``done`` is ``terminated | truncated``.

    An environment may have more, which is used where it exists (`optional`):

    - ``step_and_maybe_reset(td)``: `step`, then a reset of what is done; gives the TensorDict of
      the step and the root of the next one. Without it, a collector calls `reset`, for a batch
      with a ``"_reset"`` mask.
    - ``rand_action(td)``: put a random action into ``td``; else ``action_spec.rand()`` gives one.
      A collector without a policy needs one of the two.
    - ``set_seed(seed)``: seed, and give the seed for the next environment in line.
    - ``save_state()`` and ``load_state(state)``: the state to continue from, as something that
      pickles; None for what cannot be saved. Without it, a collector that continues from a saved
      state begins new episodes.
    - ``close()``, and ``is_closed``.

    TorchRL's ``EnvBase`` has all of it but the saving. An environment that computes with arrays
    does best to subclass `sync_collector.envs.ArrayEnv`, which a collector steps without making
    TensorDicts.
    """

    @property
    def batch_size(self) -> torch.Size:
        """The shape of the batch of environments; empty for a single one."""

    def reset(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        """Begin an episode, in every environment or where ``tensordict["_reset"]`` says.

        Returns:
            The observation, and all flags False. Outside the mask, the rows are not read.
        """

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        """Act as ``tensordict["action"]`` says.

        Returns:
            The same TensorDict, with the true outcome under ``"next"``: the observation, the
            reward and the flags, also at the end of an episode. Values that a policy set there for
            its own next step stays.
        """


def reset_env(env: Env, request: TensorDictBase | None = None) -> TensorDictBase:
    """Begin an episode; what is seen first.

    Args:
        env: the environment.
        request: says where to reset; None for everywhere.

    Raises:
        TypeError: what the environment gave is not a TensorDict.
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
    """Return the result of a step.

    Args:
        env: the environment.
        given: what its step was given.
        stepped: what its step gave.

    Raises:
        TypeError: that is not a TensorDict with the outcome in it.
    """
    cause = None
    # Asked first, since it is so in every step of most environments, and costs nothing.
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
    """Seed an environment; the seed for the next one in line.

    Raises:
        TypeError: it has no way to be seeded.
    """
    set_seed = optional(env, "set_seed")
    if set_seed is None:
        raise TypeError(f"{type(env).__name__} has no set_seed(); write one to seed it")
    return int(set_seed(seed, static_seed=True) if static_seed else set_seed(seed))


def save_env(env: Env) -> Any:
    """The state of an environment; None if it cannot be saved."""
    save = optional(env, "save_state")
    return None if save is None else save()


def load_env(env: Any, state: Any) -> None:
    """Let an environment continue from its saved state."""
    env.load_state(state)


def close_env(env: Any) -> None:
    """Close an environment that can be closed and is not."""
    close = optional(env, "close")
    if close is not None and not optional(env, "is_closed"):
        close()


@contextmanager
def closed_on_error(envs: Collection[Env]) -> Iterator[None]:
    """Close environments if what is done with them fails; what they raise then is noted."""
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
    """A member that an environment may have and need not have."""
    member: Callable[..., Any] | None = getattr(env, name, None)
    return member


def random_policy(
    env: Env, action_key: Any = "action"
) -> Callable[[TensorDictBase], TensorDictBase]:
    """The policy of random actions.

    Raises:
        TypeError: the environment has no way to make one.
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
