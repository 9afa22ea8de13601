"""Tensors of a version that are made one after the other, and never exist all at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from types import TracebackType
from typing import Any, overload

import torch
from torch import Tensor

from sync_core._util import Stopwatch
from sync_core.errors import ModelError, PrepareTimeoutError
from sync_core.weights.block import Block
from sync_core.weights.copying import copy
from sync_core.weights.layout import Layout, TensorSpec, check_tensor

#: The end of the message of a `PrepareTimeoutError`.
NOT_OFFERED = (
    "No worker was given the version, and on_failure leaves all of them alone; the next send sends "
    "newer weights. Make that faster, or type a longer timeout="
)
#: Instead of a tensor, after the last one; a source may yield None.
_END = object()


class TensorStream(Sequence[Tensor]):
    """The tensors of one version, made one after the other and read once: a source of an `Update`.

    A transport packs each tensor (`Payload.pack`) before the next is made, so a sender needs the
    memory of one packed version and of one tensor. A layer or a transport that asks for the
    tensors themselves gets views of one packed version, made for it.

    Args:
        layout: names, dtypes and shapes of the tensors.
        tensors: returns the tensors in the order of ``layout.specs``, or pairs of name and tensor;
            called once, when the first is read. A tensor must stay as it is until the next is
            asked for.

    Example:
        >>> layout = Layout.of_kinds([("a", torch.float32, (2,)), ("b", torch.float32, (1,))])
        >>> stream = TensorStream(layout, lambda: (torch.ones(n) for n in (2, 1)))
        >>> list(stream)
        [tensor([1., 1.]), tensor([1.])]
    """

    def __init__(self, layout: Layout, tensors: Callable[[], Iterable[Any]]) -> None:
        self.layout = layout
        self._tensors = tensors
        #: How long the tensors may take to be made, in seconds, and how long they took so far.
        self.limit, self.seconds = math.inf, 0.0
        self._drawn: Iterator[Tensor] | None = None
        # Where the tensors lie, once all of them were read.
        self._held: Sequence[Tensor] | None = None

    def draw(self) -> Iterator[Tensor]:
        """Return an iterator that makes each tensor and checks it; always the same one.

        Raises:
            ModelError: from the iterator: the source raised, ended too early, or gave another
                tensor than the layout says; the message names the tensor.
            PrepareTimeoutError: from the iterator, once: the tensors took longer than ``limit``.
        """
        if self._drawn is None:
            self._drawn = _TimedTensors(self, _checked(self._tensors, self.layout.specs))
        return self._drawn

    def fill(self, targets: Sequence[Tensor], packing: Stopwatch | None = None) -> Iterator[int]:
        """Copy each tensor into its target before the next is made, and yield its position.

        The last position is yielded once the source has ended. The targets count as the tensors
        from then on, for whatever reads the stream again during the same send.

        Args:
            targets: in the order of ``layout.specs``.
            packing: measures the copying, without what it takes to make the tensors.

        Raises:
            ModelError: see `draw`; or the stream was read before, and its tensors were not kept.
        """
        packing = packing or Stopwatch()
        if self._held is not None:
            with packing:
                copy(targets, self._held)
            yield len(targets) - 1
            return
        if self._drawn is not None:
            raise ModelError("the stream was read already; its tensors are made once for each send")
        last = len(targets) - 1
        for position, (target, tensor) in enumerate(zip(targets, self.draw(), strict=True)):
            with packing:
                copy([target], [tensor])
            if position == last:
                break
            yield position
        # The source may yet give one too many, or raise.
        self.finish()
        self.keep(targets)
        if targets:
            yield last

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Count these as the tensors, now that all were read.

        Args:
            tensors: in the order of ``layout.specs``.
        """
        self._held = tuple(tensors)

    def finish(self) -> None:
        """Make the tensors that were not read, and discard them.

        All ranks must gather the same tensors, also those that send nothing.
        """
        for _ in self.draw():
            pass

    def followed_by(self, layout: Layout, tensors: Sequence[Tensor]) -> TensorStream:
        """Return the same stream with other tensors behind it.

        Args:
            layout: of all of them.
            tensors: read when the others were.
        """
        return _Followed(layout, self, tensors)

    def stand_ins(self) -> tuple[Tensor, ...]:
        """Return tensors of the same dtypes and shapes that hold zeros and take no memory."""
        return tuple(
            torch.zeros((), dtype=spec.dtype, device="cpu").expand(spec.shape)
            for spec in self.layout.specs
        )

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        return self._whole()[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self.layout.specs)

    def _whole(self) -> Sequence[Tensor]:
        if self._held is None:
            block = Block.allocate(self.layout.nbytes)
            for _ in self.fill(block.views(self.layout)):
                pass
        assert self._held is not None
        return self._held


class read_to_its_end:  # noqa: N801 - it is used as `contextlib.suppress` is
    """In ``with``: make what is left of a stream's tensors, also after an exception.

    All ranks gather the same tensors, so that a rank which sends nothing, or which fails, would
    leave the others waiting. Ctrl-C ends without that.
    """

    def __init__(self, stream: TensorStream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._stream.finish()
        elif isinstance(error, Exception):
            with suppress(ModelError, PrepareTimeoutError):
                self._stream.limit = math.inf
                self._stream.finish()


class _Followed(TensorStream):
    """A stream, and tensors that are checked already."""

    def __init__(self, layout: Layout, first: TensorStream, then: Sequence[Tensor]) -> None:
        super().__init__(layout, tuple)
        self._first = first
        self._then = then

    def draw(self) -> Iterator[Tensor]:
        if self._drawn is None:
            first = self._first
            read = first.draw() if first._held is None else first._held
            self._drawn = chain(read, self._then)
        return self._drawn

    def fill(self, targets: Sequence[Tensor], packing: Stopwatch | None = None) -> Iterator[int]:
        yield from super().fill(targets, packing)
        self._first.keep(targets[: len(self._first)])


class _TimedTensors(Iterator[Tensor]):
    """Measures how long tensors take to be made, and raises once where that is too long.

    It can be read further, as all ranks must make the same tensors.
    """

    def __init__(self, stream: TensorStream, tensors: Iterator[Tensor]) -> None:
        self._stream = stream
        self._tensors = tensors
        self._position = 0
        # The longest of all, and the position of its tensor.
        self._slowest = (0.0, 0)

    def __next__(self) -> Tensor:
        stream, position = self._stream, self._position
        begin = time.perf_counter()
        tensor = next(self._tensors, None)
        seconds = time.perf_counter() - begin
        stream.seconds += seconds
        self._slowest = max(self._slowest, (seconds, position))
        if stream.seconds > stream.limit:
            error = self._late()
            stream.limit = math.inf
            raise error
        if tensor is None:
            raise StopIteration
        self._position += 1
        return tensor

    def _late(self) -> PrepareTimeoutError:
        specs = self._stream.layout.specs
        longest, slowest = self._slowest
        last = len(specs) - 1
        return PrepareTimeoutError(
            f"the stream took {self._stream.seconds:.1f} s to make tensors up to "
            f"{specs[min(self._position, last)].name!r}, {min(self._position, last) + 1} of "
            f"{len(specs)}; {specs[min(slowest, last)].name!r} alone took {longest:.1f} s, and all "
            f"of them may take {max(0.0, self._stream.limit):.1f} s. {NOT_OFFERED}"
        )


def _checked(tensors: Callable[[], Iterable[Any]], specs: Sequence[TensorSpec]) -> Iterator[Tensor]:
    """Yield each tensor of a source that is as its specification says."""
    count = len(specs)
    source: Iterator[Any] | None = None
    for position, spec in enumerate(specs):
        where = f"{spec.name!r}, tensor {position + 1} of {count}"
        try:
            source = iter(tensors()) if source is None else source
            item = next(source)
        except StopIteration:
            raise ModelError(
                f"the stream ended before {where}; a stream that is sent several times needs an "
                "iterable that can be read again, or a function that returns one, in place of a "
                "generator"
            ) from None
        except (ModelError, PrepareTimeoutError):
            raise  # a stream inside this one, which names the tensor
        except Exception as error:
            raise ModelError(f"the stream raised at {where}: {error!r}") from error
        yield _check(item, spec, where)
    if source is None:
        return
    try:
        more = next(source, _END)
    except (ModelError, PrepareTimeoutError):
        raise
    except Exception as error:
        last = f"{specs[-1].name!r}, its last tensor"
        raise ModelError(f"the stream raised after {last}: {error!r}") from error
    if more is not _END:
        raise ModelError(
            f"the stream gave more than the {count} tensors that it has names for: after "
            f"{specs[-1].name!r} came {_describe(more)}"
        )


def _check(item: Any, spec: TensorSpec, where: str) -> Tensor:
    name, tensor = item if isinstance(item, tuple) and len(item) == 2 else (spec.name, item)
    if name != spec.name:
        raise ModelError(f"the stream gave {name!r} where it said {where}")
    check_tensor(name, tensor)
    assert isinstance(tensor, Tensor)
    if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
        raise ModelError(
            f"the stream gave {_describe(tensor)} for {where}; its specification is {spec}"
        )
    if tensor.numel() and not tensor.data_ptr():
        raise ModelError(f"the stream gave a tensor without memory for {where}")
    return tensor


def _describe(item: Any) -> str:
    if isinstance(item, Tensor):
        return f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
    return f"{item!r:.80}"
