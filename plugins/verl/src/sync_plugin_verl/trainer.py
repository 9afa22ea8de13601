"""The trainer side of the checkpoint engine: one sender for all steps."""

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
    """Sends the weights of each step; the first step makes the sender.

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
        #: The sender's worker ids, by the names of rollouts.
        self._ids: dict[str, int] = {}
        # The rollouts that have received their address.
        self._introduced: set[str] = set()

    @property
    def newest(self) -> int:
        """The newest version."""
        return 0 if self.sender is None else self.sender.version

    def admit(self, rollouts: Mapping[str, Any]) -> None:
        """Set the rollouts that take part in the next step.

        Args:
            rollouts: the actors of the rollouts, by name.
        """
        self._rollouts = dict(rollouts)

    async def send(self, weights: Iterable[tuple[str, Tensor]], step: int | None) -> SendReport:
        """Send the weights of a step to the rollouts that take part, and wait for them.

        Args:
            weights: names and tensors; read once, in the calling thread.
            step: verl's ``global_steps``.

        Raises:
            ModelError: names, dtypes or shapes differ from the first step.
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
        self._rollouts = {}  # it would keep the actors alive
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
        """Close the sender."""
        if self.sender is not None:
            self.sender.close()

    def _update_workers(self, sender: Sender) -> None:
        """Add and remove workers, so that the sender serves only the participating rollouts."""
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
        """Send a rollout its address; if that fails, remove it and return the reason."""
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
    """Read all weights; return their specs, and an iterator that frees each after its use.

    The specs are needed before the first tensor is packed, but the weights can be read only once.
    """
    held: deque[tuple[str, Tensor]] = deque()
    for name, tensor in weights:
        held.append((name, tensor.detach().to("cpu", copy=True)))
    specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in held]
    return specs, _released(held)


def _released(held: deque[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    while held:
        yield held.popleft()
