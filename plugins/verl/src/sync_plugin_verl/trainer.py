"""The trainer's end of a checkpoint engine: one sender for all steps."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from sync_core import Sender, SendError, SendReport, UnknownWorkerError
from sync_plugin_std import Stream
from sync_plugin_verl.rollout import deliver, version_of

_log = logging.getLogger("sync_core")
_Spec = tuple[str, torch.dtype, tuple[int, ...]]


class TrainerEnd:
    """Sends the weights of each step, by a sender that is made with the first of them.

    Args:
        scheme: the scheme.
        options: other arguments of `sync_core.Sender`, and options of the scheme.
    """

    def __init__(self, scheme: Any, options: Mapping[str, Any]) -> None:
        self.name = f"trainer-{secrets.token_hex(8)}"
        #: The sender; None before the first step.
        self.sender: Sender | None = None
        self._scheme = scheme
        self._options = dict(options)
        self._specs: list[_Spec] = []
        self._rollouts: Mapping[str, Any] = {}
        #: By the names of rollouts, their ids in the sender.
        self._ids: dict[str, int] = {}
        # Those that have been given their address.
        self._introduced: set[str] = set()

    @property
    def newest(self) -> int:
        """The newest version."""
        return 0 if self.sender is None else self.sender.version

    def admit(self, rollouts: Mapping[str, Any]) -> None:
        """Say which rollouts take part in the next step.

        Args:
            rollouts: by their names, the actors that they are in.
        """
        self._rollouts = dict(rollouts)

    async def send(self, weights: Iterable[tuple[str, Tensor]], step: int | None) -> SendReport:
        """Send the weights of a step to the rollouts that take part, and wait for them.

        Args:
            weights: names and tensors, which are read once, in the calling thread.
            step: verl's ``global_steps``.

        Raises:
            ModelError: other names, dtypes or shapes than in the first step.
            SendError: some rollouts failed; the others have the weights.
        """
        if self.sender is None:
            self._specs, weights = _held(weights)
            model = Stream(self._specs, ())
            self.sender = Sender(self._scheme, model, num_workers=0, **self._options)
        sender = self.sender
        self._update_workers(sender)
        version = version_of(step, sender.version)
        pending = sender.send_async(Stream(self._specs, weights), version=version)
        meetings = [
            asyncio.create_task(self._introduce(sender, name, actor))
            for name, actor in self._rollouts.items()
            if name not in self._introduced
        ]
        self._rollouts = {}  # which would keep the actors alive
        try:
            return await asyncio.to_thread(pending.wait)
        except SendError as error:
            for meeting in meetings:
                if meeting.done() and (note := meeting.result()):
                    error.add_note(note)
            raise
        finally:
            for meeting in meetings:
                meeting.cancel()
            await asyncio.gather(*meetings, return_exceptions=True)

    def close(self) -> None:
        """End the sender."""
        if self.sender is not None:
            self.sender.close()

    def _update_workers(self, sender: Sender) -> None:
        """Give the sender the rollouts that take part, and no others."""
        served = sender.all_worker_ids()
        for name, worker_id in [*self._ids.items()]:
            if name not in self._rollouts or worker_id not in served:
                del self._ids[name]
                self._introduced.discard(name)
                with suppress(UnknownWorkerError):
                    sender.remove_worker(worker_id)
        for name in self._rollouts:
            if name not in self._ids:
                self._ids[name] = sender.add_worker()

    async def _introduce(self, sender: Sender, name: str, actor: Any) -> str:
        """Send a rollout its address, or remove it and return why it cannot be sent."""
        worker_id = self._ids[name]
        try:
            await actor.__ray_call__.remote(deliver, name, sender.address(worker_id))
        except Exception as error:
            note = f"worker {worker_id} could not be sent its address: {error!r}"
            _log.warning("%s", note)
            with suppress(UnknownWorkerError):
                sender.remove_worker(worker_id)
            return note
        self._introduced.add(name)
        return ""


def _held(
    weights: Iterable[tuple[str, Tensor]],
) -> tuple[list[_Spec], Iterator[tuple[str, Tensor]]]:
    """Read all weights; return what they are, and an iterator that frees each once it is used.

    Names, dtypes and shapes have to be known before the first tensor is packed, and the weights
    can be read only once.
    """
    held: deque[tuple[str, Tensor]] = deque()
    for name, tensor in weights:
        held.append((name, tensor.detach().to("cpu", copy=True)))
    specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in held]
    return specs, _released(held)


def _released(held: deque[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    while held:
        yield held.popleft()
