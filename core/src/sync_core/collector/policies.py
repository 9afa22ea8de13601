"""How a policy is called: with the TensorDict of the step, or with its observations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

TensorDictPolicy: TypeAlias = Callable[[TensorDictBase], TensorDictBase]

_TENSORDICT_NAMES = ("tensordict", "td")


@dataclass(frozen=True, slots=True)
class TensorPolicy:
    """A policy that takes observations and returns the action, as a policy of TensorDicts.

    Args:
        function: the policy.
        in_keys: the keys of the observations that it takes, in its order.
        out_key: the key of the action.
    """

    function: Callable[..., Any]
    in_keys: tuple[Any, ...]
    out_key: Any = "action"

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        observations = [tensordict.get(key) for key in self.in_keys]
        return tensordict.set(self.out_key, self.act(*observations))

    def act(self, *observations: Any) -> Tensor:
        """The action."""
        action = self.function(*observations)
        if not isinstance(action, Tensor):
            raise TypeError(
                f"the policy returned a {type(action).__name__}, not the action as a tensor; a "
                "policy with several outputs takes a TensorDict, sets them in it and returns it"
            )
        return action


@dataclass(frozen=True, slots=True)
class CheckedTensorDictPolicy:
    """A policy of TensorDicts that must not forget to return one."""

    function: Callable[..., Any]

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = self.function(tensordict)
        if not isinstance(result, TensorDictBase):
            raise TypeError(
                f"the policy was given a TensorDict and returned a {type(result).__name__}; "
                "it must return the TensorDict, with the action in it"
            )
        return result


def adapt(
    policy: Callable[..., Any],
    observation_keys: Sequence[Any],
    action_key: Any = "action",
    *,
    trust: bool = False,
) -> TensorPolicy | TensorDictPolicy:
    """The policy in the form in which it can be called.

    A policy takes the TensorDict itself if it is a TensorDictModule, or if its first argument is
    named ``tensordict`` or ``td`` or annotated as a TensorDict. Any other takes observations: those
    whose keys its arguments are named after, or the only one if it has one argument and the
    environment one observation.

    Args:
        policy: a module or another callable.
        observation_keys: what the environment observes.
        action_key: where the environment looks for the action.
        trust: that the policy takes the TensorDict itself, whatever its arguments are called.

    Raises:
        TypeError: the arguments are not named after observations.
    """
    # What torch.compile gives for a module takes anything, and has the module that it was.
    written = getattr(policy, "_orig_mod", policy)
    if trust or isinstance(written, TensorDictModuleBase):
        return CheckedTensorDictPolicy(policy)
    required = _required(written)
    if len(required) == 1 and _takes_tensordict(required[0]):
        return CheckedTensorDictPolicy(policy)
    names = tuple(parameter.name for parameter in required)
    if names and all(name in observation_keys for name in names):
        return TensorPolicy(policy, names, action_key)
    if len(names) == len(observation_keys) == 1:
        return TensorPolicy(policy, tuple(observation_keys), action_key)
    raise TypeError(
        f"the policy {type(policy).__name__} takes {_listed(names)}, and the environment observes "
        f"{_listed(observation_keys)}: name the policy's arguments after observations, or wrap it: "
        f"TensorDictModule(policy, in_keys={[*observation_keys]}, out_keys=[{action_key!r}]); "
        "trust_policy=True if it takes a TensorDict under another name"
    )


def _required(policy: Callable[..., Any]) -> list[inspect.Parameter]:
    """The arguments that the policy must be given, in their order."""
    try:
        signature = inspect.signature(_forward(policy))
    except ValueError as error:
        raise TypeError(
            f"the policy {type(policy).__name__} does not say what it takes ({error}); wrap it: "
            "TensorDictModule(policy, in_keys=[…], out_keys=['action'])"
        ) from error
    return [
        parameter
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def _forward(policy: Callable[..., Any]) -> Callable[..., Any]:
    """What has the signature of the policy; calling a module says nothing of its arguments."""
    if isinstance(policy, nn.Module):
        forward: Callable[..., Any] = policy.forward
        return forward
    if isinstance(policy, functools.partial):
        return functools.partial(_forward(policy.func), *policy.args, **policy.keywords)
    return policy


def _takes_tensordict(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return parameter.name in _TENSORDICT_NAMES
    # Annotations are strings where `from __future__ import annotations` is in force.
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return name.rpartition(".")[2].startswith("TensorDict") or parameter.name in _TENSORDICT_NAMES


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
