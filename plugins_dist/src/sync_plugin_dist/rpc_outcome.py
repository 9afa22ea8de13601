"""Calls and what became of them, as the byte tensors that torch RPC carries fastest."""

from __future__ import annotations

import functools
import io
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch

#: A pickle, then the memory of each big array in it.
Message = list[torch.Tensor]

# From this many bytes on, leaving an array out of the pickle pays.
_BIG = 1 << 16


@dataclass(frozen=True, slots=True)
class Returned:
    """The function returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """There is no value.

    Args:
        verdict: what the function did; a sentence without its subject: ``raised KeyError: 'a'``.
        traceback: where, as text.
        cause: the exception; its pickle, or None, while it travels.
    """

    verdict: str
    traceback: str
    cause: BaseException | bytes | None

    @classmethod
    def because(cls, verdict: str, error: BaseException) -> Failed:
        """A failure with an exception, told from the frame below the one that caught it."""
        below = error.__traceback__ and error.__traceback__.tb_next
        frames = traceback.format_exception(type(error), error, below)
        summary = traceback.format_exception_only(error)[0].strip()
        return cls(f"{verdict} {summary}", "".join(frames), error)


Outcome = Returned | Failed


def dumps(value: object) -> Message:
    """Pickle a value as it is now; functions and classes of ``__main__`` by value."""
    arrays: list[bytearray] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes < _BIG:
            return True
        arrays.append(bytearray(memory))
        return False

    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL, keep_inside).dump(value)
    parts = [bytearray(file.getbuffer()), *arrays]
    return [torch.frombuffer(part, dtype=torch.uint8) for part in parts]


def loads(message: Message) -> Any:
    """The value that was pickled. Its arrays take the message over as their memory."""
    pickled, *arrays = (part.numpy().data for part in message)
    return pickle.loads(pickled, buffers=arrays)


def run(call: Message, hosted: object) -> Outcome:
    """Run a call on an object. Whatever it raises, SystemExit included, is an outcome too."""
    try:
        function, args, kwargs = loads(call)
    except Exception as error:
        return Failed.because("or its arguments cannot be unpickled in the worker:", error)
    try:
        return Returned(function(hosted, *args, **kwargs))
    except BaseException as error:
        return Failed.because("raised", error)


def encode(outcome: Outcome) -> Message:
    """An outcome that is to travel; one that cannot becomes a failure that can."""
    if isinstance(outcome, Failed):
        outcome = replace(outcome, cause=_encode_cause(outcome.cause))
    try:
        return dumps(outcome)
    except Exception as error:
        return encode(Failed.because("returned a value that cannot be pickled:", error))


def decode(message: Message) -> Outcome:
    """The outcome that a worker has sent."""
    try:
        outcome: Outcome = loads(message)
    except Exception as error:
        return Failed.because("returned a value that cannot be unpickled here:", error)
    if not isinstance(outcome, Failed) or not isinstance(outcome.cause, bytes):
        return outcome
    try:
        return replace(outcome, cause=pickle.loads(outcome.cause))
    except Exception:
        # An exception class need not be able to travel; the text says it all.
        return replace(outcome, cause=None)


def name_of(function: Callable[..., Any]) -> str:
    """What to call the function in a message."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return getattr(function, "__qualname__", None) or repr(function)


def _encode_cause(cause: object) -> bytes | None:
    try:
        pickled: bytes = cloudpickle.dumps(cause, pickle.HIGHEST_PROTOCOL)
    except Exception:
        # The traceback travels in any case; few exceptions hold what cannot.
        return None
    return pickled


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a plain CPU tensor as its values, where torch would pickle its whole storage."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            return _reduce(obj)
        return super().reducer_override(obj)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether values, dtype, shape and strides say everything about the tensor."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__
    )


def _reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
    # A clone keeps the order of the dimensions in memory (channels_last) but not the gaps.
    dense = tensor if tensor.is_contiguous() else tensor.clone()
    values = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    content = pickle.PickleBuffer(values.numpy().data)
    return _rebuild, (content, tensor.dtype, tuple(dense.shape), dense.stride())


def _rebuild(
    content: bytearray, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    if not content:
        return torch.empty_strided(shape, stride, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).as_strided(shape, stride)
