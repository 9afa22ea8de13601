"""Random actions in an environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

from sync_collector.envs.protocol import Env, optional


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
