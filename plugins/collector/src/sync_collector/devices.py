"""The devices of a worker's environment, policy and batches, and moves between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from torch import nn

from sync_collector.envs.protocol import Env, optional
from sync_collector.policies import TensorDictPolicy, TensorPolicy
from sync_core import OptionError


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
