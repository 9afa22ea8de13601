"""The weights of one version: as hooks see them, and as transports carry them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import Tensor

from sync_core._util import Stopwatch
from sync_core.weights.block import Block, bodies_of, tensors_of
from sync_core.weights.copying import copy
from sync_core.weights.layout import Layout
from sync_core.weights.streamed import TensorStream


class Update:
    """Named tensors on their way to or from a payload.

    A layer changes an update in place, since a hook cannot replace an argument for the hooks
    inside it.

    Args:
        layout: names, dtypes and shapes.
        source: the tensors, in the order of ``layout.specs``; or the block that they lie in; or a
            `TensorStream`, which makes them one after the other.
        base: the version that a model must have for an update that lacks some of its tensors; 0
            for one that lacks none.
        extras: small tensors that travel beside the weights, by name: what was given to
            `Sender.send`, and what layers add for each other's ends. A layer begins its names with
            its own and a dot, adds them at version 0 too, and takes them out where it reads them.

    Example:
        >>> import torch
        >>> update = Update.of({"weight": torch.ones(2)})
        >>> update.replace([tensor.half() for tensor in update.tensors])
        >>> dict(update.items())
        {'weight': tensor([1., 1.], dtype=torch.float16)}
    """

    __slots__ = ("base", "extras", "layout", "source")

    def __init__(
        self,
        layout: Layout,
        source: Sequence[Tensor] | Block,
        base: int = 0,
        extras: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self.layout = layout
        self.source = source
        self.base = base
        self.extras: dict[str, Tensor] = dict(extras)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of ``layout.specs``."""
        return tensors_of(self.source, self.layout)

    @property
    def bodies(self) -> tuple[Tensor, ...]:
        """The bytes that all tensors are views of, in stretches; none when they lie anywhere."""
        return bodies_of(self.source, self.layout)

    @classmethod
    def of(cls, named: Mapping[str, Tensor]) -> Update:
        """An update of named tensors.

        Raises:
            ModelError: a tensor that cannot travel; the message names it.
        """
        layout = Layout.of(named)
        return cls(layout, [named[spec.name] for spec in layout.specs])

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Every name with its tensor, tied ones under each of their names."""
        tensors = self.tensors
        for name, position in self.layout.index.items():
            yield name, tensors[position]

    def copied(self) -> Update:
        """The same weights in their own memory; tied tensors stay tied."""
        return Update(self.layout, [tensor.detach().clone() for tensor in self.tensors])

    def replace(self, tensors: Sequence[Tensor]) -> None:
        """Put other tensors under the same names."""
        self.layout = self.layout.with_tensors(tensors)
        self.source = tuple(tensors)

    def become(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        """Put these tensors, in the order of ``layout.specs``, under another layout."""
        self.layout, self.source = layout, tuple(tensors)

    def rename(self, named: Mapping[str, Tensor]) -> None:
        """Put other tensors under other names."""
        renamed = Update.of(named)
        self.layout, self.source = renamed.layout, renamed.tensors


def _nothing_to_release() -> None:
    return


# Not frozen, which would double the time to make one; nor are `Answer` and `WorkerStatus`.
@dataclass(slots=True)
class Payload:
    """A version of the weights on its way.

    On the sender's side the tensors are the trainer's own, which the trainer changes as soon as
    the transport's `send` returns: read them before that. On the receiver's side they are views
    of what arrived, good until ``release`` is called.

    Args:
        version: the version of the weights.
        layout: the layout of the tensors.
        source: the tensors, in the order of ``layout.specs``; or the block that they lie in.
        release: called by the receiver when it no longer reads the tensors.
        known_at: (receiver) when the transport knew of the version (`time.perf_counter`); None
            where it does not tell.
        stage_seconds: (receiver) how long the version took to come from then on.
        packing: (sender) how long `pack` took, all its calls together.
        base: (sender) the version that this increment builds on; 0 for a whole version.

    Attributes:
        packed: (sender) the blocks that hold all of it, for as long as `send` runs and until the
            next version is sent; a transport that packs in another way than by `pack` adds its own.
            A copy made by `dataclasses.replace` begins with none.

    Example:
        >>> layout = Layout.of({"bias": torch.ones(3)})
        >>> data = Payload(1, layout, (torch.ones(3),)).to_bytes()
        >>> Payload.from_bytes(data, version=1).tensors
        (tensor([1., 1., 1.]),)
    """

    version: int
    layout: Layout
    source: Sequence[Tensor] | Block
    release: Callable[[], None] = _nothing_to_release
    known_at: float | None = None
    stage_seconds: float = 0.0
    packing: Stopwatch = field(default_factory=Stopwatch, compare=False)
    base: int = 0
    packed: list[Block] = field(default_factory=list, init=False, compare=False, repr=False)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of ``layout.specs``."""
        return tensors_of(self.source, self.layout)

    @property
    def bodies(self) -> tuple[Tensor, ...]:
        """The bytes that all tensors are views of, in stretches; none when they lie anywhere."""
        return bodies_of(self.source, self.layout)

    @property
    def nbytes(self) -> int:
        """Size in bytes when packed, header and body."""
        return self.layout.nbytes

    def pack(self, block: Block, positions: Sequence[int] | None = None) -> None:
        """Copy header and tensors into a block.

        Args:
            block: what is written to.
            positions: which tensors; None for all.
        """
        if positions is None and isinstance(self.source, TensorStream):
            for _ in self.pack_in_steps(block):
                pass
            return
        begin = time.perf_counter()
        block.write_header(self.layout)
        targets: Sequence[Tensor] = ()
        sources: Sequence[Tensor] = ()
        if positions is None and isinstance(self.source, Block):
            targets, sources = block.bodies(self.layout), self.source.bodies(self.layout)
        if not sources or list(map(Tensor.numel, targets)) != list(map(Tensor.numel, sources)):
            targets = block.views(self.layout)
            sources = tensors_of(self.source, self.layout)
        if positions is not None:
            targets = [targets[position] for position in positions]
            sources = [sources[position] for position in positions]
        copy(targets, sources)
        self.packing.seconds += time.perf_counter() - begin
        if positions is None:
            self.packed.append(block)

    @property
    def is_streamed(self) -> bool:
        """True if the tensors are made one after the other while they are packed."""
        return isinstance(self.source, TensorStream)

    def pack_in_steps(self, block: Block) -> Iterator[int]:
        """Pack from the beginning, and yield from time to time how many bytes are packed.

        A streamed payload is packed a tensor at a time: what is packed may leave while the next
        tensor is made. Any other is packed at once.

        Args:
            block: what is written to.

        Raises:
            ModelError: a tensor of a stream cannot be made; see `TensorStream.draw`.

        Example:
            >>> layout = Layout.of_kinds([(name, torch.float32, (16,)) for name in "ab"])
            >>> stream = TensorStream(layout, lambda: (torch.ones(16) for _ in range(2)))
            >>> payload = Payload(1, layout, stream)
            >>> block, start = Block.allocate(payload.nbytes), len(layout.header)
            >>> [done - start for done in payload.pack_in_steps(block)]
            [64, 128]
        """
        source, specs = self.source, self.layout.specs
        if not isinstance(source, TensorStream):
            self.pack(block)
            yield self.nbytes
            return
        block.write_header(self.layout)
        start = len(self.layout.header)
        for position in source.fill(block.views(self.layout), self.packing):
            after = position + 1
            if after == len(specs):
                self.packed.append(block)
            yield start + specs[after].offset if after < len(specs) else self.nbytes

    def to_bytes(self) -> bytes:
        """The payload as the bytes of a ``.safetensors`` file."""
        block = Block.allocate(self.nbytes)
        block.memory.zero_()
        self.pack(block)
        return block.memory.numpy().tobytes()

    @classmethod
    def unpack(
        cls,
        block: Block,
        version: int,
        *,
        digest: str | None = None,
        known: Layout | None = None,
        release: Callable[[], None] = _nothing_to_release,
        since: float | None = None,
    ) -> Payload:
        """The payload that is in a block, as views of it.

        Args:
            block: where it stands.
            version: the version that it is.
            digest: what the digest of its layout must be, or begin with.
            known: a layout that need not be read again if it has that digest.
            release: see the class.
            since: when the version became known (`time.perf_counter`); staging ends with this.

        Raises:
            PayloadError: the block holds no payload, or not the one with this digest.
        """
        layout = block.read_layout(digest, known)
        seconds = 0.0 if since is None else time.perf_counter() - since
        return cls(version, layout, block, release, since, seconds)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, version: int) -> Payload:
        """The payload that ``data`` holds, in its own memory.

        Raises:
            PayloadError: the bytes are not a payload.
        """
        return cls.unpack(Block.of_bytes(data), version)
