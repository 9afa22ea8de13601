"""Determines the scheme of each model, for the collector's workers and for other holders."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypedDict

from sync_core import LayoutMismatchError, ModelError, OptionError, PendingSend, Sender, SendReport
from sync_core.checks import check_mapping
from sync_plugin_std.workers import shares_policy

POLICY = "policy"


def is_part(name: str) -> bool:
    """Return whether a model is a part of the policy, named by its path."""
    return name.startswith(f"{POLICY}.")


@dataclass(frozen=True, slots=True)
class ModelScheme:
    """The scheme of one model.

    Args:
        scheme: the name of a scheme, or a plugin object.
        arguments: further arguments of `Sender`, including options of the scheme.
    """

    scheme: Any
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def held_elsewhere(self) -> bool:
        """Return whether the model is held by workers outside of the collector."""
        return "workers" in self.arguments


def schemes_of(
    scheme: Any,
    arguments: Mapping[str, Any],
    weight_sync_schemes: Mapping[str, Any] | None,
    models: Mapping[str, Any],
) -> dict[str, ModelScheme]:
    """Return the scheme of each model, by name.

    Args:
        scheme: the policy's scheme, if no others are given; None for ``"shm"``.
        arguments: further arguments of the policy's `Sender`.
        weight_sync_schemes: a scheme for each model, or a mapping with the key ``"scheme"`` and
            further arguments of its `Sender`.
        models: the trainer's models other than the policy.

    Raises:
        TypeError: schemes or models are not a mapping from names.
        ValueError: the arguments do not go together.
        OptionError: a scheme cannot be used with several models, or the collector sets an argument
            of `Sender` itself.

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
        return {POLICY: _of_policy(scheme, arguments)}
    check_mapping(weight_sync_schemes, "weight_sync_schemes", "{'policy': 'shm'}")
    found = {name: _one(name, given) for name, given in weight_sync_schemes.items()}
    _check(found, models)
    if all(each.held_elsewhere for each in found.values()):
        return {POLICY: _of_policy(scheme, arguments)} | found
    if scheme is not None or any(arguments.values()):
        raise ValueError(
            "weight_sync_schemes says it all; leave out scheme, layers, zero_copy and "
            "scheme_options, and write weight_sync_schemes={'policy': {'scheme': 'shm', "
            "'layers': […]}}"
        )
    return found


def own(schemes: Mapping[str, ModelScheme]) -> dict[str, ModelScheme]:
    """Return the schemes of the models that the collector's workers hold."""
    return {name: each for name, each in schemes.items() if not each.held_elsewhere}


def elsewhere(schemes: Mapping[str, ModelScheme]) -> dict[str, ModelScheme]:
    """Return the schemes of the models that other workers hold."""
    return {name: each for name, each in schemes.items() if each.held_elsewhere}


def copied(models: Mapping[str, Any]) -> dict[str, Any]:
    """Return the models that workers get copies of: their names are not paths in a worker."""
    return {name: model for name, model in models.items() if name.isidentifier()}


def _of_policy(scheme: Any, arguments: Mapping[str, Any]) -> ModelScheme:
    _check_arguments(arguments, "scheme_options")
    return ModelScheme("shm" if scheme is None else scheme, arguments)


def _one(name: str, given: Any) -> ModelScheme:
    if not isinstance(given, Mapping):
        return ModelScheme(given)
    if "scheme" not in given:
        raise ValueError(
            f"weight_sync_schemes[{name!r}] names no scheme; write {{'scheme': 'shm', …}}"
        )
    arguments = {k: v for k, v in given.items() if k != "scheme"}
    if "workers" not in arguments:
        _check_arguments(arguments, f"weight_sync_schemes[{name!r}]")
    return ModelScheme(given["scheme"], arguments)


def _check_arguments(arguments: Mapping[str, Any], where: str) -> None:
    """Raise `OptionError` for arguments that the collector sets itself."""
    for name in arguments:
        if name in GIVEN_BY_COLLECTOR:
            raise OptionError(f"{where} has {name!r}; {GIVEN_BY_COLLECTOR[name]}")


_STARTS_WORKERS = (
    "the collector starts its own workers: Collector(…, num_workers=2, workers='process'). For a "
    "model that other workers hold, such as an actor, type weight_sync_schemes={'critic': "
    "{'scheme': 'ray', 'workers': [actor]}}"
)
_REPLACES_WORKERS = "the collector sees to workers that fail: Collector(…, on_worker_failure=…)"
_NAMES_MODELS = (
    "models are named in weight_sync_schemes={'policy': 'shm', 'policy.critic': 'shm'}, and those "
    "of the trainer given as models={'critic': critic}"
)
#: Arguments of a `Sender` that a collector does not accept, and what to type instead.
GIVEN_BY_COLLECTOR = {
    "scheme": "the scheme is its own argument: Collector(…, scheme='shm')",
    "timeout": "the deadline is the collector's: Collector(…, timeout=60.0)",
    "model": _NAMES_MODELS,
    "model_id": _NAMES_MODELS,
    "context": _NAMES_MODELS,
    "num_workers": _STARTS_WORKERS,
    "workers": _STARTS_WORKERS,
    "on_failure": _REPLACES_WORKERS,
}


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
    for name in elsewhere(schemes):
        if name in (POLICY, "env"):
            raise ValueError(
                f"{name!r} is what the collector's own workers have; name a model that others hold "
                "otherwise, and where they have it by 'model_id': weight_sync_schemes={'served': "
                f"{{'scheme': 'ray', 'workers': […], 'model_id': {name!r}}}}}"
            )
    for name, chosen in own(schemes).items():
        if name.isidentifier() and name != POLICY and name not in models:
            raise ValueError(
                f"no worker has a model {name!r}; give models={{{name!r}: …}}, of which each gets "
                f"a copy, or name it by the path to a worker's own, such as 'policy.{name}'"
            )
        if len(own(schemes)) > 1 and shares_policy(chosen.scheme):
            raise OptionError(
                f"scheme {chosen.scheme!r} moves nothing, so {name!r} cannot be refreshed together "
                "with other models; use 'thread', or 'shm' for workers in processes"
            )


class UpdateArguments(TypedDict, total=False):
    """The arguments that select the weights and workers of an update; see `Collector`."""

    weights: Any
    policy: Any
    worker_ids: int | Iterable[int] | None
    model_id: str | None
    weights_dict: Mapping[str, Any] | None


def check_name(name: str, models: Sequence[str]) -> None:
    """Raise `KeyError` unless there is a model of this name."""
    if name not in models:
        listed = ", ".join(map(repr, models))
        give = ""
        if isinstance(name, str) and is_part(name):
            scheme = f"weight_sync_schemes={{'policy': 'shm', {name!r}: 'shm'}}"
            give = f"; to update a part of the policy on its own, type Collector(…, {scheme})"
        raise KeyError(f"there is no model {name!r}; the models are: {listed}{give}")


def chosen(
    given: Iterable[Any],
    model_id: str | None,
    weights_dict: Mapping[str, Any] | None,
    models: Sequence[str],
) -> dict[str, Any]:
    """Return the weights that the caller gave in one of several ways, by model.

    Args:
        given: the weights arguments; at most one is not None.
        model_id: the model of these weights; None for the policy.
        weights_dict: the weights of several models.
        models: the names of the models.

    Returns:
        The weights, None for the trainer's own; empty for all models.

    Raises:
        TypeError: the weights of several models are not a mapping from names.
        ValueError: several arguments were given.
        KeyError: there is no such model.
    """
    one_of = [weights for weights in given if weights is not None]
    if weights_dict is not None:
        check_mapping(weights_dict, "weights_dict", "{'policy': policy}")
    if model_id is not None:
        check_name(model_id, models)
    if weights_dict is not None and (one_of or model_id is not None):
        raise ValueError("weights_dict says it all; leave out model_id and other weights")
    if len(one_of) > 1:
        raise ValueError("give one of policy_or_weights, weights and policy, not several")
    if weights_dict is None and model_id is None and not one_of:
        return {}
    if weights_dict is not None and not weights_dict:
        raise ValueError("weights_dict names no model; leave it out to update all of them")
    names = weights_dict or {model_id or POLICY: one_of[0] if one_of else None}
    for name in names:
        check_name(name, models)
    return dict(names)


@contextmanager
def layout_explained() -> Iterator[None]:
    """For ``with``: add to a sender's layout error what to type with a collector."""
    try:
        yield
    except LayoutMismatchError as error:
        raise LayoutMismatchError(
            f"{error}; a collector makes these itself: type collector.shutdown(), and make a new "
            "Collector(create_env_fn, policy, …) with the changed model"
        ) from error


class ModelsElsewhere:
    """Sends models to workers outside of the collector, such as actors of the user's.

    Args:
        schemes: the scheme of each model; its arguments include ``workers``.
        models: the trainer's models, by name. A missing model is looked up in the scheme's
            ``context``, or sent when its weights are given.
        collector: the collector of the senders.
        timeout: default deadline of blocking calls, in seconds.

    Raises:
        PluginError: a scheme cannot be found or used.
        OptionError: `Sender` has no such argument, or cannot call the workers.
    """

    def __init__(
        self,
        schemes: Mapping[str, ModelScheme],
        models: Mapping[str, Any],
        *,
        collector: weakref.ref[Any],
        timeout: float,
    ) -> None:
        self.senders: dict[str, Sender] = {}
        self._has_weights: set[str] = set()
        try:
            for name, chosen in schemes.items():
                arguments = {"model_id": name, "timeout": timeout, **chosen.arguments}
                sender = Sender(chosen.scheme, models.get(name), **arguments)
                self.senders[name] = sender
                sender.register_collector(collector())
                if name in models or arguments.get("context") is not None:
                    self._has_weights.add(name)
        except BaseException:
            self.close()
            raise

    def among(self, given: Mapping[str, Any]) -> str | None:
        """Return the model that an update is for, if other workers hold it.

        Raises:
            ValueError: the update names other models too.
        """
        names = [name for name in given if name in self.senders]
        if not names:
            return None
        if len(given) > 1:
            raise ValueError(
                f"{names[0]!r} is held by other workers, and cannot be updated together with "
                f"other models; type update_policy_weights_(model_id={names[0]!r})"
            )
        return names[0]

    def update(
        self, name: str, weights: Any, worker_ids: int | Iterable[int] | None, *, blocking: bool
    ) -> SendReport | PendingSend:
        """Send a model's weights to the workers that hold it.

        Raises:
            ModelError: there are no weights to send.
            SendError: some workers failed; the others have the new version.
        """
        if weights is None and name not in self._has_weights:
            raise ModelError(
                f"the collector has no weights of {name!r}; give Collector models={{{name!r}: …}}, "
                f"or type update_policy_weights_(weights, model_id={name!r})"
            )
        sender = self.senders[name]
        with layout_explained():
            return (sender.send if blocking else sender.send_async)(weights, worker_ids)

    def close(self) -> None:
        """Close the senders; the workers keep their weights."""
        with ExitStack() as stack:
            for sender in self.senders.values():
                stack.callback(sender.close)
