"""Batches of what one policy does in one environment, and the devices that they are on."""

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
    """The devices of one worker; None leaves things where they are.

    Args:
        env: where actions are put before a step. An environment that has a ``to()`` is moved there.
        policy: where the policy acts.
        storing: where batches are delivered.

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
        """The devices, with ``device`` for those that are not given.

        Batches of an environment and a policy on one device are delivered there, too.
        """
        given = (device if one is None else one for one in (env, policy, storing))
        env, policy, storing = (None if one is None else _device(one) for one in given)
        return cls(env, policy, env if storing is None and env == policy else storing)

    def place_env(self, env: Env) -> Env:
        """The environment on its device."""
        to: Callable[[torch.device], Env] | None = optional(env, "to")
        return env if self.env is None or to is None else to(self.env)

    def place_policy(self, policy: Any) -> Any:
        """The policy on its device."""
        if self.policy is None or not isinstance(policy, nn.Module):
            return policy
        return policy.to(self.policy)

    def check_shared(self, policy: Any) -> None:
        """Raise if the trainer's own policy would have to be moved.

        Raises:
            OptionError: it is on another device than workers are to act on.
        """
        first = next(policy.parameters(), None) if isinstance(policy, nn.Module) else None
        if first is None or self.policy is None or first.device.type == self.policy.type:
            return
        raise OptionError(
            f"workers act with the trainer's own policy, which is on {first.device}, not on "
            f"{self.policy}; type policy.to({str(self.policy)!r}) before, or use scheme='thread'"
        )

    def place_act(self, act: TensorPolicy | TensorDictPolicy) -> TensorPolicy | TensorDictPolicy:
        """A policy that takes what it is given to its own device, and brings back its outputs."""
        if self.env is None and self.policy is None:
            return act
        if isinstance(act, TensorPolicy):
            return TensorPolicy(_Carried(act.function, self), act.in_keys, act.out_key)
        return _Carried(act, self)

    def store(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch on the device that it is delivered on."""
        return batch if self.storing is None else batch.to(self.storing)


@dataclass(frozen=True, slots=True)
class _Carried:
    """A function of tensors or TensorDicts, on another device than what it is called from."""

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
    # The policy's own check refuses everything else.
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
    """The request for one batch.

    Args:
        number: tells this batch from the one before it; the same where Ctrl-C came before that one
            was delivered. None for a batch that is never asked for again.
        random: act at random, not by the policy.
        versions: the least version of the weights of each model for the batch.
        patience: how long these are waited for, in seconds.
    """

    number: int | None = None
    random: bool = False
    versions: Mapping[str, int] = field(default_factory=dict)
    patience: float = 0.0


_AS_USUAL = BatchRequest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """The options by which a worker makes batches.

    Args:
        frames_per_batch: frames to gather in a batch; for several environments that are stepped
            together, rounded up to a multiple of their number.
        track_policy_version: record the version that acted in each frame.
        episode_stats: record the reward and the length of each frame's episode up to it.
        owns_process: the worker has a process to itself, whose random state it may seed.
        parallel: the worker runs while the trainer and the others do.
        num_envs: the environments that the worker makes and steps together.
        deliver: what to give instead of a batch that was made; None for the batch itself.
        max_frames_per_traj: truncate episodes after so many steps; -1 for never.
        reset_at_each_iter: begin every batch with a reset and new trajectories.
        exploration_type: what a probabilistic policy takes of its distributions.
        trust_policy: give the policy the TensorDict, whatever its signature.
        devices: where environment, policy and batches are.
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
        seat: a number that no other rollout of the collector has or had; trajectory ids begin
            with it.
        options: how to make batches.
        between_steps: called before every step; gives the version of the policy.

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
        # Kept because Ctrl-C comes to a worker that works in the driver's thread: the steps that no
        # batch was made of yet, and the trajectory ids and totals before them; and the batch that
        # may not have been delivered, with the number of its order.
        self._gathered: tuple[Steps, dict[str, Any], dict[Any, Any]] | None = None
        self._made: tuple[int, TensorDictBase] | None = None
        self._act = None if policy is None else self._adapt(policy)
        # Last, so that the caller still has the environment if this raises.
        self._close_env = release_with(self, close_env, env)

    def frames_per_batch(self) -> int:
        """The frames in each batch."""
        return self._steps * self._env.batch_size.numel()

    def collect(self, request: BatchRequest = _AS_USUAL) -> TensorDictBase:
        """Return the next batch; continue one that an exception has interrupted."""
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
        # Not inference_mode: tensors made in it could never be written to by an update.
        with torch.no_grad(), acting(self._options.exploration_type):
            # Stored within the block: Ctrl-C may come when it is left.
            self._gathered = self._loop.run(self._steps, act, self._between_steps), *before

    def _finished(self) -> TensorDictBase:
        """Return the batch of the gathered steps."""
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
        """Seed the environment and begin its episodes, and a batch, again.

        A worker with a process to itself seeds torch, numpy and random too, for its policy.

        Args:
            seed: the seed.
            static_seed: let the next worker have the same one.

        Returns:
            The seed for the next worker.
        """
        if self._options.owns_process:
            seed_process(seed)
        self._gathered = self._made = None
        self._begin_anew()
        return seed_env(self._env, seed, static_seed)

    def midway(self, number: int) -> bool:
        """Return whether the batch that will be asked for with this number was cut short."""
        undelivered = self._made is not None and self._made[0] == number
        return self._loop.midway() or self._gathered is not None or undelivered

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next batch depends on; ``"env"`` is None if it is not saved.

        It is not in the middle of a batch, which an error has cut short: the environment is ahead
        of the frames. Of random states, it has that of its process only.
        """
        is_ahead = self._loop.midway() or self._gathered is not None
        state = {
            "ids": self._ids.state_dict(),
            "totals": self._totals.state_dict(),
            "loop": self._loop.state_dict(),
            "env": None if is_ahead else save_env(self._env),
            "random": random_state() if self._options.owns_process else None,
        }
        # An action may be a view of a parameter that the trainer has written to since.
        with torch.no_grad():
            return copy.deepcopy(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; with new episodes if the environment was not saved."""
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
        """Begin new episodes, with trajectory ids of another seat."""
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
    """The random state of this process, to continue from later."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,
        "numpy": np.random.get_state(),  # noqa: NPY002
        "random": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Go on from a random state."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["random"])
