"""Models that other workers than the collector's hold, each updated by its own sender."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from sync_collector.model_weights import layout_explained
from sync_collector.schemes import ModelScheme
from sync_core import ModelError, PendingSend, Sender, SendReport


class ModelsElsewhere:
    """Senders to workers that a scheme was given, such as actors of the user's.

    Args:
        schemes: the scheme of each model, whose arguments have ``workers``.
        models: the trainer's models, by name; one that is not among them is looked up in the
            scheme's ``context``, or sent when its weights are given.
        collector: what the senders have as their collector.
        timeout: deadline of blocking calls in seconds, where a scheme sets none.

    Raises:
        PluginError: a scheme cannot be found or used.
        OptionError: arguments that its `Sender` does not have, or workers that it cannot call.
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
        """The name of the model that an update is for, if it is one of these.

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
        for sender in self.senders.values():
            sender.close()
