"""Notices that a version has the same weights as the one before or as an older one; warns once.

A sample of a version's bytes is compared with that of the version before. Only where these are
equal, and for the first version, checksums of all bytes are made: training changes nearly every
element, so that most sends take only the sample, while their workers commit.
"""

from __future__ import annotations

import ctypes
import logging
import random
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from sync_core.models.attributes import UnsentAttributes
from sync_core.report import SendReport
from sync_core.weights.block import Block
from sync_core.weights.layout import Layout, TensorSpec
from sync_core.weights.payload import Payload

_log = logging.getLogger("sync_core")

# Sends in succession with the same weights, the first of them included, of which one warns.
_EQUAL = 3
# The places that are sampled, and bytes at each: 1,024 elements of float32. Where a step changes
# 0.7 % of the elements, as one in bfloat16 may, none of them changes in 1 of 1,300 sends.
_PLACES, _WIDTH = 16, 256
# After 8 versions that differ, one that follows within 10 ms is not compared: a
# sample takes 10 to 20 us, 5 % of sends of a small model that follow each other without a pause.
_DIFFERENT, _SECONDS = 8, 0.01
# The versions whose samples are known, and by how many bytes a sample must differ from the one
# before so that training has changed it: by fewer where only a counter or a flag in it changes.
_KNOWN, _TRAINED = 4096, 64
# Attributes are compared at each power of two of sends, and at each multiple of this number.
_SELDOM = 256
# The most sends that follow each other without checksums where samples prove to be misleading.
_LONGEST_REST = 64


class Repeats:
    """Compares each version that goes to all workers with the one before it.

    Example:
        >>> repeats, weight = Repeats(), torch.zeros(100)
        >>> layout = Layout.of({"weight": weight})
        >>> [repeats.look(Payload(version, layout, [weight])) for version in (1, 2)]
        [None, True]
        >>> weight[7] = 1.0
        >>> repeats.look(Payload(3, layout, [weight]))
        False
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._tensors = _Tensors(())
        self._sample = b""
        self._checksums: list[int] | None = None
        self._begun = False
        self._different = 0
        self._looked = 0.0
        self._rest = self._pause = 0
        # Sends that had the weights of the one before.
        self._run = 0
        self._last: SendReport | None = None
        self._warns = True
        # The version that had a sample last, by the sample's hash.
        self._versions: dict[int, int] = {}
        self._warns_of_older = True
        #: Of the version that was looked at last; see `SendReport.equals`.
        self.equals = 0

    def look(self, payload: Payload) -> bool | None:
        """Compare a version with the last one that was looked at; its memory must not change.

        Returns:
            Whether all of the bytes are the same; None where that is not known: there was none, it
            has other names, its tensors are not in the CPU's memory, or there was no need to look.
        """
        now = time.perf_counter()
        self.equals = 0
        if self._different >= _DIFFERENT and now - self._looked < _SECONDS:
            return None
        self._looked = now
        if payload.layout is not self._layout:
            self._layout = payload.layout
            specs = payload.layout.plain.specs
            if specs != self._tensors.specs:
                self._tensors = _Tensors(specs)
                self._sample, self._checksums = b"", None
                self._versions.clear()
        before, self._sample = self._sample, self._tensors.sample(payload)
        if self._sample != before:
            self.equals = self._older(before, payload.version)
        if not self._sample or (self._sample != before and self._begun):
            self._checksums = None
            self._different += 1
            return False if before and self._sample else None
        self._begun = True
        self._different = 0
        if self._rest:
            self._rest -= 1
            self._checksums = None
            return None
        known, self._checksums = self._checksums, self._tensors.checksums(payload)
        if known is None or self._checksums is None:
            return None
        if known == self._checksums:
            return True
        # What changes is not in the sample: so that checksums cost little, fewer are made.
        self._pause = self._rest = min(2 * self._pause or 1, _LONGEST_REST)
        return False

    def _older(self, before: bytes, version: int) -> int:
        """Return the older version with this sample, if there is one; remember this version."""
        if not self._sample:
            return 0
        key = hash(self._sample)
        older = self._versions.pop(key, 0)
        self._versions[key] = version
        if len(self._versions) > _KNOWN:
            del self._versions[next(iter(self._versions))]
        if older and not self._tensors.sampled_whole:
            changed = sum(a != b for a, b in zip(before, self._sample, strict=True))
            return older if changed >= _TRAINED else 0
        return older

    def count(self, report: SendReport, model: Any) -> None:
        """Take the report of a send that has ended, and warn where weights should have changed.

        The same weights are sent again on purpose after a send that a worker failed, and to workers
        that are new.

        Args:
            report: of any send.
            model: what was sent: a module, modules by name, or anything else.
        """
        if report.equals and self._warns_of_older and model is not None:
            self._warns_of_older = False
            _log.warning(_went_back(report))
        if report.unchanged is False:
            self._run, self._last = 0, report
            return
        if report.workers and all(result.skipped for result in report.workers.values()):
            return  # nothing was sent
        last, self._last = self._last, report
        if report.unchanged and last is not None and last.updated == tuple(report.workers):
            self._run += 1
            if self._run + 1 >= _EQUAL and self._warns and not _is_frozen(model):
                self._warns = False
                _log.warning(_advice(report, self._run + 1))

    def keep_quiet(self) -> None:
        """Warn no more: the weights are a part of a version, of which another part may change."""
        self._warns = False


class UnsentLog:
    """Warns once, in the log, of an attribute that has changed since the first send of a model."""

    def __init__(self) -> None:
        self._model: Any = None
        self._attributes: UnsentAttributes | None = None
        self._sends = 0

    def look(self, model: Any, model_id: str) -> None:
        """Compare, at sends of which the number is a power of two, or a multiple of 256.

        Args:
            model: what was sent: a module, modules by name, or anything else.
            model_id: its name, for the message.
        """
        if model is not self._model:
            named = model if isinstance(model, Mapping) else {model_id: model}
            self._model, self._attributes, self._sends = model, UnsentAttributes(named), 1
            return
        self._sends += 1
        if self._attributes is None or (self._sends & (self._sends - 1) and self._sends % _SELDOM):
            return
        if changes := self._attributes.changes():
            self._attributes = None
            _log.warning("%s; this warning comes once", changes[0].advice)


class _ElsewhereError(Exception):
    """A tensor is not in the CPU's memory, or not in one piece."""


class _Tensors:
    """Reads the bytes of tensors where they lie: packed, or in the trainer's memory.

    Args:
        specs: of the tensors of a payload, without extras.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = specs
        # The places in each tensor, by its position; and the same in the body of a block.
        self._places: dict[int, list[slice]] = {}
        self._in_body: dict[int, list[slice]] = {0: []}
        chosen = _choose(specs)
        #: Whether a sample has all bytes of the tensors.
        self.sampled_whole = sum(b - a for _, a, b in chosen) == sum(s.nbytes for s in specs)
        for i, begin, end in chosen:
            self._places.setdefault(i, []).append(slice(begin, end))
            offset = specs[i].offset
            self._in_body[0].append(slice(offset + begin, offset + end))

    def sample(self, payload: Payload) -> bytes:
        """Return some bytes, always from the same places; none where they cannot be read."""
        try:
            bodies = _packed(payload)
            tensors = bodies or payload.tensors
            found: list[memoryview] = []
            for i, slices in (self._in_body if bodies else self._places).items():
                found += map(_bytes(tensors[i]).__getitem__, slices)
            return b"".join(found)
        except _ElsewhereError:
            return b""

    def checksums(self, payload: Payload) -> list[int] | None:
        """Return checksums: a change of up to 32 bits in succession is never missed.

        3.1 GB/s; None where a tensor cannot be read.
        """
        try:
            if bodies := _packed(payload):
                body = _bytes(bodies[0])
                return [zlib.crc32(body[a:b]) for a, b in _stretches(self.specs)]
            tensors = payload.tensors[: len(self.specs)]
            return [zlib.crc32(_bytes(tensor)) for tensor in tensors if tensor.numel()]
        except _ElsewhereError:
            return None


def _packed(payload: Payload) -> tuple[Tensor, ...]:
    """Return the body of a payload that was packed, in one piece; none of one that was not."""
    block = payload.packed[-1] if payload.packed else payload.source
    if isinstance(block, Block):
        bodies = block.bodies(payload.layout)
        if len(bodies) != 1:
            raise _ElsewhereError
        return bodies
    if payload.is_streamed:
        raise _ElsewhereError
    return ()


def _bytes(tensor: Tensor) -> memoryview:
    # By its address, since `Tensor.numpy` makes a storage one that cannot be resized.
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.is_contiguous()
    if not plain or not tensor.data_ptr():
        raise _ElsewhereError
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def _choose(specs: Sequence[TensorSpec]) -> list[tuple[int, int, int]]:
    """Return places that are spread over the tensors, always the same ones."""
    filled = [(i, spec.nbytes) for i, spec in enumerate(specs) if spec.nbytes]
    if len(filled) > _PLACES:
        # At random, as the layers of a model repeat.
        filled = random.Random(0).sample(filled, _PLACES)  # noqa: S311 - no secret
    places = []
    for i, nbytes in filled:
        width = min(_WIDTH, nbytes)
        count = min(_PLACES // len(filled), nbytes // width)
        for k in range(count):
            # In the middle of each of so many parts.
            start = (2 * k + 1) * (nbytes - width) // (2 * count)
            places.append((i, start, start + width))
    return places


def _stretches(specs: Sequence[TensorSpec]) -> list[tuple[int, int]]:
    """Return where tensors lie in a body, those that follow each other without a gap as one."""
    found: list[tuple[int, int]] = []
    for spec in specs:
        begin = found.pop()[0] if found and found[-1][1] == spec.offset else spec.offset
        found.append((begin, spec.offset + spec.nbytes))
    return found


def _is_frozen(model: Any) -> bool:
    """Return whether a module was sent that is not trained, such as a reference model."""
    models = list(model.values()) if isinstance(model, Mapping) else [model]
    modules = [each for each in models if isinstance(each, nn.Module)]
    parameters = [each for module in modules for each in module.parameters()]
    return bool(parameters) and not any(each.requires_grad for each in parameters)


def _went_back(report: SendReport) -> str:
    return (
        f"version {report.version} of {report.model_id!r} has the weights of version "
        f"{report.equals}, and not of the one before: were other weights loaded into the model, "
        "such as a reference or a checkpoint? Where they are put back later, type: with "
        'sender.paused("reference in the module"): so that no send comes meanwhile. '
        "report.equals tells it of each send; this warning comes once"
    )


def _advice(report: SendReport, sends: int) -> str:
    return (
        f"the last {sends} sends of {report.model_id!r} had the same weights, up to version "
        f"{report.version}: training does not change what is sent. That is harmless while the "
        "learning rate is 0, as in a warm-up, and where steps were skipped, as by a GradScaler or "
        "while gradients accumulate, or all that is sent is frozen. Otherwise: does the optimizer "
        "hold other tensors, as those of a copy, or of the model before it was wrapped or moved? "
        'Is an adapter trained, and its base sent? Then type layers=[lora("merged")], or '
        '"adapter". Are the steps too small for the dtype that is sent? report.unchanged tells it '
        "of each send; this warning comes once"
    )
