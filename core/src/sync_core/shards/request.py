"""The tensors that a rank of a trainer holds, and the regions that a worker requests of it."""

from __future__ import annotations

import base64
import json
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sync_core.errors import LayoutMismatchError, PayloadError
from sync_core.shards.local import Ranks
from sync_core.shards.plan import Region, intersect, shape_of, size_of, write_region
from sync_core.weights.checksums import checksum, sums_from_tensor, sums_to_tensor
from sync_core.weights.layout import CHECKSUMS, SHARD_VERSION, Layout

# A worker's answer has to fit into the buffer of a socket, with what else it says.
_LONGEST = 120_000
# A request unpacked, in characters: so many, and so many for each tensor that a rank holds. A layer
# that splits a tensor of 512 experts asks for as many regions, of 30 characters each.
_LARGEST, _LARGEST_OF_TENSOR = 1 << 16, 1 << 14
# The most that may be asked for, in times of what the rank holds: regions may overlap.
_TIMES = 4


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor of which a rank holds a region.

    Args:
        name: its name.
        dtype: the dtype in which it travels.
        region: the region.
        shape: the shape of the whole tensor; None where this rank knows its region only.
    """

    name: str
    dtype: torch.dtype
    region: Region
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class RegionSource:
    """A region of a trainer's tensor that is a region of a tensor under another name.

    Args:
        name: the trainer's tensor.
        region: the region of that.
        start: where it begins in the other tensor: an index for each dimension.
    """

    name: str
    region: Region
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Holding:
    """The tensors that one rank holds; it travels in the address.

    Args:
        ranks: the rank, and how many there are.
        tensors: what it holds.
        aliases: the names of tied tensors, each with the name of the tensor that is held.
        made_of: the tensors that workers have instead, by name, and the regions that each is made
            of; None where workers have the trainer's tensors.
        verified: whether checksums travel with the parts.
    """

    ranks: Ranks
    tensors: tuple[HeldTensor, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    made_of: Mapping[str, tuple[RegionSource, ...]] | None = None
    verified: bool = False


@dataclass(frozen=True, slots=True)
class ShardEndpoint:
    """The endpoint of one rank, and what that holds.

    Args:
        inner: the endpoint of the scheme's transport.
        holding: what the rank holds.
    """

    inner: Any
    holding: Holding


@dataclass(frozen=True)
class Request:
    """The regions that a worker wants of one rank.

    Args:
        regions: positions among the tensors that the rank holds, each with a region of the whole
            tensor; none of them twice.
    """

    regions: tuple[tuple[int, Region], ...]

    @classmethod
    def of(cls, wanted: Sequence[tuple[int, Region]]) -> Request:
        """The request for some regions, equal ones asked for once."""
        return cls(tuple(sorted(set(wanted))))

    def to_text(self) -> str:
        """The request as text, for `sync_core.Answer.request`.

        Raises:
            LayoutMismatchError: it is too long for an answer.
        """
        positions: dict[Region, list[int]] = defaultdict(list)
        for position, region in self.regions:
            positions[region].append(position)
        content = [[region, found] for region, found in positions.items()]
        packed = zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 9)
        text = base64.b85encode(packed).decode()
        if len(text) > _LONGEST:
            raise LayoutMismatchError(
                f"this worker wants {len(self.regions)} regions of one rank, and their list is "
                f"longer than the {_LONGEST} characters that an answer may have; give several "
                "senders a part of the model each"
            )
        return text

    @classmethod
    def from_text(cls, text: str, tensors: Sequence[HeldTensor]) -> Request:
        """The request that `to_text` wrote, for a rank that holds these tensors.

        Raises:
            PayloadError: it is not a request, or for something that the rank does not hold.
        """
        try:
            unpacker, limit = zlib.decompressobj(), _LARGEST + _LARGEST_OF_TENSOR * len(tensors)
            content = json.loads(unpacker.decompress(base64.b85decode(text), limit))
            regions = [
                (int(position), tuple((int(start), int(stop)) for start, stop in region))
                for region, positions in content
                for position in positions
            ]
            for position, region in regions:
                if position < 0 or intersect(region, tensors[position].region) != region:
                    raise ValueError(f"{write_region(region)} of tensor {position} is not held")
            request = cls.of(regions)
            held = sum(size_of(tensor.region) for tensor in tensors)
            if sum(size_of(region) for _, region in request.regions) > _TIMES * held:
                raise ValueError(f"it is for more than {_TIMES} times what the rank holds")
        except Exception as error:
            # Numbers without end, lists without end: whatever a worker has written.
            raise PayloadError(f"not a request for shards: {error!r:.300}") from error
        return request

    def layout(self, tensors: Sequence[HeldTensor], *, verified: bool = False) -> Layout:
        """The layout of the payloads that bring these regions, and the version after them.

        Args:
            tensors: what the rank holds.
            verified: whether a checksum of each of these follows.
        """
        kinds = [
            (tensors[i].name + write_region(region), tensors[i].dtype, shape_of(region))
            for i, region in self.regions
        ]
        kinds.append((SHARD_VERSION, torch.int64, (1,)))
        if verified:
            kinds.append((CHECKSUMS, torch.int64, (len(kinds),)))
        return Layout.of_kinds(kinds)


def seal(tensors: Sequence[Tensor]) -> Tensor:
    """The checksums of a payload's tensors, one of each, as the tensor in which they travel."""
    return sums_to_tensor([checksum([tensor]) for tensor in tensors])


def broken(layout: Layout, tensors: Sequence[Tensor]) -> list[str]:
    """The names of the tensors of a payload that do not match their checksums."""
    *sealed, sums = tensors
    found = [checksum([tensor]) for tensor in sealed]
    pairs = zip(layout.names, found, sums_from_tensor(sums), strict=False)
    return [name for name, mine, theirs in pairs if mine != theirs]
