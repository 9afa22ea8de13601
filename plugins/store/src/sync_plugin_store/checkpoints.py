"""Load a Hugging Face checkpoint, a directory of safetensors files, as a model's version 0."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from typing import Any, Self, TypeVar

from torch import Tensor, nn

from sync_core import Layout, OptionError, TensorSpec, Update
from sync_core.errors import PayloadError
from sync_core.models import Binding, check_match, tensors_of_rank
from sync_plugin_scale import Part
from sync_plugin_scale.shards import is_divided, whole_region
from sync_plugin_store.chunks import Chunk, Chunks, cuts_of
from sync_plugin_store.errors import ReplacedError, StoreError
from sync_plugin_store.format import Piece
from sync_plugin_store.holdings import Wanted
from sync_plugin_store.objects import MAX_HEADER_BYTES, Objects, Patience, Validator, open_objects
from sync_plugin_store.parts import Parts, Plan, Range, parts_of

__all__ = ["load_checkpoint"]

_T = TypeVar("_T")

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\.safetensors")
# Seconds to wait until a file that is written again gets a different modification time.
_NEXT_SECOND = 1.1


def load_checkpoint(
    url: str,
    model: Any = None,
    *,
    load: Callable[[Iterable[tuple[str, Tensor]]], object] | None = None,
    timeout: float = 60.0,
    streams: int = 8,
    redirects: Sequence[str] = (),
) -> None:
    """Load a Hugging Face checkpoint into a model, completely or not at all.

    If this rank has a shard of the model (`DTensor`, `sync_plugin_scale.Part`), it reads only the
    bytes of its shard. Floating-point tensors are cast to the model's dtypes. The checkpoint is not
    signed: a process that can write to the directory can change the weights. A file that is
    replaced during the read is read again, so a model never mixes two checkpoints.

    Args:
        url: a directory, ``s3://bucket/model``, ``https://host/model`` and so on. It must contain
            ``model.safetensors`` or the files listed in ``model.safetensors.index.json``.
        model: the model to load into: a module, a mapping of tensors, or a shard of either.
        load: a function to call instead, once, with all names and tensors.
        timeout: how long failed reads are retried, in seconds.
        streams: the number of concurrent reads.
        redirects: URLs of other servers to which the web server may redirect, such as
            ``https://cdn.example.com``.

    Raises:
        OptionError: ``model`` and ``load`` were both given, or neither.
        StoreError: the server does not answer, has no such files, or keeps replacing them.
        PayloadError: a file is truncated or is not in the safetensors format.
        LayoutMismatchError: the checkpoint does not fit the model; nothing was written.

    Example:
        >>> import tempfile, torch
        >>> from safetensors.torch import save_file
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file({"weight": torch.ones(1, 2), "bias": torch.zeros(1)},
        ...               f"{folder}/model.safetensors")
        ...     load_checkpoint(folder, model)
        >>> model.weight.tolist()
        [[1.0, 1.0]]
    """
    if (model is None) == (load is None):
        raise OptionError("give load_checkpoint a model, or load=, and not both")
    model = _state_of(model)
    with _Files(open_objects(url, timeout, redirects=redirects), timeout, streams) as files:
        layout, target, tensors = files.of_one_state(lambda: _read(files, model))
    if load is not None:
        load(tensors.items())
        return
    read = Layout.of_kinds((n, t.dtype, tuple(t.shape)) for n, t in tensors.items())
    aliases = () if is_divided(model) else layout.aliases
    update = Update(Layout(read.specs, aliases), tuple(tensors.values()))
    Binding(target).write(update, cast=True)


def _read(files: _Files, model: Any) -> tuple[Layout, Any, dict[str, Tensor]]:
    """Return the layout of the files, the model's tensors to write, and the new values."""
    headers = files.headers()
    specs = [spec for layout in headers.values() for spec in layout.specs]
    kinds = [(spec.name, spec.dtype, spec.shape) for spec in specs]
    layout = Layout(Layout.of_kinds(kinds).specs, _tied(model, {spec.name for spec in specs}))
    target = model
    if is_divided(model):
        parts, target, _ = parts_of(model, layout, cast=True)
    else:
        every = (Wanted(s.name, s.name, whole_region(s.shape), s.shape) for s in layout.specs)
        parts = Parts(tuple(every), layout)
        if model is not None:
            # Raise before any tensor is read.
            check_match(layout, Binding(model).layout, cast=True)
    return layout, target, files.read(headers, parts)


def _state_of(model: Any) -> Any:
    """Return the part of a model that a checkpoint contains: no non-persistent buffers."""
    if isinstance(model, Part):
        return Part(_state_of(model.model), model.regions)
    if isinstance(model, nn.Module):
        return {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    return model


def _tied(model: Any, names: set[str]) -> tuple[tuple[str, str], ...]:
    """Return pairs of a tied tensor's name that the files lack, and its name in the files."""
    if model is None:
        return ()
    if isinstance(model, Part):
        model = model.model
    owners: dict[object, str] = {}
    aliases = []
    for name, tensor in tensors_of_rank(model, "state_dict").items():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if not local.numel():
            continue
        place = local.untyped_storage().data_ptr(), local.storage_offset(), tensor.shape
        other = owners.setdefault(place, name)
        if other != name and (name in names) != (other in names):
            aliases.append((other, name) if name in names else (name, other))
            owners[place] = name if name in names else other
    return tuple(aliases)


class _Files:
    """Reads a checkpoint directory's files.

    Args:
        objects: the directory.
        timeout: how long a broken transfer is resumed, in seconds.
        streams: the number of concurrent reads.
    """

    def __init__(self, objects: Objects, timeout: float, streams: int) -> None:
        self._objects = objects
        self._timeout = timeout
        self._stopped = threading.Event()
        # By file: the state in which every read must find it.
        self._validators: dict[str, Validator] = {}
        self._pool = ThreadPoolExecutor(streams, thread_name_prefix="sync-store-get")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._objects.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def of_one_state(self, read: Callable[[], _T]) -> _T:
        """Call a function that reads files, again until no file was replaced during the call."""
        patience = Patience(self._timeout, self._stopped)
        while True:
            try:
                return read()
            except ReplacedError:
                if not patience.pause():
                    raise
                self._validators.clear()

    def headers(self) -> dict[str, Layout]:
        """Return each file's layout, without tensors that the index assigns to another file."""
        headers = self._headers()
        if any(each.coarse for each in self._validators.values()):
            self._stopped.wait(_NEXT_SECOND)
            headers = self._headers()
        return headers

    def _headers(self) -> dict[str, Layout]:
        found = self._index = self._objects.look(_INDEX)
        if found is None:
            return {_SINGLE: self._header(_SINGLE)}
        try:
            places: Mapping[str, str] = json.loads(found.data)["weight_map"]
            files = list(dict.fromkeys(places.values()))
            if not files or not all(_FILE.fullmatch(file) for file in files):
                raise ValueError(f"it names {files!r:.100}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PayloadError(
                f"{_INDEX} in {self._objects.url} is not an index of safetensors: {error!r:.200}"
            ) from error
        headers = dict(zip(files, self._pool.map(self._header, files), strict=True))
        for name, file in places.items():
            if name not in headers[file].index:
                raise PayloadError(f"{_INDEX} names {name!r} in {file}, which does not have it")
        return {
            file: _only(layout, [s for s in layout.specs if places.get(s.name) == file])
            for file, layout in headers.items()
        }

    def read(self, headers: Mapping[str, Layout], parts: Parts) -> dict[str, Tensor]:
        """Return the requested parts of all files, by the names under which they are written."""
        plans: list[Plan] = []
        reading = []
        for file, layout in headers.items():
            wanted = [each for each in parts.wanted if each.name in layout.index]
            plan = Plan.of_file(layout, _chunks_of(layout), wanted)
            plans.append(plan)
            begin = len(layout.header)
            reading += [self._pool.submit(self._read, file, begin, each) for each in plan.ranges]
        try:
            for future in reading:
                future.result()
        finally:
            for future in reading:
                future.cancel()
            wait(reading)
        self._check()
        return {
            spec.name: tensor
            for plan in plans
            for spec, tensor in zip(plan.layout.specs, plan.block.views(plan.layout), strict=True)
        }

    def _check(self) -> None:
        """Raise `ReplacedError` if a file was replaced before all files were read."""
        if self._index is None:
            return
        found = self._objects.look(_INDEX)
        if found is None or found.data != self._index.data:
            raise ReplacedError(f"{_INDEX} in {self._objects.url} was replaced while it was read")
        for _ in self._pool.map(lambda file: self._bytes(file, 0, 8), self._validators):
            pass

    def _header(self, file: str) -> Layout:
        length = int.from_bytes(self._bytes(file, 0, 8), "little")
        if length > MAX_HEADER_BYTES:
            raise PayloadError(f"{file} in {self._objects.url} is not a file of safetensors")
        return Layout.from_header(bytes(self._bytes(file, 0, 8 + length)))

    def _read(self, file: str, begin: int, each: Range) -> None:
        each.take(memoryview(self._bytes(file, begin + each.start, each.stop - each.start)))

    def _bytes(self, file: str, start: int, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        patience = Patience(self._timeout, self._stopped)
        validator = self._validators.setdefault(file, Validator())
        if not self._objects.read(
            file, start, memoryview(data), patience, whole=False, validator=validator
        ):
            raise StoreError(
                f"{self._objects.url} has no {file}; give a directory with {_SINGLE}, or with "
                f"{_INDEX} and the files that it names"
            )
        return data


def _only(layout: Layout, specs: list[TensorSpec]) -> Layout:
    """Return a layout with only some of its tensors and the same header."""
    kept = Layout(tuple(specs))
    kept.__dict__["header"] = layout.header
    return kept


def _chunks_of(layout: Layout) -> Chunks:
    """Return chunks, without digests, at whose bounds reads of a file may begin and end."""
    cuts = [*cuts_of(layout), layout.body_nbytes]
    chunks = [Chunk(a, b - a, None, 1) for a, b in pairwise(cuts)]
    pieces = [Piece("", len(layout.header)), Piece("", layout.body_nbytes)]
    return Chunks(chunks, pieces)
