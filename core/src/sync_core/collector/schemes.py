"""Which models a collector keeps fresh, and by which scheme each of them travels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sync_core.arguments import check_mapping
from sync_core.errors import OptionError
from sync_core.plugins.groups import shares_policy

POLICY = "policy"

# Arguments of `Sender` that the collector gives itself, and what to type instead.
_OWN_ARGUMENTS = {
    "model": "give the collector policy=… or models={…}",
    "model_id": "name models by the keys of weight_sync_schemes={'policy': 'shm', 'critic': 'shm'}",
    "context": "give models=…, or name a model by its path: weight_sync_schemes={'env.net': 'shm'}",
    "num_workers": "give the collector num_workers=…",
    "workers": "the collector starts its own workers: give it num_workers=… and workers='process'",
    "timeout": "give the collector timeout=…",
    "on_failure": "give the collector on_worker_failure='raise' or 'restart'",
    "group": "give the collector on_worker_failure='restart'",
    "on_restart": "give the collector on_worker_failure='restart'",
}


@dataclass(frozen=True, slots=True)
class ModelScheme:
    """How one model travels.

    Args:
        scheme: the name of a scheme, or a plugin object.
        arguments: further arguments of `Sender`, options of the scheme among them.
    """

    scheme: Any
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def elsewhere(self) -> bool:
        """Whether the model is held by others than the collector's workers, such as an actor."""
        return "workers" in self.arguments


#: What keeps the policy fresh where nothing else is said.
DEFAULT_SCHEMES = {POLICY: ModelScheme("shm")}


def schemes_of(
    scheme: Any,
    arguments: Mapping[str, Any],
    weight_sync_schemes: Mapping[str, Any] | None,
    models: Mapping[str, Any],
) -> dict[str, ModelScheme]:
    """The scheme of each model, by name.

    Args:
        scheme: the policy's, where there are no others; None for ``"shm"``.
        arguments: further arguments of its `Sender`.
        weight_sync_schemes: a scheme for each model, or a mapping with the key ``"scheme"`` and
            further arguments of its `Sender`.
        models: what the trainer has besides the policy.

    Raises:
        TypeError: schemes or models are no mapping from names.
        ValueError: the arguments do not go together.
        OptionError: a scheme that cannot be one of several, or an argument of `Sender` that the
            collector gives itself.

    Example:
        >>> schemes_of(None, {}, {"policy": {"scheme": "shm", "zero_copy": True}}, {})
        {'policy': ModelScheme(scheme='shm', arguments={'zero_copy': True})}
    """
    check_mapping(models, "models", "{'critic': critic}")
    if weight_sync_schemes is None:
        if models:
            raise ValueError(
                f"models are kept fresh by schemes: weight_sync_schemes={{'policy': 'shm', "
                f"{next(iter(models))!r}: 'shm'}}"
            )
        _check_arguments(arguments, "scheme_options")
        return {POLICY: ModelScheme("shm" if scheme is None else scheme, arguments)}
    check_mapping(weight_sync_schemes, "weight_sync_schemes", "{'policy': 'shm'}")
    if scheme is not None or any(arguments.values()):
        raise ValueError(
            "weight_sync_schemes says it all; leave out scheme, layers, zero_copy and "
            "scheme_options, and write weight_sync_schemes={'policy': {'scheme': 'shm', "
            "'layers': […]}}"
        )
    found = {name: _one(name, given) for name, given in weight_sync_schemes.items()}
    _check(found, models)
    return found


def copied(models: Mapping[str, Any]) -> dict[str, Any]:
    """The models of which workers get copies: those whose name is no path to one of theirs."""
    return {name: model for name, model in models.items() if name.isidentifier()}


def _one(name: str, given: Any) -> ModelScheme:
    if not isinstance(given, Mapping):
        return ModelScheme(given)
    if "scheme" not in given:
        raise ValueError(
            f"weight_sync_schemes[{name!r}] names no scheme; write {{'scheme': 'shm', …}}"
        )
    arguments = {key: value for key, value in given.items() if key != "scheme"}
    own = {key: value for key, value in arguments.items() if key != "workers"}
    _check_arguments(own, f"weight_sync_schemes[{name!r}]")
    return ModelScheme(given["scheme"], arguments)


def _check_arguments(given: Mapping[str, Any], where: str) -> None:
    """Refuse arguments of a sender that are the collector's to give."""
    for name in given:
        if name in _OWN_ARGUMENTS:
            raise OptionError(f"{where} has {name!r}, which is no option: {_OWN_ARGUMENTS[name]}")


def _check(schemes: Mapping[str, ModelScheme], models: Mapping[str, Any]) -> None:
    if not schemes:
        raise ValueError("weight_sync_schemes is empty; write {'policy': 'shm'}, or leave it out")
    for name in (POLICY, "env"):
        if name in models:
            raise ValueError(f"{name!r} is the collector's own; leave it out of models")
    for name in models.keys() - schemes.keys():
        raise ValueError(
            f"models has {name!r}, which no scheme keeps fresh; name it in weight_sync_schemes"
        )
    within = {name: chosen for name, chosen in schemes.items() if not chosen.elsewhere}
    for name, chosen in within.items():
        if name.isidentifier() and name != POLICY and name not in models:
            raise ValueError(
                f"no worker has a model {name!r}; give models={{{name!r}: …}}, of which each gets "
                f"a copy, or name it by the path to a worker's own, such as 'policy.{name}'"
            )
        if len(within) > 1 and shares_policy(chosen.scheme):
            raise OptionError(
                f"scheme {chosen.scheme!r} moves nothing, so {name!r} cannot be refreshed together "
                "with other models; use 'thread', or 'shm' for workers in processes"
            )
