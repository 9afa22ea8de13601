"""Calls of policies, and the modules that they act with."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice, takewhile
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase, set_interaction_type
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy as is_lazy_tensor

from sync_collector.envs.limit import STEP_COUNT
from sync_collector.envs.protocol import FLAGS, Env
from sync_core import ModelError, RemoteCallError
from sync_core.checks import check_mapping
from sync_core.models import named_tensors

TensorDictPolicy: TypeAlias = Callable[[TensorDictBase], TensorDictBase]

_TENSORDICT_NAMES = ("tensordict", "td")
# Keys of a frame that are never a policy's.
_RESERVED = (*FLAGS, "reward", "next", "collector", "policy_version")


class PolicyError(TypeError):
    """The arguments or the outputs of a policy do not fit."""


@contextmanager
def policy_errors() -> Iterator[None]:
    """Raise a `PolicyError` of a worker as a `PolicyError`, and say what to do about pickling."""
    try:
        yield
    except RemoteCallError as error:
        if isinstance(error.__cause__, PolicyError):
            raise PolicyError(f"worker {error.worker_id}: {error.__cause__}") from error
        if "its arguments cannot be pickled" not in str(error):
            raise
        message = str(error).removeprefix(f"worker {error.worker_id}: ")
        raise RemoteCallError(
            error.worker_id,
            f"{message}\nIf the policy cannot be pickled, let workers make theirs: "
            "Collector(…, policy_factory=make_policy), then update_policy_weights_(policy); or "
            "type scheme='thread'. Make what an environment needs inside of create_env_fn",
        ) from error.__cause__


@dataclass(frozen=True, slots=True)
class TensorPolicy:
    """A policy that takes observations, as a policy of TensorDicts.

    It returns the action; or the action and its log-probability, which is recorded under
    ``"action_log_prob"``, where TorchRL's losses look for it; or a mapping from keys to tensors
    with the action among them.

    Args:
        function: the policy.
        in_keys: the keys of the observations that it takes, in its order.
        out_key: the key of the action.

    Example:
        >>> import torch
        >>> policy = TensorPolicy(lambda x: (2 * x, -x.sum(-1)), ("observation",))
        >>> policy.outputs(torch.ones(1))
        {'action': tensor([2.]), 'action_log_prob': tensor(-1.)}
    """

    function: Callable[..., Any]
    in_keys: tuple[Any, ...]
    out_key: Any = "action"

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        observations = [tensordict.get(key) for key in self.in_keys]
        for key, value in self.outputs(*observations).items():
            tensordict.set(key, value)
        return tensordict

    def outputs(self, *observations: Any) -> dict[Any, Tensor]:
        """Return the action and what else is recorded with it, by key.

        Raises:
            PolicyError: the policy returned neither an action, nor an action and its
                log-probability, nor a mapping that has the action.
        """
        made = self.function(*observations)
        if isinstance(made, Tensor):
            return {self.out_key: made}
        if isinstance(made, tuple) and len(made) == 2:
            made = dict(zip((self.out_key, _log_prob_key(self.out_key)), made, strict=True))
        if not isinstance(made, Mapping):
            raise PolicyError(
                f"the policy returned a {type(made).__name__}, not the action as a tensor; a "
                "policy with several outputs returns (action, log_prob) or a dict such as "
                "{'action': …, 'state_value': …}, or takes a TensorDict and returns it"
            )
        return self._checked(dict(made))

    def _checked(self, made: dict[Any, Any]) -> dict[Any, Tensor]:
        if self.out_key not in made:
            raise PolicyError(
                f"the policy returned {_listed(list(made))}, without the action; give it the key "
                f"{self.out_key!r}"
            )
        for key, value in made.items():
            if not isinstance(value, Tensor):
                raise PolicyError(
                    f"the policy returned a {type(value).__name__} for {key!r}; return a tensor, "
                    "with one entry for each environment of the batch"
                )
            if key in self.in_keys or key in _RESERVED:
                raise PolicyError(
                    f"the policy returned {key!r}, which the environment gives; return it under "
                    "another key"
                )
        return made


def _log_prob_key(action_key: Any) -> Any:
    if isinstance(action_key, str):
        return f"{action_key}_log_prob"
    return (*action_key[:-1], f"{action_key[-1]}_log_prob")


@dataclass(frozen=True, slots=True)
class CheckedTensorDictPolicy:
    """A policy of TensorDicts that must not forget to return one."""

    function: Callable[..., Any]

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = self.function(tensordict)
        if not isinstance(result, TensorDictBase):
            raise PolicyError(
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

    A policy takes the TensorDict itself if it is a TensorDictModule, or if the one argument that it
    must be given is named ``tensordict`` or ``td`` or annotated as a TensorDict. Any other takes
    observations: each argument, also one with a default, takes the observation that it is named
    after. If it must be given one alone, that may have any name where the environment has one
    observation, the count of ``max_frames_per_traj`` apart.

    Args:
        policy: a module or another callable.
        observation_keys: what the environment observes.
        action_key: where the environment looks for the action.
        trust: that the policy takes the TensorDict itself, whatever its arguments are called.

    Raises:
        PolicyError: the arguments are not named after observations.
    """
    written = _written(policy)
    if trust or isinstance(written, TensorDictModuleBase):
        return CheckedTensorDictPolicy(policy)
    arguments = _arguments(written)
    required = [argument for argument in arguments if argument.default is argument.empty]
    if len(required) == 1 and _takes_tensordict(required[0]):
        return CheckedTensorDictPolicy(policy)
    takes = {one.name: one.name for one in arguments if one.name in observation_keys}
    observed = [key for key in observation_keys if key != STEP_COUNT]
    if len(required) == len(observed) == 1:
        takes.setdefault(required[0].name, observed[0])
    if not takes or any(one.name not in takes for one in required):
        raise PolicyError(
            f"the policy {type(policy).__name__} takes {_listed([one.name for one in required])}, "
            f"and the environment observes {_listed(observation_keys)}: name the policy's "
            "arguments after observations, or wrap it: "
            f"TensorDictModule(policy, in_keys={observed}, out_keys=[{action_key!r}]); "
            "trust_policy=True if it takes a TensorDict under another name"
        )
    taken = [one for one in arguments if one.name in takes]
    by_position = [*takewhile(lambda one: one in taken and one.kind != one.KEYWORD_ONLY, arguments)]
    by_name = tuple(one.name for one in taken[len(by_position) :])
    in_keys = tuple(takes[one.name] for one in taken)
    return TensorPolicy(_Named(policy, by_name) if by_name else policy, in_keys, action_key)


def check_takes_something(policy: Callable[..., Any]) -> None:
    """Check what can be checked of a policy's arguments without an environment.

    Raises:
        PolicyError: the policy takes no arguments, or its arguments cannot be read.
    """
    written = _written(policy)
    if not isinstance(written, TensorDictModuleBase) and not _arguments(written):
        raise PolicyError(
            f"the policy {type(policy).__name__} takes nothing; let it take observations by their "
            "names, or a TensorDict named 'tensordict'"
        )


def _written(policy: Callable[..., Any]) -> Callable[..., Any]:
    """The module that `torch.compile` was given: the compiled one takes any arguments."""
    written: Callable[..., Any] = getattr(policy, "_orig_mod", policy)
    return written


@dataclass(frozen=True, slots=True)
class _Named:
    """A function that is given its last arguments by their names."""

    function: Callable[..., Any]
    names: tuple[str, ...]

    def __call__(self, *given: Any) -> Any:
        first = len(given) - len(self.names)
        return self.function(*given[:first], **dict(zip(self.names, given[first:], strict=True)))


def _arguments(policy: Callable[..., Any]) -> list[inspect.Parameter]:
    """The arguments that the policy may be given, in their order."""
    try:
        signature = inspect.signature(_forward(policy))
    except ValueError as error:
        raise PolicyError(
            f"the policy {type(policy).__name__} does not say what it takes ({error}); wrap it: "
            "TensorDictModule(policy, in_keys=[…], out_keys=['action'])"
        ) from error
    # Values that are there already are kept.
    given = policy.keywords if isinstance(policy, functools.partial) else {}
    return [
        parameter
        for name, parameter in signature.parameters.items()
        if name not in given
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _forward(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Return the callable whose signature is the policy's: a module's ``forward``."""
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


# The trainer's own modules are not to be changed by workers in its threads. A tensordict that
# knows no difference between threads sets it for the whole process.
_IN_THIS_THREAD: Mapping[str, Any] = (
    {"thread_local": True}
    if "thread_local" in inspect.signature(set_interaction_type).parameters
    else {}
)


def acting(exploration_type: InteractionType) -> AbstractContextManager[Any]:
    """Act as `tensordict.nn.set_interaction_type` says, in this thread."""
    context: AbstractContextManager[Any] = set_interaction_type(exploration_type, **_IN_THIS_THREAD)
    return context


def exploration(given: InteractionType | str) -> InteractionType:
    """The exploration type meant by an argument.

    Raises:
        ValueError: there is none of that name.

    Example:
        >>> exploration("random").name
        'RANDOM'
    """
    if isinstance(given, InteractionType):
        return given
    names = [kind.name.lower() for kind in InteractionType]
    if str(given).lower() not in names:
        raise ValueError(
            f"exploration_type is {given!r}; give one of {', '.join(map(repr, names))}, or a "
            "tensordict.nn.InteractionType"
        )
    return InteractionType[given.upper()]


def called_module(policy: Any) -> nn.Module | None:
    """The module that a policy is, whose method it is, or that a `functools.partial` calls."""
    if isinstance(policy, functools.partial):
        return called_module(policy.func)
    if isinstance(policy, MethodType):
        return called_module(policy.__self__)
    return policy if isinstance(policy, nn.Module) else None


def unwrapped(model: Any) -> Any:
    """Return the module inside `DistributedDataParallel` or `DataParallel`, which only trains.

    Example:
        >>> policy = nn.Linear(2, 1)
        >>> unwrapped(nn.DataParallel(policy)) is unwrapped(policy) is policy
        True
    """
    while isinstance(model, (DataParallel, DistributedDataParallel)):
        model = model.module
    return model


def unwrapped_models(models: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the models by name, each as `unwrapped` returns it.

    Raises:
        TypeError: they are not a mapping from names.
    """
    check_mapping(models or {}, "models", "{'critic': critic}")
    return {name: unwrapped(model) for name, model in (models or {}).items()}


def module_of(policy: Any) -> nn.Module | None:
    """The module that a policy is, or certainly acts with; None when it has no tensors.

    That is the module itself, the one whose method the policy is, or the one that a
    `functools.partial` calls.

    Args:
        policy: what a collector acts with; None for random actions.

    Raises:
        ModelError: it acts with modules that cannot be identified.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> module_of(net.forward) is module_of(functools.partial(net)) is net
        True
    """
    if isinstance(policy, nn.Module):
        return policy if named_tensors(policy) else None
    if isinstance(policy, functools.partial):
        hidden = _hidden([*policy.args, *policy.keywords.values()])
        if hidden is None:
            return module_of(policy.func)
    elif isinstance(policy, MethodType) and isinstance(policy.__self__, nn.Module):
        return module_of(policy.__self__)
    else:
        hidden = _hidden([policy])
    if hidden is None:
        return None
    raise ModelError(
        f"the policy is a {type(policy).__name__} that uses a {type(hidden).__name__}, whose "
        "weights would never be refreshed; give the collector the module itself, or one whose "
        "forward() does what the policy does"
    )


def _hidden(values: list[Any]) -> nn.Module | None:
    """The first module with tensors that is found among values, or a few steps within them."""
    seen: dict[int, Any] = {}
    for _ in range(_STEPS):
        following: list[Any] = []
        for value in values:
            if isinstance(value, nn.Module) and named_tensors(value):
                return value
            if id(value) not in seen:
                seen[id(value)] = value
                following += islice(_within(value), _VALUES)
        values = following[:_VALUES]
    return None


def _within(value: Any) -> Iterable[Any]:
    """Return the modules that a value may act with."""
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return value.values() if isinstance(value, dict) else value
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, FunctionType):
        loads = {i.argval for i in dis.get_instructions(value) if i.opname == "LOAD_GLOBAL"}
        used = [held for name, held in value.__globals__.items() if name in loads]
        enclosed = inspect.getclosurevars(value).nonlocals.values()
        return (*used, *enclosed, *(value.__defaults__ or ()))
    if isinstance(value, (type, ModuleType, nn.Module, Tensor)):
        return ()
    slots = [name for kind in type(value).__mro__ for name in kind.__dict__.get("__slots__", ())]
    return (
        *getattr(value, "__dict__", {}).values(),
        *(getattr(value, name, None) for name in slots),
    )


# How far from a policy modules are looked for, and among how many values at each step.
_STEPS = 4
_VALUES = 1000


def is_lazy(policy: Any) -> bool:
    """Return whether a policy, or the module that it calls, has tensors without a shape."""
    module = called_module(policy)
    return module is not None and any(
        map(is_lazy_tensor, itertools.chain(module.parameters(), module.buffers()))
    )


def initialise(act: TensorPolicy | TensorDictPolicy, env: Env) -> None:
    """Act once in an environment, which is reset for that.

    Raises:
        ModelError: the policy calls the ``forward()`` of a lazy module directly.
    """
    try:
        with torch.no_grad():
            act(env.reset().copy())
    except ValueError as error:
        # torch has no class for this.
        if "uninitialized parameter" not in str(error):
            raise
        raise ModelError(
            "the policy calls forward() of a lazy module by itself, which gives no shapes; let it "
            "call the module, or run that once before"
        ) from error
