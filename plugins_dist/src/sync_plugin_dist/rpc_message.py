"""Pickled calls and outcomes as the byte tensors that torch RPC carries fastest."""

from __future__ import annotations

from collections.abc import Iterable

import torch

#: A pickle, then the memory of each big array in it.
Message = list[torch.Tensor]


def pack(parts: Iterable[bytearray]) -> Message:
    """Pickled parts as tensors over the same memory."""
    return [torch.frombuffer(part, dtype=torch.uint8) for part in parts]


def unpack(message: Message) -> list[memoryview]:
    """The parts of a message, in its own memory."""
    return [part.numpy().data for part in message]
