"""What a collector asks of an environment; any class with these members is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase

#: The flags that say whether an episode goes on. Each has a trailing dimension of size 1.
FLAGS = ("done", "terminated", "truncated")


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
    - ``close()``, and ``is_closed``.

    TorchRL's ``EnvBase`` has all of it. An environment that computes with arrays does best to
    subclass `sync_core.envs.ArrayEnv`, which a collector steps without making TensorDicts.
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
            reward and the flags, also at the end of an episode. What a policy has set there for
            its own next step stays.
        """


def optional(env: Env, name: str) -> Callable[..., Any] | None:
    """A member that an environment may have and need not have."""
    member: Callable[..., Any] | None = getattr(env, name, None)
    return member
