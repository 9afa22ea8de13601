"""A store of incremental versions with partial readers, written with public names only.

    python docs/examples/incremental_store.py

A version has two files: the weights, whole or as an increment, and a description. The description
has the digest of the weights, and the digest of the base version's description. So the digest of
one description verifies everything that a reader reads. `store_transport` sends that digest to each
worker, and also handles answers, late workers and heartbeats.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import sync_core
from sync_core import Layout, Payload, TransportContext, hookimpl
from sync_core.errors import PayloadError
from sync_core.models import Region
from sync_core.transports import Block, copy
from sync_plugin_scale import HeldTensor, Holding, Part
from sync_plugin_scale.increments import IncrementHistory, PackedVersion, Patch
from sync_plugin_scale.shards import (
    RegionViews,
    WholeModel,
    is_divided,
    shape_of,
    wanted_regions,
    whole_region,
    write_region,
)
from sync_plugin_std.stores import Store, StoreOptions, Versions, parts_of, store_transport

#: An increment must be smaller than this share of the model.
BELOW = 0.5


@dataclass(frozen=True)
class Options(StoreOptions):
    """Options of the scheme, in addition to those of every store.

    Args:
        directory: the directory of the files; None for the system's temporary directory.
        anchor_every: publish a whole version once in this number of versions.
    """

    directory: str | None = None
    anchor_every: int = 10


@dataclass(frozen=True)
class Wanted:
    """The endpoint of a worker that reads only parts.

    Args:
        regions: the parts, by tensor name.
        layout: the layout of whole versions.
    """

    regions: dict[str, Region]
    layout: Layout


class IncrementalScheme:
    """Sends weights as increments through a directory; workers may read only parts."""

    capabilities = frozenset({"broadcast", "cross_host", "cross_process", "late_join", "pull"})

    def resolve(
        self, address: sync_core.Address, model: Any, timeout: float
    ) -> tuple[sync_core.Address, Any]:
        """Return the address and the model of the parts, if the model has only parts."""
        del timeout
        if not is_divided(model):
            return address, model
        whole = address.layout
        specs = {spec.name: spec for spec in whole.specs}
        held = (HeldTensor(s.name, s.dtype, whole_region(s.shape), s.shape) for s in whole.specs)
        trainer = WholeModel([Holding(0, 1, tuple(held), whole.aliases)])
        regions = wanted_regions(model, trainer, cast=address.cast)
        for name, region in regions.items():
            if any(stop > size for (_, stop), size in zip(region, specs[name].shape, strict=True)):
                raise sync_core.ModelError(f"{name!r} has no region {write_region(region)}")
        views = RegionViews(model, {name: (name, region) for name, region in regions.items()})
        kinds = ((n, specs[n].dtype, shape_of(region)) for n, region in regions.items())
        layout, endpoint = Layout.of_kinds(kinds), Wanted(regions, whole)
        return replace(address, endpoint=endpoint, layout=layout, source_layout=layout), views

    @hookimpl
    def create_transport(
        self, context: TransportContext
    ) -> sync_core.SenderTransport | sync_core.ReceiverTransport:
        """Return the transport of the sender or of a receiver."""
        options = context.parse_options(Options)
        store = Directory(Path(options.directory or tempfile.gettempdir()))
        folder = f"sync-{hashlib.sha256(b'versions' + context.token.encode()).hexdigest()[:16]}"
        wanted = context.endpoint if isinstance(context.endpoint, Wanted) else None
        versions = IncrementalVersions(store, folder, options.anchor_every, wanted)
        if wanted is not None:
            # The sizes of whole versions.
            context = replace(context, layout=wanted.layout)
        return store_transport(context, store, options, versions)


class Directory(Store):
    """Files that are written atomically, by a rename.

    Args:
        directory: the directory, which both sides can access.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, name: str, data: bytes) -> None:
        """Write a temporary file, and rename it."""
        path = self._directory / name
        path.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        Path(file.name).replace(path)

    def get(self, name: str) -> bytes | None:
        """Return the bytes of a file; None if it does not exist."""
        try:
            return (self._directory / name).read_bytes()
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> None:
        """Remove a file, and the folder if it is empty."""
        path = self._directory / name
        path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty, or removed already
            path.parent.rmdir()


@dataclass(frozen=True)
class Description:
    """The description of a version.

    Args:
        version: the version's number.
        digest: the digest of the weights, as they are stored.
        base: the base version of an increment; 0 for a whole version.
        base_digest: the digest of the base version's description.
    """

    version: int
    digest: str
    base: int = 0
    base_digest: str = ""

    def to_bytes(self) -> bytes:
        """Return the bytes to store."""
        return json.dumps(vars(self)).encode()


class IncrementalVersions(Versions):
    """Writes and reads versions as increments.

    Args:
        store: the files.
        folder: the prefix of the file names, unique for each sender.
        anchor_every: the most versions from one whole version to the next.
        wanted: the parts that a worker reads; None for all.
    """

    def __init__(self, store: Store, folder: str, anchor_every: int, wanted: Wanted | None) -> None:
        self._store, self._folder = store, folder
        self._anchor_every, self._wanted = anchor_every, wanted
        # For the trainer: the values to compare with, the newest version, its digest, the number of
        # versions since the last whole one, the base of each stored version, and the versions that
        # are no longer needed.
        self._history = IncrementHistory(BELOW, checked=False)
        self._published, self._digest, self._count = 0, "", 0
        self._bases: dict[int, int] = {}
        self._unneeded: set[int] = set()
        # For a worker: the newest version that it has read, and the digest of its description.
        self._kept: PackedVersion | None = None
        self._kept_digest = ""

    def write_version(self, payload: Payload) -> str:
        """Write a version, as an increment if that is small and a whole version is not due."""
        self._history.record(payload)
        patch = None
        if self._published and self._count < self._anchor_every:
            patch = self._history.since(self._published)
        if patch is None:
            stored, base, base_digest, self._count = payload, 0, "", 0
        else:
            stored, base, base_digest = patch.to_payload(), self._published, self._digest
        self._count += 1
        summed = hashlib.sha256()

        def parts() -> Iterator[memoryview]:
            for part in parts_of(stored):
                summed.update(part)
                yield part

        self._bases[payload.version] = base
        try:
            self._store.put_parts(self._name(payload.version, "safetensors"), parts())
            described = Description(payload.version, summed.hexdigest(), base, base_digest)
            self._store.put(self._name(payload.version, "json"), described.to_bytes())
        except BaseException:
            self.delete_version(payload.version)
            raise
        self._published = payload.version
        self._digest = hashlib.sha256(described.to_bytes()).hexdigest()
        self._history.forget(self._published, self._published)
        return self._digest

    def delete_version(self, version: int) -> None:
        """Remove a version after no other version builds on it."""
        self._unneeded.add(version)
        needed = set()
        for each in self._bases.keys() - self._unneeded:
            chained = each
            while chained:
                needed.add(chained)
                chained = self._bases[chained]
        for gone in self._bases.keys() - needed:
            self._store.delete(self._name(gone, "json"))
            self._store.delete(self._name(gone, "safetensors"))
            del self._bases[gone]

    def read_version(self, version: int, nbytes: int, digest: str) -> Block | None:
        """Return the version, or the wanted parts of it."""
        missing: list[Description] = []
        wanted, wanted_digest = version, digest
        while wanted and wanted_digest != self._kept_digest:
            data = self._store.get(self._name(wanted, "json"))
            if data is None:
                return None
            if hashlib.sha256(data).hexdigest() != wanted_digest:
                raise PayloadError(f"version {wanted} is not the one that the trainer wrote")
            described = Description(**json.loads(data))
            missing.append(described)
            wanted, wanted_digest = described.base, described.base_digest
        for described in reversed(missing):
            kept = self._applied(described)
            if kept is None:
                return None
            self._kept = kept
            self._kept_digest = hashlib.sha256(described.to_bytes()).hexdigest()
        assert self._kept is not None
        if self._kept.layout.nbytes != nbytes:
            raise PayloadError(f"version {version} has {self._kept.layout.nbytes} bytes")
        return self._copied(self._kept)

    def _applied(self, described: Description) -> PackedVersion | None:
        """Return the kept memory with a version applied; None if the version was removed."""
        kept, self._kept, self._kept_digest = self._kept, None, ""
        blocks: list[Block] = []

        def allocate(nbytes: int) -> memoryview:
            blocks.append(Block.allocate(nbytes))
            return memoryview(blocks[0].memory.numpy())

        if not self._store.get_into(self._name(described.version, "safetensors"), allocate):
            return None
        if hashlib.sha256(blocks[0].memory.numpy()).hexdigest() != described.digest:
            raise PayloadError(f"version {described.version} is not the one that was described")
        payload = Payload.unpack(blocks[0], described.version)
        if not described.base:
            if kept is None or kept.layout != payload.layout:
                kept = PackedVersion.allocate(payload.layout)
            kept.pack(payload)
            return kept
        if kept is None:
            raise PayloadError(f"version {described.version} builds on one that is not here")
        Patch.from_payload(payload, kept.body.nbytes).apply(kept.body)
        return kept

    def _copied(self, kept: PackedVersion) -> Block:
        layout, tensors = kept.layout, list(kept.tensors)
        if self._wanted is not None:
            found = dict(zip(layout.names, tensors, strict=True))
            tensors = [
                found[name][tuple(slice(*bounds) for bounds in region)]
                for name, region in self._wanted.regions.items()
            ]
            kinds = zip(self._wanted.regions, tensors, strict=True)
            layout = Layout.of_kinds((name, t.dtype, tuple(t.shape)) for name, t in kinds)
        block = Block.allocate(layout.nbytes)
        block.write_header(layout)
        copy(block.views(layout), tensors)
        return block

    def _name(self, version: int, suffix: str) -> str:
        return f"{self._folder}/{version:08}.{suffix}"


def main() -> None:
    """Send some versions to a worker, and to a late one that has two rows of eight."""
    policy, copied = torch.nn.Linear(1000, 8), torch.nn.Linear(1000, 8)
    rows = {"weight": torch.zeros(2, 1000), "bias": torch.zeros(2)}
    part = Part(rows, regions={"weight": ((2, 4), (0, 1000)), "bias": ((2, 4),)})
    with (
        tempfile.TemporaryDirectory() as directory,
        sync_core.Sender(IncrementalScheme(), policy, num_workers=1, directory=directory) as sender,
        sync_core.Receiver(sender.address(0), copied) as receiver,
    ):
        for _ in range(3):
            with torch.no_grad():
                policy.bias += 1
            pending = sender.send_async()
            receiver.receive()
            pending.wait()
        found = sorted(Path(directory).glob("*/*.safetensors"))
        print("bytes of each version:", *(path.stat().st_size for path in found))
        sender.add_worker(1)
        with sync_core.Receiver(sender.address(1), part) as late:
            print("a late worker has version", late.receive())
    assert torch.equal(copied.bias, policy.bias)
    assert torch.equal(rows["weight"], policy.weight[2:4])
    assert torch.equal(rows["bias"], policy.bias[2:4])


if __name__ == "__main__":
    main()
