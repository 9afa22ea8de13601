"""The regions that a worker requests of a rank, and the payloads that bring them."""

from __future__ import annotations

import base64
import json
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sync_core import Layout, TensorSpec
from sync_core.errors import LayoutMismatchError, PayloadError
from sync_core.models import Region
from sync_core.transports import RESERVED_PREFIX, checksum, sums_to_tensor
from sync_plugin_scale.shards.endpoint import HeldTensor
from sync_plugin_scale.shards.plan import intersect, shape_of, size_of, write_region

#: The name of the tensor that makes a payload a question: which regions does the worker want?
ASK = f"{RESERVED_PREFIX}shards.wanted"
#: The names of the tensors after the parts of a version: its number, and their checksums.
VERSION, CHECKSUMS = f"{RESERVED_PREFIX}shards.version", f"{RESERVED_PREFIX}shards.checksums"

# A worker's answer has to fit into the buffer of a socket, with what else it says.
_LONGEST = 120_000
# A request unpacked, in characters: so many, and so many for each tensor that a rank holds. A layer
# that splits a tensor of 512 experts asks for as many regions, of 30 characters each.
_LARGEST, _LARGEST_OF_TENSOR = 1 << 16, 1 << 14
# The most that may be asked for, in times of what the rank holds: regions may overlap.
_TIMES = 4


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

    def layout(
        self,
        tensors: Sequence[HeldTensor],
        extras: Sequence[TensorSpec] = (),
        *,
        verified: bool = False,
    ) -> Layout:
        """The layout of the payloads that bring these regions, and the version after them.

        Args:
            tensors: what the rank holds.
            extras: the extras of the version, which come last.
            verified: whether checksums follow the version.
        """
        kinds = [
            (tensors[i].name + write_region(region), tensors[i].dtype, shape_of(region))
            for i, region in self.regions
        ]
        kinds.append((VERSION, torch.int64, (1,)))
        if verified:
            kinds.append((CHECKSUMS, torch.int64, (len(kinds),)))
        kinds += [(spec.name, spec.dtype, spec.shape) for spec in extras]
        return Layout.of_kinds(kinds)


def seal(parts: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """The checksums of parts, and one of the version with the extras, as they travel."""
    return sums_to_tensor([*(checksum([part]) for part in parts), checksum(others)])


def broken(layout: Layout, tensors: Sequence[Tensor]) -> list[str]:
    """The names of the tensors of a payload that do not match their checksums."""
    at = layout.index[CHECKSUMS]
    found = seal(tensors[: at - 1], (tensors[at - 1], *tensors[at + 1 :])).tolist()
    return [
        name
        for name, mine, theirs in zip(layout.names, found, tensors[at].tolist(), strict=False)
        if mine != theirs
    ]
