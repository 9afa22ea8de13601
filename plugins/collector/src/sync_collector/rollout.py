"""Makes batches with one policy in one environment, and puts them on their devices."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

from sync_collector.array_loop import ArrayLoop
from sync_collector.envs.arrays import speaks_arrays
from sync_collector.envs.limit import limit_frames
from sync_collector.envs.normal import Conventions
from sync_collector.envs.protocol import Env, close_env, load_env, optional, save_env, seed_env
from sync_collector.episodes import EpisodeTotals, TrajectoryIds
from sync_collector.loops import BetweenSteps, Steps, TensorDictLoop
from sync_collector.policies import (
    TensorDictPolicy,
    TensorPolicy,
    acting,
    adapt,
    initialise,
    is_lazy,
)
from sync_core import OptionError
from sync_core.transports import release_with


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of one worker; None leaves tensors where they are.

    Args:
        env: the device of actions. An environment that has a ``to()`` is moved there.
        policy: the device of the policy.
        storing: the device of delivered batches.

    Example:
        >>> Devices.of("cpu", policy="meta")
        Devices(env=device(type='cpu'), policy=device(type='meta'), storing=device(type='cpu'))
    """

    env: torch.device | None = None
    policy: torch.device | None = None
    storing: torch.device | None = None

    @classmethod
    def of(
        cls, device: Any = None, *, env: Any = None, policy: Any = None, storing: Any = None
    ) -> Self:
        """Return the devices, with ``device`` as the default of each.

        If environment and policy are on the same device, batches are delivered there, too.
        """
        given = (device if one is None else one for one in (env, policy, storing))
        env, policy, storing = (None if one is None else _device(one) for one in given)
        return cls(env, policy, env if storing is None and env == policy else storing)

    def place_env(self, env: Env) -> Env:
        """Move an environment to its device, if it has a ``to()``."""
        to: Callable[[torch.device], Env] | None = optional(env, "to")
        return env if self.env is None or to is None else to(self.env)

    def place_policy(self, policy: Any) -> Any:
        """Move a policy to its device."""
        if self.policy is None or not isinstance(policy, nn.Module):
            return policy
        return policy.to(self.policy)

    def check_shared(self, policy: Any) -> None:
        """Raise if the trainer's own policy would have to be moved.

        Raises:
            OptionError: the policy is not on the device that was given for policies.
        """
        first = next(policy.parameters(), None) if isinstance(policy, nn.Module) else None
        if first is None or self.policy is None or first.device.type == self.policy.type:
            return
        raise OptionError(
            f"workers act with the trainer's own policy, which is on {first.device}, not on "
            f"{self.policy}; type policy.to({str(self.policy)!r}) before, or use scheme='thread'"
        )

    def place_act(self, act: TensorPolicy | TensorDictPolicy) -> TensorPolicy | TensorDictPolicy:
        """Wrap a policy: its inputs are moved to its device, and its outputs back."""
        if self.env is None and self.policy is None:
            return act
        if isinstance(act, TensorPolicy):
            return TensorPolicy(_Carried(act.function, self), act.in_keys, act.out_key)
        return _Carried(act, self)

    def store(self, batch: TensorDictBase) -> TensorDictBase:
        """Move a batch to the device of delivered batches."""
        return batch if self.storing is None else batch.to(self.storing)


@dataclass(frozen=True, slots=True)
class _Carried:
    """Calls a function of tensors or TensorDicts on another device than the caller's."""

    function: Callable[..., Any]
    devices: Devices

    def __call__(self, *given: Any) -> Any:
        home = self.devices.env or _device_of(given[0])
        if self.devices.policy is not None:
            given = tuple(one.to(self.devices.policy) for one in given)
        made = self.function(*given)
        if isinstance(made, tuple):
            return tuple(_moved(one, home) for one in made)
        if isinstance(made, dict):
            return {key: _moved(one, home) for key, one in made.items()}
        return made.to(home)


def _moved(value: Any, device: torch.device) -> Any:
    # Other outputs are refused by the policy's own check.
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _device_of(given: Any) -> torch.device:
    if isinstance(given, TensorDictBase) and given.device is None:
        return _device_of(next(iter(given.values(include_nested=True, leaves_only=True))))
    device: torch.device = given.device
    return device


def _device(given: Any) -> torch.device:
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{given!r} is not a device; write it like 'cpu' or 'cuda:0'") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """A request for one batch.

    Args:
        number: the number of the batch. The same number is requested again if Ctrl-C came before
            the delivery. None for a batch that is never requested again.
        random: choose random actions instead of the policy's.
        versions: the oldest version of each model that the batch may be made with.
        patience: how long to wait for these versions, in seconds.
    """

    number: int | None = None
    random: bool = False
    versions: Mapping[str, int] = field(default_factory=dict)
    patience: float = 0.0


_AS_USUAL = BatchRequest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """The options of a rollout.

    Args:
        frames_per_batch: the frames of a batch, rounded up to a multiple of the number of
            environments that are stepped together.
        track_policy_version: record the policy's version in each frame.
        episode_stats: record the reward and the length of each frame's episode so far.
        owns_process: whether the worker is a process of its own, whose random state it may seed.
        parallel: whether the worker runs in parallel with the trainer and other workers.
        num_envs: the number of environments that the worker makes and steps together.
        deliver: converts each batch to what is delivered; None for the batch itself.
        max_frames_per_traj: truncate episodes after this number of steps; -1 for never.
        reset_at_each_iter: begin every batch with a reset and new trajectories.
        exploration_type: how a probabilistic policy chooses from its distributions.
        trust_policy: pass the TensorDict to the policy, whatever its signature.
        devices: the devices of environment, policy and batches.
    """

    frames_per_batch: int
    track_policy_version: bool = True
    episode_stats: bool = False
    owns_process: bool = False
    parallel: bool = False
    num_envs: int = 1
    deliver: Callable[[TensorDictBase], TensorDictBase] | None = None
    max_frames_per_traj: int = -1
    reset_at_each_iter: bool = False
    exploration_type: InteractionType = InteractionType.RANDOM
    trust_policy: bool = False
    devices: Devices = field(default_factory=Devices)


class Rollout:
    """Runs a policy in an environment, batch after batch.

    Args:
        env: the environment.
        policy: the policy; None for random actions.
        seat: a number that is unique among the collector's rollouts; it determines the trajectory
            ids.
        options: the options.
        between_steps: called before every step; returns the version of the policy.

    Example:
        >>> from sync_collector.envs import CountingEnv
        >>> rollout = Rollout(CountingEnv(2), None, 0, RolloutOptions(frames_per_batch=3))
        >>> rollout.collect()["next", "observation"].flatten()
        tensor([1., 2., 1.])
    """

    def __init__(
        self,
        env: Env,
        policy: Any,
        seat: int,
        options: RolloutOptions,
        between_steps: BetweenSteps = lambda: 0,
    ) -> None:
        self._between_steps = between_steps
        if options.max_frames_per_traj > 0:
            env = limit_frames(env, options.max_frames_per_traj)
        self._env = env
        self._options = options
        self._ids = TrajectoryIds(seat)
        self._steps = math.ceil(options.frames_per_batch / max(1, env.batch_size.numel()))
        self._loop = ArrayLoop(env) if speaks_arrays(env) else TensorDictLoop(env)
        self._conventions = Conventions(env)
        self._totals = EpisodeTotals(self._conventions.reward_keys)
        # Ctrl-C may interrupt an inline worker. So it keeps the steps that are not in a batch yet,
        # with the trajectory ids and totals before them; and the last batch, which may not have
        # been delivered, with its request number.
        self._gathered: tuple[Steps, dict[str, Any], dict[Any, Any]] | None = None
        self._made: tuple[int, TensorDictBase] | None = None
        self._act = None if policy is None else self._adapt(policy)
        # Last, so that the caller still owns the environment if this constructor raises.
        self._close_env = release_with(self, close_env, env)

    def frames_per_batch(self) -> int:
        """The frames in each batch."""
        return self._steps * self._env.batch_size.numel()

    def collect(self, request: BatchRequest = _AS_USUAL) -> TensorDictBase:
        """Return the next batch; continue one that an exception interrupted."""
        if self._made is not None and self._made[0] == request.number:
            return self._made[1]
        self._made = None
        if self._gathered is None:
            self._gather(request)
        batch = self._finished()
        kept = None if self._options.parallel or request.number is None else (request.number, batch)
        self._made, self._gathered = kept, None
        return batch

    def _gather(self, request: BatchRequest) -> None:
        act = None if request.random else self._act
        before = self._ids.state_dict(), self._totals.state_dict()
        # Not inference_mode: an update could not write to tensors that were made in it.
        with torch.no_grad(), acting(self._options.exploration_type):
            # Stored inside the block, because Ctrl-C may come at its exit.
            self._gathered = self._loop.run(self._steps, act, self._between_steps), *before

    def _finished(self) -> TensorDictBase:
        """Return the batch of the collected steps."""
        assert self._gathered is not None
        steps, ids_before, totals_before = self._gathered
        self._ids.load_state_dict(ids_before)
        self._totals.load_state_dict(totals_before)
        if steps.begins:
            self._ids.restart()
            self._totals.restart()
        ids = self._ids.label(steps.ended)
        root = {**steps.root, ("collector", "traj_ids"): ids}
        following = dict(steps.next)
        if self._options.episode_stats:
            following |= self._totals.add(steps.next, steps.ended)
        if self._options.track_policy_version:
            root["policy_version"] = steps.versions.expand(ids.shape).clone()
            following["policy_version"] = root["policy_version"].clone()
        batch = TensorDict({"next": TensorDict(following, ids.shape)}, ids.shape).update(root)
        batch.names = [*[None] * len(self._env.batch_size), "time"]
        if self._options.reset_at_each_iter:
            self._begin_anew()
        batch = self._options.devices.store(batch)
        deliver = self._options.deliver
        return batch if deliver is None else deliver(batch)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment, drop an unfinished batch, and begin new episodes.

        A worker process also seeds torch, numpy and random, which its policy may use.

        Args:
            seed: the seed.
            static_seed: return the same seed for the next worker.

        Returns:
            The seed for the next worker.
        """
        if self._options.owns_process:
            seed_process(seed)
        self._gathered = self._made = None
        self._begin_anew()
        return seed_env(self._env, seed, static_seed)

    def midway(self, number: int) -> bool:
        """Return whether the batch with this request number was interrupted."""
        undelivered = self._made is not None and self._made[0] == number
        return self._loop.midway() or self._gathered is not None or undelivered

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next batch depends on; ``"env"`` is None if it cannot be saved.

        After an error in the middle of a batch, ``"env"`` is None too, because the environment is
        ahead of the frames. The random state is included only for a worker process.
        """
        is_ahead = self._loop.midway() or self._gathered is not None
        state = {
            "ids": self._ids.state_dict(),
            "totals": self._totals.state_dict(),
            "loop": self._loop.state_dict(),
            "env": None if is_ahead else save_env(self._env),
            "random": random_state() if self._options.owns_process else None,
        }
        # An action may be a view of a parameter, to which the trainer may have written since.
        with torch.no_grad():
            return copy.deepcopy(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state; begin new episodes if the environment was not saved."""
        state = copy.deepcopy(state)
        self._gathered = self._made = None
        self._ids.load_state_dict(state["ids"])
        if state["random"] is not None and self._options.owns_process:
            set_random_state(state["random"])
        if state["env"] is None:
            self._begin_anew()
        else:
            load_env(self._env, state["env"])
            self._loop.load_state_dict(state["loop"])
            self._totals.load_state_dict(state["totals"])

    def start_over(self, seat: int) -> None:
        """Begin new episodes, with the trajectory ids of another seat."""
        self._gathered = self._made = None
        self._ids = TrajectoryIds(seat)
        self._totals.restart()
        self._loop.restart()

    def close(self) -> None:
        """Close the environment, once."""
        self._close_env()

    def _adapt(self, policy: Any) -> TensorPolicy | TensorDictPolicy:
        act = adapt(
            policy,
            self._loop.observation_keys(),
            self._conventions.action_key,
            trust=self._options.trust_policy,
        )
        act = self._options.devices.place_act(act)
        if is_lazy(policy):
            initialise(act, self._env)
            self._loop.restart()
        return act

    def _begin_anew(self) -> None:
        """Begin the next batch with a reset and new trajectories."""
        self._loop.restart()
        self._ids.restart()
        self._totals.restart()


def seed_process(seed: int) -> None:
    """Seed the random state of this process."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (environments and policies may still draw from it)
    random.seed(seed)


def random_state() -> dict[str, Any]:
    """Return the random state of this process."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,
        "numpy": np.random.get_state(),  # noqa: NPY002
        "random": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the random state of this process."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["random"])
