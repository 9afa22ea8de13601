"""A tiny environment that counts its steps, for tests and examples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase

from sync_collector.envs.normal import no_flags


class CountingEnv:
    """Observes the number of steps in its episode; the reward is the action.

    The observation starts at 0, or after `set_seed` at the seed, and grows by one each step.

    Args:
        max_steps: the steps of an episode; for a batch, one number for all or one for each.
        num_envs: the number of environments that are stepped together; None for a single one.
        truncate: whether episodes end ``truncated`` rather than ``terminated``.

    Example:
        >>> env = CountingEnv(max_steps=3)
        >>> td = env.step(env.rand_action(env.reset()))
        >>> td["observation"], td["next", "observation"], td["next", "done"]
        (tensor([0.]), tensor([1.]), tensor([False]))
    """

    def __init__(
        self,
        max_steps: int | Sequence[int] = 5,
        *,
        num_envs: int | None = None,
        truncate: bool = False,
    ) -> None:
        self.batch_size = torch.Size(() if num_envs is None else (num_envs,))
        self.is_closed = False
        limits = torch.as_tensor(max_steps, device="cpu")
        self._limits = limits.reshape(-1, 1).squeeze(0).expand(*self.batch_size, 1)
        self._end = "truncated" if truncate else "terminated"
        self._steps = torch.zeros(*self.batch_size, 1, device="cpu")
        self._start = torch.zeros(*self.batch_size, 1, device="cpu")

    def reset(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        """Begin an episode, in every environment or only where ``tensordict["_reset"]`` is set."""
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None:
            mask = torch.ones_like(self._steps, dtype=torch.bool)
        self._steps[mask] = 0
        root = {"observation": self._start + self._steps, **no_flags(self.batch_size)}
        return TensorDict(root, batch_size=self.batch_size)

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        """Count one step."""
        self._steps += 1
        done = self._steps >= self._limits
        outcome = {
            "observation": self._start + self._steps,
            "reward": tensordict["action"].to(torch.float32).reshape(*self.batch_size, 1),
            "done": done,
            "terminated": torch.zeros_like(done),
            "truncated": torch.zeros_like(done),
            self._end: done.clone(),
        }
        following = tensordict.get("next", TensorDict({}, batch_size=self.batch_size))
        return tensordict.set("next", following.update(outcome))

    def rand_action(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        """Set a random number between 0 and 1 as the ``"action"``."""
        return tensordict.set("action", torch.rand(*self.batch_size, 1, device="cpu"))

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Let observations start at the seed, and return the next seed."""
        self._start = torch.full_like(self._start, float(seed))
        return seed if static_seed else seed + 1

    def save_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the number of steps so far, and the first observation of episodes."""
        return self._steps.clone(), self._start.clone()

    def load_state(self, state: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Restore a saved state."""
        self._steps, self._start = (tensor.clone() for tensor in state)

    def close(self) -> None:
        """Set ``is_closed``."""
        self.is_closed = True
