"""Put payloads into Ray's object store, and read them from it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from itertools import chain
from pickle import PickleBuffer
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from sync_core import CapacityError, Layout, OptionError, Payload
from sync_core.errors import PayloadError
from sync_core.transports import Block

# Tensors of at least this size, in bytes, are put without a copy; smaller ones are packed together
# first.
_LARGE = 1 << 18
# The alignment of pieces in Ray and of tensors in a layout, in bytes.
_ALIGNMENT = 64
# The size of a piece, in bytes: to copy larger ones, Ray starts threads, which takes longer.
_PIECE = 1 << 20
# From this size, in bytes, putting half of a version as a second object on a second thread is
# faster.
_WORTHWHILE = 8 << 20

Array = np.ndarray[Any, Any]


class Cutter:
    """Splits payloads into pieces, one payload at a time."""

    def __init__(self) -> None:
        self._block = Block.allocate(0)
        self._layout: Layout | None = None
        self._large: list[int] = []
        self._halves: list[slice] = []

    def cut(self, payload: Payload) -> list[list[Array]]:
        """Return the payload's bytes: views of large tensors, and packed small ones.

        The pieces are valid until the tensors change or the next payload is cut.

        Returns:
            One list of pieces, or two of about the same size with whole tensors in each.
        """
        layout = payload.layout
        if payload.bodies:
            # A few large pieces, for which Ray's copy threads are worth their start.
            header = np.frombuffer(layout.header, dtype=np.uint8)
            return [[header, *(body.numpy() for body in payload.bodies)]]
        tensors = payload.tensors
        if self._layout is not layout:
            self._layout = layout
            self._large = [i for i, spec in enumerate(layout.specs) if _is_large(spec.nbytes)]
            self._halves = _halves(layout)
        if self._block.nbytes < payload.nbytes:
            # Unused parts of the block take no memory, since pages are allocated on the first
            # write.
            self._block = Block.allocate(payload.nbytes)
        alone = [i for i in self._large if _is_plain(tensors[i])]
        others = sorted(set(range(len(tensors))).difference(alone)) if alone else None
        payload.pack(self._block, others)
        memory = self._block.memory.numpy()
        runs, begin = [], 0
        for i in alone:
            spec = layout.specs[i]
            start = len(layout.header) + spec.offset
            runs += [memory[begin:start], _bytes_of(tensors[i])]
            begin = start + spec.nbytes
        runs.append(memory[begin : payload.nbytes])
        return [list(_pieces(runs, half)) for half in self._halves]


def join(pieces: list[Any]) -> Array:
    """Join pieces, without a copy if they are contiguous in memory.

    Raises:
        PayloadError: the pieces are not bytes.
    """
    try:
        arrays = [np.frombuffer(piece, dtype=np.uint8) for piece in pieces]
        addresses = [array.__array_interface__["data"][0] for array in arrays]
        ends = [address + len(array) for address, array in zip(addresses, arrays, strict=True)]
        size = (ends[-1] - addresses[0],)
    except (TypeError, ValueError, IndexError) as error:
        found = type(pieces).__name__
        raise PayloadError(f"what was published is not a payload, but a {found}") from error
    if ends[:-1] != addresses[1:]:
        return np.concatenate(arrays)
    # The result keeps the first piece alive, and each piece keeps the whole object alive.
    return np.lib.stride_tricks.as_strided(arrays[0], shape=size, writeable=False)


def _halves(layout: Layout) -> list[slice]:
    """Return slices of the payload: two halves if each is large enough for an object."""
    size = layout.nbytes
    if size >= 2 * _WORTHWHILE:
        starts = (len(layout.header) + spec.offset for spec in layout.specs)
        middle = min(starts, key=lambda start: abs(start - size // 2))
        if _WORTHWHILE <= middle <= size - _WORTHWHILE:
            return [slice(0, middle), slice(middle, size)]
    return [slice(0, size)]


def _pieces(runs: Sequence[Array], wanted: slice) -> Iterator[Array]:
    """Return the wanted slice of the concatenated runs, in pieces."""
    begin = 0
    for run in runs:
        inside = run[max(0, wanted.start - begin) : max(0, wanted.stop - begin)]
        yield from (inside[at : at + _PIECE] for at in range(0, len(inside), _PIECE))
        begin += len(run)


def _is_large(nbytes: int) -> bool:
    return nbytes >= _LARGE and nbytes % _ALIGNMENT == 0


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _bytes_of(tensor: Tensor) -> Array:
    return tensor.detach().view(-1).view(torch.uint8).numpy()


#: The exceptions from reading an object whose bytes are lost.
LOST = (ray.exceptions.ObjectLostError, ray.exceptions.OwnerDiedError)

# Smaller versions, in bytes, are sent inside the calls, which is several times faster than an
# object.
_INLINE = 1 << 16


class StoredVersion:
    """A published version, in the same form for all workers.

    Args:
        version: the version.
        digest: the digest of its layout.
        nbytes: its size.
        data: its bytes, or the references to its objects; a large version has two.
        tensor_transport: see `ObjectStore`.
    """

    def __init__(
        self,
        version: int,
        digest: str,
        nbytes: int,
        data: list[Any],
        tensor_transport: str | None,
    ) -> None:
        self.version = version
        self.digest = digest
        self.nbytes = nbytes
        self.data = data
        self._tensor_transport = tensor_transport
        self._puts_left = 3
        # A view that keeps the bytes in this node's memory, even if Ray loses the object.
        self._pinned = [] if self.travels_in_calls else ray.get(data)

    @property
    def travels_in_calls(self) -> bool:
        """True if the data is the bytes themselves, not references to objects."""
        return isinstance(self.data[0], bytes)

    def put_again(self, lost: list[Any]) -> bool:
        """Put the bytes again as new objects, unless ``lost`` was already replaced.

        Return False if they were put too often already.
        """
        if self.data == lost:
            if self._puts_left == 0:
                return False
            self._puts_left -= 1
            self.data = _put_all(self._pinned, self._tensor_transport)
        return True


class ObjectStore:
    """Puts versions into Ray's object store.

    Args:
        nbytes: the size of a version, in bytes.
        tensor_transport: a direct transport of Ray; None for the object store.

    Raises:
        CapacityError: a version is larger than this node's object store.
        OptionError: this release of Ray does not have the transport.
    """

    def __init__(self, nbytes: int, tensor_transport: str | None) -> None:
        self._tensor_transport = tensor_transport
        self._cutter = Cutter()
        if tensor_transport is not None:
            _check_tensor_transport(tensor_transport)
        available = _capacity()
        if tensor_transport is None and nbytes > available:
            raise CapacityError(
                f"a version needs {nbytes} bytes of Ray's object store, which has {available} on "
                "this node; start Ray with more, ray.init(object_store_memory=…) or "
                "ray start --object-store-memory=…, or use a layer such as 'bf16'"
            )

    def put(self, payload: Payload) -> StoredVersion:
        """Pack a payload and put it into the store.

        Raises:
            CapacityError: the object store has no room for the payload.
        """
        stretches = self._cutter.cut(payload)
        data: list[Any]
        if self._tensor_transport is not None:
            whole = torch.from_numpy(np.concatenate(list(chain(*stretches))))
            data = [_put(whole, self._tensor_transport)]
        elif payload.nbytes <= _INLINE:
            data = [np.concatenate(list(chain(*stretches))).tobytes()]
        else:
            data = _put_all(stretches, None)
        return StoredVersion(
            payload.version, payload.layout.digest, payload.nbytes, data, self._tensor_transport
        )


def read(data: Sequence[Any]) -> Block:
    """Return published data as a block, which lives as long as any view of it."""
    if isinstance(data[0], bytes):
        return Block.of_bytes(data[0])
    return Block(*map(_memory_of, data))


def _memory_of(data: Any) -> Tensor:
    if isinstance(data, Tensor):
        if data.dtype != torch.uint8 or data.ndim != 1:
            raise PayloadError(f"what was published is not a payload, but a {data.dtype} tensor")
        return data
    joined = join(data)
    with warnings.catch_warnings():
        # torch warns about read-only memory, but nothing here writes to it.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(joined, dtype=torch.uint8)


def _put_all(values: Sequence[Any], tensor_transport: str | None) -> list[ray.ObjectRef[Any]]:
    """Put all values in parallel, since one thread does not use the full memory bandwidth."""
    first, *others = values
    putting = [_put_aside(other, tensor_transport) for other in others]
    try:
        return [_put(first, tensor_transport), *(each.result() for each in putting)]
    finally:
        # Wait for all, since the caller reuses the memory. An error must not hold an object.
        wait(putting)
        putting.clear()


def _put_aside(value: Any, tensor_transport: str | None) -> Future[ray.ObjectRef[Any]]:
    """Put a value on a new thread: an executor fails once the main thread has ended."""
    done: Future[ray.ObjectRef[Any]] = Future()

    def put() -> None:
        try:
            done.set_result(_put(value, tensor_transport))
        except BaseException as error:
            done.set_exception(error)

    try:
        threading.Thread(target=put, name="sync-ray-put").start()
    except RuntimeError:
        put()  # no thread can start while the process ends
    return done


def _put(value: Any, tensor_transport: str | None) -> ray.ObjectRef[Any]:
    try:
        if tensor_transport is None:
            # As buffers: every reader would have to rebuild arrays.
            return ray.put([PickleBuffer(piece) for piece in value])
        return ray.put(value, _tensor_transport=tensor_transport)
    except ray.exceptions.ObjectStoreFullError as error:
        raise CapacityError(
            f"Ray's object store has {_capacity()} bytes on this node, and no room: {error}; "
            "start Ray with more, or use a layer such as 'bf16'"
        ) from error


def _capacity() -> int:
    """Return the size of this node's object store, in bytes."""
    here = ray.get_runtime_context().get_node_id()
    resources = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == here)
    return int(resources.get("object_store_memory", 0))


def _check_tensor_transport(name: str) -> None:
    try:
        ray.put(torch.zeros(1, dtype=torch.uint8, device="cpu"), _tensor_transport=name)
    except Exception as error:
        raise OptionError(
            f"tensor_transport={name!r} cannot carry what a sender puts, in Ray {ray.__version__}: "
            f"{error}. {_known_transports()}; None uses the object store"
        ) from error


def _known_transports() -> str:
    try:
        from ray.experimental.rdt.util import transport_manager_info as known
    except ImportError:
        return "This Ray has no direct transports"
    return f"This Ray has: {', '.join(sorted(map(str.lower, known)))}"
