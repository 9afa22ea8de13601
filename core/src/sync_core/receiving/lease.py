"""The payload that a zero-copy model views, held until the model views something else."""

from __future__ import annotations

from typing import Any

from sync_core.models.commit import own_memory
from sync_core.models.extract import named_tensors
from sync_core.weights.payload import Payload


class Lease:
    """The payload that a model views, and the model; none at first."""

    def __init__(self) -> None:
        self._model: Any = None
        self._payload: Payload | None = None

    def replace(self, model: Any, payload: Payload) -> None:
        """The model views this payload now."""
        if self._payload is not None and model is self._model:
            self._payload.release()
        else:
            self.end()
        self._model, self._payload = model, payload

    def end(self) -> None:
        """Give the model memory of its own."""
        if self._payload is not None:
            vacate(self._model, self._payload)
            self._model = self._payload = None


def vacate(model: Any, payload: Payload) -> None:
    """Release a payload, of which the model keeps what it views in memory of its own."""
    try:
        own_memory(named_tensors(model), payload.tensors)
    finally:
        payload.release()
