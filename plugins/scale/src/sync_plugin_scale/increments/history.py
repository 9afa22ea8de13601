"""The newest version, packed, and what changed in the versions before it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from sync_core import Layout, Payload, TensorSpec
from sync_core.transports import Block, copy
from sync_plugin_scale.increments.compare import Comparer
from sync_plugin_scale.increments.patch import (
    HEADER_NBYTES,
    INCREMENT,
    BodyChecksum,
    Patch,
    Units,
    checksum,
    padded_nbytes,
    positions_of,
    shorten,
    unit_nbytes,
)

# The memory for positions that changed, as a share of a version's.
_MOST_POSITIONS = 1 / 16
# The memory for values of older versions: one copy of the model.
_MOST_VALUES = 1


@lru_cache(maxsize=64)
def described(layout: Layout) -> Layout:
    """Return the layout of a whole version as it travels: a description lies after its tensors."""
    end = padded_nbytes(layout) - len(layout.header)
    spec = TensorSpec(INCREMENT, torch.uint8, (HEADER_NBYTES,), end)
    return Layout((*layout.specs, spec), layout.aliases)


def describe(layout: Layout, version: int, checksum_: BodyChecksum | None) -> Patch:
    """Return the description of a whole version; see `Patch`."""
    unit = unit_nbytes(layout)
    size = (padded_nbytes(layout) - len(layout.header)) // unit
    nothing = np.empty(0, np.uint8), np.empty(0, f"u{unit}")
    return Patch(0, version, layout.digest, checksum_, size, *nothing)


@dataclass(frozen=True, slots=True)
class PackedVersion:
    """A version in memory: its layout, the block in which it lies, and its body as units.

    The bytes between tensors are 0, so that equal tensors make equal bodies. `allocate` makes one.

    Example:
        >>> layout = Layout.of({"w": torch.zeros(3)})
        >>> kept = PackedVersion.allocate(layout)
        >>> kept.pack(Payload(1, layout, [torch.ones(3)]))
        >>> kept.tensors[0]
        tensor([1., 1., 1.])
    """

    layout: Layout
    block: Block
    body: Units

    @classmethod
    def allocate(cls, layout: Layout) -> PackedVersion:
        """Memory for a version, also as it travels."""
        travelling = described(layout)
        block = Block.allocate(travelling.nbytes)
        block.memory.zero_()
        # The tensors begin where the longer header ends.
        body = block.bodies(travelling)[0][: padded_nbytes(layout) - len(layout.header)]
        return cls(layout, block, body.numpy().view(f"u{unit_nbytes(layout)}"))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The version's tensors, as views."""
        # Without the description, which lies after them.
        return self.block.views(described(self.layout))[:-1]

    def pack(self, payload: Payload) -> None:
        """Copy a payload into the body."""
        with payload.packing:
            copy(self.tensors, payload.tensors)

    def copy(self) -> PackedVersion:
        """The same version in other memory."""
        other = PackedVersion.allocate(self.layout)
        other.body[:] = self.body
        return other


@dataclass(frozen=True, slots=True)
class _Change:
    """The changes of one version.

    Args:
        previous: the version before it.
        version: the version.
        gaps: of the positions that changed; None for all.
        before: what ``previous`` had there, or all of it; None where no worker may ask for that.
    """

    previous: int
    version: int
    gaps: Units | None
    before: Units | PackedVersion | None

    @property
    def values_nbytes(self) -> int:
        if isinstance(self.before, PackedVersion):
            return self.before.body.nbytes
        return 0 if self.before is None else self.before.nbytes


class IncrementHistory:
    """Keeps the newest version packed, what changed in which version, and some older values.

    Not safe for threads. What interrupts `record` makes it forget everything, so that the next
    version travels whole.

    Args:
        below: see `Increments`.
        checked: whether versions have checksums.

    Example:
        >>> from sync_core import Layout, Payload
        >>> layout = Layout.of({"w": torch.zeros(100)})
        >>> history = IncrementHistory(below=0.3)
        >>> history.record(Payload(1, layout, [torch.zeros(100)]))
        >>> weights = torch.zeros(100); weights[3] = 1
        >>> history.record(Payload(2, layout, [weights]))
        >>> positions_of(history.since(1).gaps)
        array([3])
        >>> history.since(0) is None
        True
    """

    def __init__(self, below: float, *, checked: bool = True) -> None:
        self.version = 0
        self._checked = checked
        self._below = below
        self._newest = PackedVersion.allocate(Layout(()))
        self._comparer = Comparer(self._newest.layout)
        self._checksum: BodyChecksum | None = None
        # At the positions that changed with the newest version; None where all did.
        self._values: Units | None = None
        self._changes: list[_Change] = []
        # The oldest version on which an increment can build.
        self._oldest = 0

    def record(self, payload: Payload, *, keep: bool = False) -> None:
        """Make a payload the newest version.

        Args:
            payload: the version, newer than every one before.
            keep: whether a worker may yet ask for the version that is the newest now.
        """
        # An interrupted call leaves nothing known.
        self._values = None
        previous, self.version = self.version, 0
        changes, self._changes = self._changes, []
        if previous and payload.layout == self._newest.layout:
            gaps, before = self._write(payload, keep=keep)
        else:
            gaps, before = self._replace(payload, keep=keep and bool(previous))
        self._checksum = checksum(self._newest.body) if self._checked else None
        if gaps is None:
            self._oldest = payload.version
        self._changes = [*changes, _Change(previous, payload.version, gaps, before)]
        self.version = payload.version

    def forget(self, held: int, wanted: int) -> None:
        """Forget what no worker needs, and what there is no memory for.

        Args:
            held: the oldest version that a worker holds.
            wanted: the oldest version that a worker may ask for.
        """
        nbytes = self._newest.body.nbytes
        needed = [c for c in self._changes if c.version > min(held, wanted)]
        while needed and (
            sum(c.gaps.nbytes for c in needed if c.gaps is not None) > _MOST_POSITIONS * nbytes
            or sum(c.values_nbytes for c in needed) > _MOST_VALUES * nbytes
        ):
            del needed[0]
        for change in self._changes[: len(self._changes) - len(needed)]:
            self._oldest = max(self._oldest, change.version)
        self._changes = needed

    def since(self, base: int) -> Patch | None:
        """Return what changed after a version; None where a whole version is shorter, or needed."""
        if not base or not self._oldest <= base <= self.version:
            return None
        every = [c.gaps for c in self._changes if c.version > base and c.gaps is not None]
        if len(every) == 1 and every[0] is self._changes[-1].gaps and self._values is not None:
            gaps, values = every[0], self._values
        else:
            none = np.empty(0, np.int64)
            positions = np.unique(np.concatenate([none, *map(positions_of, every)]))
            gaps = shorten(np.diff(positions, prepend=0))
            values = self._newest.body[positions]
        digest, size = self._newest.layout.digest, len(self._newest.body)
        patch = Patch(base, self.version, digest, self._checksum, size, gaps, values)
        return patch if patch.nbytes < self._below * self._newest.body.nbytes else None

    def at(self, version: int) -> Payload | None:
        """Return a whole version as it travels; None where older values are not known.

        Good until the next call of any method.
        """
        if not version:
            return None
        packed = self._newest if version == self.version else self._restored(version)
        if packed is None:
            return None
        known = self._checksum if packed is self._newest else checksum(packed.body)
        layout = described(packed.layout)
        description = describe(packed.layout, version, known)
        packed.block.views(layout)[-1].copy_(description.to_tensor())
        return Payload(version, layout, packed.block)

    def _restored(self, version: int) -> PackedVersion | None:
        """Return an older version in its own memory."""
        packed, reached = self._newest, self.version
        undone: list[_Change] = []
        for change in reversed(self._changes):
            if reached == version:
                break
            if change.before is None:
                return None
            if isinstance(change.before, PackedVersion):
                packed, undone = change.before, []
            else:
                undone.append(change)
            reached = change.previous
        if reached != version:
            return None
        packed = packed.copy()
        for change in undone:
            assert change.gaps is not None
            packed.body[positions_of(change.gaps)] = change.before
        return packed

    def _write(
        self, payload: Payload, *, keep: bool
    ) -> tuple[Units | None, Units | PackedVersion | None]:
        body = self._newest.body
        # A position costs its value and a gap of at least one byte.
        limit = int(self._below * body.nbytes / (body.itemsize + 1))
        found = self._comparer.update(body, payload, limit, keep=keep)
        if found.complete:
            self._values = found.values
            return shorten(found.gaps), found.before if keep else None
        before = None
        if keep:
            before = self._newest.copy()
            before.body[found.positions] = found.before
        self._newest.pack(payload)
        return None, before

    def _replace(self, payload: Payload, *, keep: bool) -> tuple[None, PackedVersion | None]:
        before = self._newest if keep else None
        self._newest = PackedVersion.allocate(payload.layout)
        self._comparer = Comparer(payload.layout)
        self._newest.pack(payload)
        return None, before
