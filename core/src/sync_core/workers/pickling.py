"""Objects to bytes and back: anything cloudpickle takes, with tensors as copies of their values.

`torch.Tensor` pickles its whole storage, through `torch.save`: 100 µs for a tensor of any size,
and 100 MB for ten elements of a big buffer. Here a plain CPU tensor is its own values and nothing
else. Neither way moves the tensor into shared memory, as torch.multiprocessing would.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch

# From this many bytes on, leaving an array out of the pickle pays for the system calls it takes.
_BIG = 1 << 16

Buffer = bytes | bytearray | memoryview


def dumps(value: object) -> list[bytes | memoryview]:
    """Pickle a value into parts: the pickle, then the memory of each big array in it.

    Functions and classes of ``__main__`` travel by value. The arrays are not copied: what is
    written to them before the parts are sent is sent.
    """
    arrays: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes < _BIG:
            return True
        arrays.append(memory)
        return False

    return [_pickle(value, keep_inside), *arrays]


def dumps_copy(value: object) -> list[bytearray]:
    """Pickle a value as it is now; likewise."""
    return [bytearray(part) for part in dumps(value)]


def loads(parts: Sequence[Buffer]) -> Any:
    """The value that was pickled. Its arrays take the parts over as their memory."""
    pickled, *arrays = parts
    return pickle.loads(pickled, buffers=arrays)


def _pickle(value: object, keep_inside: Callable[[pickle.PickleBuffer], bool]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL, keep_inside).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
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
    content: bytearray, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    if not content:
        return torch.empty_strided(shape, stride, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).as_strided(shape, stride)
