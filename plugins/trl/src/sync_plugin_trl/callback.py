"""A callback of Hugging Face trainers that sends their weights."""

from __future__ import annotations

from typing import Any, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sync_core import SendReport
from sync_core.checks import check_count


class Sends(Protocol):
    """A sender of the trainer's model: `sync_core.Sender`, or `Rollouts`."""

    def send(self) -> SendReport:
        """Send the model's weights, and wait until every worker has committed them."""
        ...


class SyncCallback(TrainerCallback):
    """Sends the weights of a `transformers.Trainer` when training begins, and after its steps.

    A step is one of the optimiser, after all batches whose gradients it accumulates. The weights of
    the last step are sent too. A worker that fails ends the training with `sync_core.SendError`,
    unless the sender was given another ``on_failure``.

    Args:
        sender: a sender of the trainer's model. Where several ranks train, add the callback on
            each that has one.
        every: optimiser steps between two sends.

    Raises:
        ValueError: ``every`` is not an integer >= 1.

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
        self._sent = -1

    def on_train_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the signature is transformers'
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Send what the workers begin with."""
        self._send(state)

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the signature is transformers'
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Send after every ``every`` steps."""
        if state.global_step % self._every == 0:
            self._send(state)

    def on_train_end(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the signature is transformers'
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Send what was trained since the last send."""
        if state.global_step != self._sent:
            self._send(state)

    def _send(self, state: TrainerState) -> None:
        self._sender.send()
        self._sent = state.global_step
