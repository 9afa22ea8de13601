"""A callback of Hugging Face trainers that sends their weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sync_core import ModelError, OptionError, SendReport
from sync_core.checks import check_count
from sync_plugin_std import optimizer_weights


class Sends(Protocol):
    """The interface of a sender of the trainer's model: `sync_core.Sender`, or `Rollouts`."""

    @property
    def model(self) -> Any:
        """The model whose weights are sent."""

    def send(self) -> SendReport:
        """Send the model's weights, and wait until every worker has committed them."""
        ...


class SyncCallback(TrainerCallback):
    """Sends a `transformers.Trainer`'s weights when training begins, after steps, and at the end.

    A step is an optimiser step, after the gradient accumulation. The final weights are sent too,
    even if ``load_best_model_at_end`` has replaced those of the last step. Each send has the
    weights to act with, also of an optimizer that leaves other weights in the model during training
    (`sync_plugin_std.optimizer_weights`). If a worker fails, training ends with
    `sync_core.SendError`, unless the sender has another ``on_failure``.

    Args:
        sender: a sender of the trainer's model. If several ranks train, add the callback on each
            rank with a sender.
        every: optimiser steps between two sends.

    Raises:
        ValueError: ``every`` is not an integer >= 1.
        ModelError: the trained model shares no parameter with the sender's model; raised when
            training begins.

    Example:
        >>> import torch
        >>> from sync_core import Sender
        >>> model = torch.nn.Linear(2, 1)
        >>> sender = Sender("none", model, num_workers=1)
        >>> callback = SyncCallback(sender, every=2)
        >>> for step in range(6):
        ...     callback.on_step_end(None, TrainerState(global_step=step), None)
        >>> sender.version  # after the steps 0, 2 and 4
        3
    """

    def __init__(self, sender: Sends, *, every: int = 1) -> None:
        self._sender = sender
        self._every = check_count(every, "every")
        self._optimizer: Any = None
        self._acting: Callable[[], AbstractContextManager[object]] = nullcontext

    def on_train_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the signature is transformers'
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Send the initial weights."""
        _check_same(self._sender.model, model)
        self._send(optimizer)

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the signature is transformers'
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        optimizer: Any = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Send after every ``every`` steps."""
        if state.global_step % self._every == 0:
            self._send(optimizer)

    def on_train_end(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the signature is transformers'
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        optimizer: Any = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Send the final weights.

        Always sends, since the trainer or earlier callbacks may have changed the weights after the
        last step.
        """
        self._send(optimizer)

    def _send(self, optimizer: Any) -> None:
        """Send the weights to act with, which an optimizer may keep apart from the model's."""
        if optimizer is not self._optimizer:
            self._optimizer, self._acting = optimizer, _acting(optimizer)
        with self._acting():
            self._sender.send()


def _acting(optimizer: Any) -> Callable[[], AbstractContextManager[object]]:
    try:
        return optimizer_weights(optimizer)
    except OptionError:
        return nullcontext


def _check_same(sent: Any, trained: Any) -> None:
    """Raise `ModelError` if the trained model shares no parameter with the sender's model."""
    if not (isinstance(sent, nn.Module) and isinstance(trained, nn.Module)):
        return
    own = set(map(id, sent.parameters()))
    if own and own.isdisjoint(map(id, trained.parameters())):
        raise ModelError(
            f"the sender's model, a {type(sent).__name__}, shares no parameter with the "
            f"{type(trained).__name__} that the trainer trains, so that its training would never "
            "be sent; give Trainer(model=…) and Sender(…) the same model, and no model_init=, "
            "which makes another one at each train()"
        )
