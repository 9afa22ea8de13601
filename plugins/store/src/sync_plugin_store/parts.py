"""Reads parts of versions, for readers whose model is a shard.

`parts_of` returns the parts that a model needs, a `Plan` the chunks of a version that contain them,
and a `PartFetch` reads the chunks.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice, product
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor

from sync_core import Layout, TensorSpec
from sync_core.errors import LayoutMismatchError, PayloadError
from sync_core.models import Region
from sync_core.transports import Block
from sync_plugin_scale import HeldTensor, Holding
from sync_plugin_scale.shards import (
    RegionViews,
    WholeModel,
    intersect,
    shape_of,
    size_of,
    wanted_regions,
    whole_region,
    write_region,
)
from sync_plugin_store.chunks import Chunk, Chunks, read_chunks
from sync_plugin_store.format import Manifest
from sync_plugin_store.holdings import Copy, JoinedHoldings, Wanted

if TYPE_CHECKING:
    from sync_plugin_store.reader import RunReader

_T = TypeVar("_T")

__all__ = ["PartFetch", "Parts", "Plan", "Range", "VersionFile", "parts_of"]

# Shorter runs of a tensor's bytes are read together with the gaps between them, in bytes, since
# each run would be a request.
_LEAST_RUN = 32 << 10
# Ranges are joined as long as the gaps between them are at most this share of the needed bytes.
_BETWEEN = 1 / 50


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of each version that a reader needs.

    Args:
        wanted: the parts.
        layout: the layout of the whole model.
    """

    wanted: tuple[Wanted, ...]
    layout: Layout


def parts_of(model: Any, layout: Layout, *, cast: bool) -> tuple[Parts, RegionViews, Layout]:
    """Return the parts that a model needs, views of its tensors, and the views' layout.

    Args:
        model: a model for which `sync_plugin_scale.shards.is_divided` is true.
        layout: the layout of the trainer's model.
        cast: whether floating-point tensors may have other dtypes.

    Raises:
        LayoutMismatchError: the model does not fit the trainer's.
        ModelError: the model cannot be read.
    """
    held = (HeldTensor(s.name, s.dtype, whole_region(s.shape), s.shape) for s in layout.specs)
    trainer = WholeModel([Holding(0, 1, tuple(held), layout.aliases)])
    wanted, views, kinds = [], {}, []
    for name, region in wanted_regions(model, trainer, cast=cast).items():
        spec = layout.specs[layout.index[name]]
        if intersect(region, whole_region(spec.shape)) != region:
            raise LayoutMismatchError(
                f"{name!r} is {list(spec.shape)} in the weights, and the model wants "
                f"{write_region(region)} of it"
            )
        view = name if region == whole_region(spec.shape) else name + write_region(region)
        wanted.append(Wanted(view, spec.name, region, spec.shape))
        views[view] = (name, region)
        kinds.append((view, spec.dtype, shape_of(region)))
    return Parts(tuple(wanted), layout), RegionViews(model, views), Layout.of_kinds(kinds)


@dataclass(eq=False, slots=True)
class _ByteRun:
    """Contiguous bytes of a tensor, and the tensor to write them to.

    Args:
        start: the first byte, counted from the start of the body.
        nbytes: the number of bytes.
        target: the tensor to write.
        shape: the shape of the data that is read, of which ``target`` may be a part.
        inner: that part.
        left: the number of bytes that have not arrived.
    """

    start: int
    nbytes: int
    target: Tensor
    shape: tuple[int, ...]
    inner: tuple[slice, ...]
    left: int
    memory: Tensor | None = None

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    def prepare(self) -> Tensor:
        """Return the memory for the bytes: the target's own if it needs all of them."""
        if self.memory is None:
            if self.target.nbytes == self.nbytes and self.target.is_contiguous():
                self.memory = self.target.view(-1).view(torch.uint8)
            else:
                self.memory = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        return self.memory

    def finish(self) -> None:
        """Copy the needed bytes to the target, unless they were read into it directly."""
        memory, self.memory = self.prepare(), None
        if memory.data_ptr() != self.target.data_ptr():
            self.target.copy_(memory.view(self.target.dtype).view(self.shape)[self.inner])


def _runs_of(spec: TensorSpec, region: Region, target: Tensor) -> Iterator[_ByteRun]:
    """Return the runs of bytes that make up a region of a tensor."""
    shape, steps = spec.shape, [spec.dtype.itemsize]
    for size in shape[:0:-1]:
        steps.insert(0, steps[0] * size)
    if not shape:
        yield _ByteRun(spec.offset, spec.nbytes, target, shape, (), spec.nbytes)
        return
    axis = len(shape) - 1
    while axis and region[axis] == (0, shape[axis]):
        axis -= 1
    while axis and (region[axis][1] - region[axis][0]) * steps[axis] < _LEAST_RUN:
        axis -= 1
    first, last = region[axis]
    inner = (slice(None), *(slice(start, stop) for start, stop in region[axis + 1 :]))
    nbytes = (last - first) * steps[axis]
    for index in product(*(range(start, stop) for start, stop in region[:axis])):
        begin = spec.offset + sum(i * step for i, step in zip(index, steps, strict=False))
        there = tuple(i - start for i, (start, _) in zip(index, region, strict=False))
        yield _ByteRun(
            begin + first * steps[axis],
            nbytes,
            target[there],
            (last - first, *shape[axis + 1 :]),
            inner,
            nbytes,
        )


@dataclass(slots=True)
class Range:
    """Consecutive chunks of one object, and the byte runs that overlap them."""

    chunks: list[Chunk]
    lock: threading.Lock
    #: The index of the file in the version.
    file: int
    runs: list[_ByteRun] = field(default_factory=list)

    def take(self, memory: memoryview) -> None:
        """Write the needed bytes of a checked range.

        Args:
            memory: the bytes of the range.
        """
        for run in self.runs:
            start, stop = max(run.start, self.start), min(run.stop, self.stop)
            with self.lock:
                target = run.prepare()
            part = target.numpy()[start - run.start : stop - run.start]
            part[:] = memory[start - self.start : stop - self.start]
            with self.lock:
                run.left -= stop - start
                complete = not run.left
            if complete:
                run.finish()

    @property
    def start(self) -> int:
        return self.chunks[0].start

    @property
    def stop(self) -> int:
        return self.chunks[-1].start + self.chunks[-1].nbytes


@dataclass(frozen=True, slots=True)
class VersionFile:
    """One file of a version.

    Args:
        layout: the layout of the file.
        chunks: the chunks of its body.
    """

    layout: Layout
    chunks: Chunks


class Plan:
    """The chunks of a version to read, and the bytes of them to write.

    Args:
        sources: the files to read from, by their index.
        kinds: the name, dtype and shape of each tensor to write.
        copies: the locations of its parts.
        aliases: pairs of the name of a tied tensor and the name under which it is written.
        most_nbytes: the most bytes to read.

    Raises:
        PayloadError: the version lacks a part, or its parts are too large.
    """

    def __init__(
        self,
        sources: Mapping[int, VersionFile],
        kinds: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
        copies: Iterable[Copy],
        aliases: tuple[tuple[str, str], ...] = (),
        *,
        most_nbytes: int = sys.maxsize,
    ) -> None:
        for source in sources.values():
            needed, there = source.layout.body_nbytes, source.chunks.begins[-1]
            if needed > there:
                raise PayloadError(f"a version needs {needed} bytes, and has {there}")
        found = [(each, _spec_of(sources[each.file].layout, each, kinds)) for each in copies]
        # Extras come last and whole; the version's extras are those of the first file.
        first = min(sources)
        layout = sources[first].layout
        extras = layout.specs[len(layout.plain.specs) :]
        for position, spec in enumerate(extras, len(kinds)):
            region = whole_region(spec.shape)
            found.append((Copy(position, first, spec.name, spec.shape, region, region), spec))
        every = [*kinds, *((spec.name, spec.dtype, spec.shape) for spec in extras)]
        #: The layout of the written tensors.
        self.layout = Layout.of_kinds(every, aliases)
        if self.layout.nbytes > most_nbytes:
            raise PayloadError(
                f"the version has {self.layout.nbytes} bytes, and there is reason for "
                f"{most_nbytes} at most"
            )
        self.block = Block.allocate(self.layout.nbytes)
        self.block.write_header(self.layout)
        # Guards the `left` counts of the runs.
        self._lock = threading.Lock()
        targets = self.block.views(self.layout)
        runs: dict[int, list[_ByteRun]] = {number: [] for number in sources}
        for each, spec in found:
            if size_of(each.region):
                target = targets[each.view][tuple(slice(*bounds) for bounds in each.at)]
                runs[each.file] += _runs_of(spec, each.region, target)
        #: The ranges to read, in the order of the files.
        self.ranges = [
            each
            for number, source in sources.items()
            for each in self._ranges(number, source.chunks, runs[number])
        ]

    @classmethod
    def of_file(cls, layout: Layout, chunks: Chunks, wanted: Sequence[Wanted]) -> Self:
        """Return the plan for a version that is one file.

        Args:
            layout: the version's layout.
            chunks: the version's chunks.
            wanted: the parts to read.

        Raises:
            PayloadError: the version lacks a part.
        """
        kinds, copies = [], []
        for number, each in enumerate(wanted):
            position = layout.index.get(each.name)
            spec = None if position is None else layout.specs[position]
            if spec is None or spec.shape != each.shape:
                raise _missing(spec, each)
            shape = shape_of(each.region)
            kinds.append((each.view, spec.dtype, shape))
            copies.append(Copy(number, 0, spec.name, spec.shape, each.region, whole_region(shape)))
        return cls({0: VersionFile(layout, chunks)}, kinds, copies)

    def _ranges(self, file: int, chunks: Chunks, runs: Sequence[_ByteRun]) -> list[Range]:
        needed = sorted({i for run in runs for i in chunks.between(run.start, run.stop)})
        ranges: list[Range] = []
        gaps: list[tuple[int, int]] = []
        before = -1
        for number in needed:
            chunk = chunks.chunks[number]
            same = bool(ranges) and chunks.chunks[before].piece == chunk.piece
            if same and number == before + 1:
                ranges[-1].chunks.append(chunk)
            else:
                if same:
                    gaps.append((chunk.start - ranges[-1].stop, len(ranges)))
                ranges.append(Range([chunk], self._lock, file))
            before = number
        ranges = _joined(chunks, ranges, gaps)
        starts = [each.start for each in ranges]
        for run in runs:
            first = bisect_right(starts, run.start) - 1
            for each in ranges[first : bisect_left(starts, run.stop)]:
                each.runs.append(run)
        return ranges


def _joined(chunks: Chunks, ranges: list[Range], gaps: list[tuple[int, int]]) -> list[Range]:
    """Join the ranges with the smallest gaps, to send fewer requests."""
    left = _BETWEEN * sum(each.stop - each.start for each in ranges)
    joined = set()
    for nbytes, number in sorted(gaps):
        left -= nbytes
        if left < 0:
            break
        joined.add(number)
    result: list[Range] = []
    for number, each in enumerate(ranges):
        if number in joined:
            between = chunks.between(result[-1].stop, each.start)
            result[-1].chunks += [*(chunks.chunks[i] for i in between), *each.chunks]
        else:
            result.append(each)
    return result


def _spec_of(
    layout: Layout, copy: Copy, kinds: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]
) -> TensorSpec:
    """Return the tensor that contains a copy's region."""
    position = layout.index.get(copy.name)
    spec = None if position is None else layout.specs[position]
    dtype = kinds[copy.view][1]
    if spec is None or (spec.dtype, spec.shape) != (dtype, copy.shape):
        raise PayloadError(
            f"file {copy.file} of the version has {spec or 'nothing'} for {copy.name!r}, and its "
            f"manifest {dtype} of {copy.shape}"
        )
    return spec


def _missing(spec: TensorSpec | None, wanted: Wanted) -> PayloadError:
    return PayloadError(
        f"the version has {spec or 'nothing'} for {wanted.name!r}, of which a part was to be read "
        f"as one of {list(wanted.shape)}; make a new Receiver"
    )


class PartFetch:
    """Reads parts of a version into memory, as `Fetch` reads a whole version.

    Args:
        reader: the reader of the run.
        pool: the threads that read objects.
        manifest: the version.
        notify: called by other threads when files were opened, and when all parts have arrived or
            one has failed.
        parts: the parts to read; None for all of a version that ranks wrote together.
    """

    def __init__(
        self,
        reader: RunReader,
        pool: ThreadPoolExecutor,
        manifest: Manifest,
        notify: Callable[[], object],
        parts: Parts | None,
    ) -> None:
        self.manifest = manifest
        self.began = time.perf_counter()
        self._reader = reader
        self._pool = pool
        self._notify = notify
        self._parts = parts
        self._plan: Plan | None = None
        self._joined: JoinedHoldings | None = None
        self._wanted: Sequence[Wanted] = () if parts is None else parts.wanted
        self._copies: Sequence[Copy] = ()
        # The files to read from, and those that have been opened.
        self._needed: Sequence[int] = (0,)
        self._sources: dict[int, VersionFile] = {}
        # Guards the list of reads and the opened files.
        self._lock = threading.Lock()
        self._reading: list[Future[None]] = []
        self._failed = False
        self._submit(self._begin)

    @property
    def broken(self) -> int:
        """The version if it has failed, else 0."""
        with self._lock:
            failed = _failure(future for future in self._reading if future.done())
        return 0 if failed is None else self.manifest.version

    @property
    def ended(self) -> bool:
        """True once every part has arrived or one has failed."""
        with self._lock:
            reading = list(self._reading)
        done = [future for future in reading if future.done()]
        return len(done) == len(reading) or _failure(done) is not None

    def result(self) -> Block:
        """Return a block with the parts, all bytes checked.

        Raises:
            PayloadError: a part could not be read.
            ClosedError: the reader was closed before all parts were read.
        """
        self._reader.check_open()
        with self._lock:
            reading = list(self._reading)
        failure = _failure(future for future in reading if future.done())
        if failure is not None:
            raise failure
        assert self._plan is not None
        return self._plan.block

    def _submit(self, call: Callable[[], None]) -> None:
        future = self._pool.submit(call)
        with self._lock:
            self._reading.append(future)
        future.add_done_callback(lambda _: self._notify())

    def _submit_each(self, call: Callable[[_T], None], each: Sequence[_T]) -> None:
        """Call a function with each of many items, with a limited number of concurrent calls."""
        todo = iter(each)

        def work() -> None:
            while not self._failed:
                with self._lock:
                    found = list(islice(todo, 1))
                if not found:
                    return
                try:
                    call(found[0])
                except BaseException:
                    self._failed = True
                    raise

        for _ in range(min(self._reader.streams, len(each))):
            self._submit(work)

    def _begin(self) -> None:
        """Find the needed files, and start opening them."""
        manifest = self.manifest
        if manifest.base:
            raise PayloadError(
                f"version {manifest.version} is an increment, of which no part can be read; give "
                "Receiver a whole model, or let the trainer publish whole versions"
            )
        if manifest.ranks:
            self._joined = joined = self._reader.holdings(manifest)
            if self._parts is None:
                self._wanted = joined.everything()
            for each in self._wanted:
                position = joined.layout.index.get(each.name)
                spec = None if position is None else joined.layout.specs[position]
                if spec is None or spec.shape != each.shape:
                    raise _missing(spec, each)
            self._copies = joined.copies(self._wanted)
            # The file of the first rank has the extras.
            self._needed = sorted({0, *(each.file for each in self._copies)})
        self._submit_each(self._open, self._needed)

    def _open(self, number: int) -> None:
        """Read a file's header and list of chunks; after the last file, start the other reads."""
        file, version = self.manifest.files[number], self.manifest.version
        header = bytearray(file.pieces[0].nbytes)
        self._reader.read_piece(file.pieces[0], memoryview(header), version)
        listed = None
        # Whole pieces need no list, since their names are their digests.
        if file.chunks is not None and self._parts is not None:
            listed = bytearray(file.chunks.nbytes)
            self._reader.read_piece(file.chunks, memoryview(listed), version)
        chunks = read_chunks(None if listed is None else memoryview(listed), file)
        source = VersionFile(Layout.from_header(bytes(header)), chunks)
        with self._lock:
            self._sources[number] = source
            complete = len(self._sources) == len(self._needed)
        if complete:
            self._plan = plan = self._planned()
            self._submit_each(self._read, plan.ranges)

    def _planned(self) -> Plan:
        if self._joined is None:
            return Plan.of_file(self._sources[0].layout, self._sources[0].chunks, self._wanted)
        layout = self._joined.layout
        kinds = [
            (each.view, layout.specs[layout.index[each.name]].dtype, shape_of(each.region))
            for each in self._wanted
        ]
        aliases = layout.aliases if self._parts is None else ()
        sources = {number: self._sources[number] for number in self._needed}
        most_nbytes = self._reader.most_nbytes
        return Plan(sources, kinds, self._copies, aliases, most_nbytes=most_nbytes)

    def _read(self, each: Range) -> None:
        chunks = self._sources[each.file].chunks
        number = each.chunks[0].piece
        data = bytearray(each.stop - each.start)
        memory = memoryview(data)
        begin = each.start - chunks.begins[number - 1]
        piece = chunks.pieces[number]
        self._reader.read_chunks(piece, begin, memory, each.chunks, self.manifest.version)
        each.take(memory)


def _failure(done: Iterable[Future[None]]) -> BaseException | None:
    return next((e for f in done if not f.cancelled() and (e := f.exception()) is not None), None)
