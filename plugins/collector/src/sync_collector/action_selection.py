"""How a policy chooses the action of a step whose observations are rows of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from sync_collector.envs.arrays import ArrayEnv
from sync_collector.envs.normal import no_flags
from sync_collector.policies import TensorDictPolicy, TensorPolicy
from sync_collector.stacking import Leaves, copy_of, leaves_of, recorded_of

Rows: TypeAlias = Mapping[Any, np.ndarray[Any, Any]]


class Chooser(Protocol):
    """Chooses actions, and keeps what is to be recorded beside the observations, by step."""

    root: list[Leaves]
    next: list[Leaves]

    def choose(self, t: int) -> Tensor:
        """The action for the observations in row ``t``; choosing again replaces it."""


class RandomChooser:
    """Lets the environment choose."""

    def __init__(self, env: ArrayEnv) -> None:
        self.root: list[Leaves] = []
        self.next: list[Leaves] = []
        self._sample = env.sample_action

    def choose(self, t: int) -> Tensor:
        """A random action."""
        action = torch.as_tensor(self._sample())
        self.root[t:] = [{"action": action.clone()}]
        return action


class TensorChooser:
    """Asks a policy that takes observations.

    Args:
        policy: the policy.
        seen: the observations, by key; time is their first dimension.
    """

    def __init__(self, policy: TensorPolicy, seen: Rows) -> None:
        self.root: list[Leaves] = []
        self.next: list[Leaves] = []
        self._act = policy.act
        inputs = (torch.from_numpy(seen[key]).unbind() for key in policy.in_keys)
        self._inputs = list(zip(*inputs, strict=True))

    def choose(self, t: int) -> Tensor:
        """The policy's action."""
        action = self._act(*self._inputs[t]).detach().cpu()
        self.root[t:] = [{"action": action.clone()}]
        return action


class TensorDictChooser:
    """Asks a policy of TensorDicts.

    Args:
        policy: the policy.
        seen: the observations, by key; time is their first dimension.
        batch_size: of the environment.
        carried: what the policy set under ``"next"`` in the last step, which is its root in the
            next one; changed as steps are made.
    """

    def __init__(
        self, policy: TensorDictPolicy, seen: Rows, batch_size: torch.Size, carried: Leaves
    ) -> None:
        self.root: list[Leaves] = []
        self.next: list[Leaves] = []
        self._policy = policy
        self._seen = seen
        self._rows = {key: torch.from_numpy(array).unbind() for key, array in seen.items()}
        self._flags = no_flags(batch_size)
        self._batch_size = batch_size
        self._carried = carried

    def choose(self, t: int) -> Tensor:
        """The policy's action; what else it sets is recorded too."""
        given = {key: rows[t] for key, rows in self._rows.items()}
        source = {**given, **self._flags, **self._carried}
        result = self._policy(TensorDict(source, batch_size=self._batch_size))
        made: Leaves = {}
        for key, value in recorded_of(result).items():
            old = given.get(key)
            if old is None or (old.dtype, old.shape) != (value.dtype, value.shape):
                made[key] = value
            elif value is not old:
                self._seen[key][t] = value.cpu().numpy()
        for name in self._flags:
            made.pop(name, None)
        self.root[t:] = [copy_of(made)]
        following = result.get("next", None)
        if following is not None:
            self._carried.clear()
            self._carried.update(leaves_of(following))
        self.next[t:] = [{} if following is None else copy_of(self._carried)]
        if "action" not in made:
            raise KeyError("the policy set no 'action' in the TensorDict")
        return made["action"].detach().cpu()
