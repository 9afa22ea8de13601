"""The step loop for environments that return arrays; it makes no TensorDict per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from sync_collector.envs.arrays import (
    ArrayEnv,
    Arrays,
    StepLostError,
    as_array,
    check_flags,
    entry,
    put_row,
)
from sync_collector.envs.normal import no_flags, outcome_of, spread
from sync_collector.loops import BetweenSteps, Leaves, Steps, copy_of, leaves_of, recorded_of, stack
from sync_collector.policies import TensorDictPolicy, TensorPolicy

Rows: TypeAlias = Mapping[Any, np.ndarray[Any, Any]]


class RandomChooser:
    """Lets the environment choose random actions."""

    def __init__(self, env: ArrayEnv) -> None:
        self.root: list[Leaves] = []
        self.next: list[Leaves] = []
        self._sample = env.sample_action

    def choose(self, t: int) -> Tensor:
        """Return a random action."""
        action = torch.as_tensor(self._sample(), device="cpu")
        self.root[t:] = [{"action": action.clone()}]
        return action


class TensorChooser:
    """Calls a policy that takes observations.

    Args:
        policy: the policy.
        seen: the observations, by key; time is their first dimension.
    """

    def __init__(self, policy: TensorPolicy, seen: Rows) -> None:
        self.root: list[Leaves] = []
        self.next: list[Leaves] = []
        self._outputs = policy.outputs
        self._action_key = policy.out_key
        inputs = (torch.from_numpy(seen[key]).unbind() for key in policy.in_keys)
        self._inputs = list(zip(*inputs, strict=True))

    def choose(self, t: int) -> Tensor:
        """Return the policy's action."""
        outputs = self._outputs(*self._inputs[t])
        made = {key: value.detach().cpu() for key, value in outputs.items()}
        self.root[t:] = [copy_of(made)]
        return made[self._action_key]


class TensorDictChooser:
    """Calls a policy that takes a TensorDict.

    Args:
        policy: the policy.
        seen: the observations, by key; time is their first dimension.
        batch_size: the batch size of the environment.
        carried: entries that the policy set under ``"next"`` in the last step; they are at the root
            of the next step. Updated after every step.
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
        """Return the policy's action, and record its other outputs."""
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


Chooser: TypeAlias = RandomChooser | TensorChooser | TensorDictChooser


@dataclass(slots=True)
class _Rows:
    """A batch in progress: one row for each step, and the number of steps made.

    Args:
        steps: the number of steps.
        seen: the observations. The extra last row is where the next batch continues.
        following: the true outcome of each step, also at the end of an episode.
        reward: the reward of each step.
        terminated: the flag of each step.
        truncated: the flag of each step.
        versions: the version of the policy in each step.
        chooser: chooses the actions.
        action: the action of an interrupted step; None if it is not chosen yet.
        stepped: the result of the step in progress; None before there is one.
        made: the steps made.
        begins: see `Steps`.
    """

    steps: int
    seen: Rows
    following: Rows
    reward: np.ndarray[Any, Any]
    terminated: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    versions: np.ndarray[Any, Any]
    chooser: Chooser
    action: np.ndarray[Any, Any] | None = None
    stepped: tuple[Any, ...] | None = None
    made: int = 0
    begins: bool = False


class ArrayLoop:
    """Steps an environment by its array methods.

    Args:
        env: the environment.
    """

    def __init__(self, env: ArrayEnv) -> None:
        self._env = env
        self._batch = tuple(env.batch_size)
        self.restart()

    def observation_keys(self) -> list[Any]:
        """The keys of the environment's specs that a policy may take."""
        return [key for key, spec in self._env.array_specs.items() if not spec.info]

    def restart(self) -> None:
        """Begin the next run with a reset, and drop the steps of an interrupted run."""
        self._current: Arrays | None = None
        # The environments whose episode has ended; they are reset before the next step.
        self._ended: np.ndarray[Any, Any] | None = None
        self._carried: Leaves = {}
        self._rows: _Rows | None = None

    def midway(self) -> bool:
        """Return whether a run was interrupted."""
        return self._rows is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which the next run continues."""
        return {"current": self._current, "ended": self._ended, "carried": self._carried}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.restart()
        self._current, self._ended = state["current"], state["ended"]
        self._carried = state["carried"]

    def run(
        self,
        steps: int,
        policy: TensorPolicy | TensorDictPolicy | None,
        between_steps: BetweenSteps,
    ) -> Steps:
        """Run some steps; with None as the policy, the actions are random."""
        rows = self._rows
        if rows is None:
            rows = self._rows = self._new_rows(steps, policy)
        while rows.made < rows.steps:
            self._step(rows, between_steps)
        gathered = self._gathered(rows)
        current = {key: seen[rows.steps].copy() for key, seen in rows.seen.items()}
        self._current, self._rows = current, None
        return gathered

    def _step(self, rows: _Rows, between_steps: BetweenSteps) -> None:
        t = rows.made
        if rows.action is None:
            self._reset_ended(rows)
            rows.versions[t] = between_steps()
            action = as_array(rows.chooser.choose(t))
            # Once per batch suffices: all its actions have one shape.
            if t == 0:
                self._check_action(action)
            rows.action = action
        if rows.stepped is None:
            try:
                stepped = self._env.step_arrays(rows.action)
            except StepLostError:
                self._cut_episodes(rows)
                return
            check_flags(self._env, stepped)
            rows.stepped = stepped
        observation, rows.reward[t], rows.terminated[t], rows.truncated[t] = rows.stepped
        put_row(rows.following, t, observation)
        put_row(rows.seen, t + 1, observation)
        self._ended = rows.terminated[t] | rows.truncated[t]
        rows.action, rows.stepped, rows.made = None, None, t + 1

    def _cut_episodes(self, rows: _Rows) -> None:
        """Truncate all episodes after the previous step, and begin new ones."""
        t = rows.made
        if t:
            rows.truncated[t - 1] |= ~rows.terminated[t - 1]
        else:
            rows.begins = True
        self._ended = None
        self._carried.clear()
        rows.action = None

    def _check_action(self, action: np.ndarray[Any, Any]) -> None:
        """Raise `TypeError` unless there is one action for each environment of the batch."""
        if action.shape[: len(self._batch)] != self._batch:
            wanted = ", ".join(map(str, self._batch))
            raise TypeError(
                f"the action of a batch of environments must have the shape ({wanted}, …), one "
                f"action for each, not {action.shape}; let the policy keep the leading dimensions "
                "of what it observes"
            )

    def _reset_ended(self, rows: _Rows) -> None:
        t, ended = rows.made, self._ended
        if ended is None:
            put_row(rows.seen, t, self._env.reset_arrays())
        elif not ended.any():
            return
        elif not self._batch:
            put_row(rows.seen, t, self._env.reset_arrays())
            self._carried.clear()
        else:
            fresh = self._env.reset_arrays(ended)
            for key, seen in rows.seen.items():
                seen[t][ended] = np.asarray(entry(fresh, key))[ended]
            self._forget_carried(ended)
        self._ended = np.zeros(self._batch, np.bool_)

    def _forget_carried(self, ended: np.ndarray[Any, Any]) -> None:
        if ended.all():
            self._carried.clear()
        where = torch.from_numpy(ended)
        for key, carried in self._carried.items():
            self._carried[key] = carried.masked_fill(spread(where, carried), 0)

    def _new_rows(self, steps: int, policy: TensorPolicy | TensorDictPolicy | None) -> _Rows:
        seen = self._empty(steps + 1)
        if self._current is not None:
            put_row(seen, 0, self._current)
        terminated, truncated = np.empty((2, steps, *self._batch), np.bool_)
        return _Rows(
            steps=steps,
            seen=seen,
            following=self._empty(steps),
            reward=np.empty((steps, *self._batch), np.float32),
            terminated=terminated,
            truncated=truncated,
            versions=np.empty(steps, np.int64),
            chooser=self._chooser(policy, seen),
        )

    def _chooser(self, policy: TensorPolicy | TensorDictPolicy | None, seen: Rows) -> Chooser:
        if policy is None:
            return RandomChooser(self._env)
        if isinstance(policy, TensorPolicy):
            return TensorChooser(policy, seen)
        return TensorDictChooser(policy, seen, self._env.batch_size, self._carried)

    def _empty(self, count: int) -> dict[Any, np.ndarray[Any, Any]]:
        return {
            key: np.empty((count, *self._batch, *spec.shape), spec.dtype)
            for key, spec in self._env.array_specs.items()
        }

    def _gathered(self, rows: _Rows) -> Steps:
        time = len(self._batch)
        outcome = {key: self._column(following) for key, following in rows.following.items()}
        outcome |= outcome_of(*map(self._column, (rows.reward, rows.terminated, rows.truncated)))
        outcome |= stack(rows.chooser.next, time)
        root = {key: self._column(seen[: rows.steps]) for key, seen in rows.seen.items()}
        root |= no_flags((*self._batch, rows.steps)) | stack(rows.chooser.root, time)
        ended = outcome["done"].squeeze(-1)
        return Steps(root, outcome, ended, torch.from_numpy(rows.versions), rows.begins)

    def _column(self, rows: np.ndarray[Any, Any]) -> Tensor:
        """Move the time dimension behind the batch dimensions."""
        return torch.from_numpy(rows).movedim(0, len(self._batch)).contiguous()
