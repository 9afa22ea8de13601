"""The bytes of a version, in chunks that are versions of an inner transport."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from sync_core import Layout, Payload, TransportContext
from sync_core.transports import RESERVED_PREFIX, Block

# The names of the tensors of a chunk: its bytes, and what it is a chunk of.
CHUNK, CHUNK_HEAD = RESERVED_PREFIX + "chunk", RESERVED_PREFIX + "chunk_head"
#: How many inner transports take turns.
LANES = 2
#: The numbers of a chunk: version, index, bytes of the version, bytes of a chunk.
HEAD = 4


@lru_cache(maxsize=64)
def chunk_layout(nbytes: int) -> Layout:
    """Return the layout of a chunk of so many bytes."""
    return Layout.of_kinds([(CHUNK, torch.uint8, (nbytes,)), (CHUNK_HEAD, torch.int64, (HEAD,))])


def lane_context(context: TransportContext, nbytes: int, lane: int) -> TransportContext:
    """The context of one of the inner transports, which do not share a secret."""
    return context.for_channel(
        str(lane),
        layout=chunk_layout(nbytes),
        zero_copy=False,
        # Chunks are of no use to readers of the inner scheme alone.
        make_address=None,
    )


class ChunkedVersion:
    """The bytes of a version, of which the first chunks are there.

    Args:
        version: the version.
        nbytes: of all of it, header and body.
        chunk_nbytes: of each chunk but the last.
    """

    def __init__(self, version: int, nbytes: int, chunk_nbytes: int) -> None:
        self.version = version
        self.nbytes = nbytes
        self.count = -(-nbytes // chunk_nbytes)
        self.block = Block.allocate(nbytes)
        #: How many chunks are there.
        self.available = 0
        self._chunk_nbytes = chunk_nbytes

    def chunk(self, index: int) -> Tensor:
        """The memory of a chunk."""
        first = index * self._chunk_nbytes
        return self.block.memory[first : min(first + self._chunk_nbytes, self.nbytes)]

    def payload(self, index: int, number: int) -> Payload:
        """A chunk as a version of the inner transport."""
        data = self.chunk(index)
        head = torch.tensor([self.version, index, self.nbytes, self._chunk_nbytes], device="cpu")
        return Payload(number, chunk_layout(len(data)), (data, head))
