"""Calls policies, and finds the modules that they act with."""

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
# Keys of a frame that are never inputs of a policy.
_RESERVED = (*FLAGS, "reward", "next", "collector", "policy_version")


class PolicyError(TypeError):
    """The arguments or the outputs of a policy do not fit the environment."""


@contextmanager
def policy_errors() -> Iterator[None]:
    """Convert a worker's `PolicyError` to a local one, and explain pickling errors."""
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
    """Wraps a policy that takes observations as a policy that takes a TensorDict.

    The policy returns the action; or the action and its log-probability, which is recorded under
    ``"action_log_prob"`` as TorchRL's losses expect; or a mapping from keys to tensors that
    includes the action.

    Args:
        function: the policy.
        in_keys: the keys of the observations, in the order of the policy's arguments.
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
        """Return the action and the other outputs to record, by key.

        Raises:
            PolicyError: the policy returned neither an action, nor an action and its
                log-probability, nor a mapping with the action.
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
    """Calls a policy of TensorDicts, and checks that it returns one."""

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
    """Return the policy in the form in which a collector calls it.

    A policy takes the TensorDict itself if it is a TensorDictModule, or if its only required
    argument is named ``tensordict`` or ``td`` or annotated as a TensorDict. Any other policy takes
    observations: each argument, even one with a default, takes the observation of the same name. If
    the environment has one observation, besides the count of ``max_frames_per_traj``, a single
    required argument may have any name.

    Args:
        policy: a module or another callable.
        observation_keys: the keys of the observations.
        action_key: the key under which the environment reads the action.
        trust: pass the TensorDict itself, whatever the names of the policy's arguments.

    Raises:
        PolicyError: the arguments do not have the names of observations.
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
    """Check a policy's arguments as far as possible without an environment.

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
    """Return the module that `torch.compile` wraps: the wrapper accepts any arguments."""
    written: Callable[..., Any] = getattr(policy, "_orig_mod", policy)
    return written


@dataclass(frozen=True, slots=True)
class _Named:
    """Passes the last arguments of a function by name."""

    function: Callable[..., Any]
    names: tuple[str, ...]

    def __call__(self, *given: Any) -> Any:
        first = len(given) - len(self.names)
        return self.function(*given[:first], **dict(zip(self.names, given[first:], strict=True)))


def _arguments(policy: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the arguments that the policy accepts, in order."""
    try:
        signature = inspect.signature(_forward(policy))
    except ValueError as error:
        raise PolicyError(
            f"the policy {type(policy).__name__} does not say what it takes ({error}); wrap it: "
            "TensorDictModule(policy, in_keys=[…], out_keys=['action'])"
        ) from error
    # A `functools.partial` has values for these already.
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
    # With `from __future__ import annotations`, annotations are strings.
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return name.rpartition(".")[2].startswith("TensorDict") or parameter.name in _TENSORDICT_NAMES


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


# Worker threads must not change the trainer's own modules. Some versions of tensordict set the
# interaction type for the whole process.
_IN_THIS_THREAD: Mapping[str, Any] = (
    {"thread_local": True}
    if "thread_local" in inspect.signature(set_interaction_type).parameters
    else {}
)


def acting(exploration_type: InteractionType) -> AbstractContextManager[Any]:
    """For ``with``: set the interaction type, as `tensordict.nn.set_interaction_type` does."""
    context: AbstractContextManager[Any] = set_interaction_type(exploration_type, **_IN_THIS_THREAD)
    return context


def exploration(given: InteractionType | str) -> InteractionType:
    """Return the exploration type that an argument names.

    Raises:
        ValueError: no type has that name.

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
    """Return the module that a policy is, that it is a method of, or that its partial calls."""
    if isinstance(policy, functools.partial):
        return called_module(policy.func)
    if isinstance(policy, MethodType):
        return called_module(policy.__self__)
    return policy if isinstance(policy, nn.Module) else None


def unwrapped(model: Any) -> Any:
    """Return the module inside `DistributedDataParallel` or `DataParallel`; others unchanged.

    Example:
        >>> policy = nn.Linear(2, 1)
        >>> unwrapped(nn.DataParallel(policy)) is unwrapped(policy) is policy
        True
    """
    while isinstance(model, (DataParallel, DistributedDataParallel)):
        model = model.module
    return model


def unwrapped_models(models: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the models by name, each without a wrapper; see `unwrapped`.

    Raises:
        TypeError: the models are not a mapping from names.
    """
    check_mapping(models or {}, "models", "{'critic': critic}")
    return {name: unwrapped(model) for name, model in (models or {}).items()}


def module_of(policy: Any) -> nn.Module | None:
    """Return the module that a policy acts with; None if it has no tensors.

    The policy may be the module, a method of it, or a `functools.partial` of either.

    Args:
        policy: the policy; None for random actions.

    Raises:
        ModelError: the policy acts with modules that cannot be identified.

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
    """Return the first module with tensors in values, or in objects a few steps within them."""
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


# The depth of the search for modules in a policy, and the number of values per level.
_STEPS = 4
_VALUES = 1000


def is_lazy(policy: Any) -> bool:
    """Return whether a policy, or the module that it calls, has uninitialised tensors."""
    module = called_module(policy)
    return module is not None and any(
        map(is_lazy_tensor, itertools.chain(module.parameters(), module.buffers()))
    )


def initialise(act: TensorPolicy | TensorDictPolicy, env: Env) -> None:
    """Initialise a lazy policy by one call in an environment, which is reset for that.

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
