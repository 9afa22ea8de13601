"""Increments in a run: versions that contain only the changes since the version before.

A reader that joins late reads the newest anchor, which is a whole version, and the increments after
it. An increment's manifest names its base by digest, so it cannot be applied to another version of
the same number. Increments need no checksums, since digests of objects and manifests already cover
every byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sync_core import Payload
from sync_core.errors import PayloadError
from sync_plugin_scale import Increments
from sync_plugin_scale.increments import IncrementHistory, PackedVersion, Patch
from sync_plugin_store.format import Manifest

__all__ = ["IncrementReader", "IncrementWriter"]


class IncrementWriter:
    """Makes increments from versions, for the trainer.

    Args:
        anchor_every: the most versions from one anchor to the next.
    """

    def __init__(self, anchor_every: int) -> None:
        self._every = anchor_every
        self._history = IncrementHistory(Increments.below, checked=False)
        # The newest published version, the digest of its manifest, and the number of versions since
        # the anchor, including it.
        self._published, self._digest = 0, ""
        self._count = 0

    def publish(self, payload: Payload, write: Callable[..., str]) -> str:
        """Publish a version, as an increment if that is shorter and no anchor is due.

        Args:
            payload: the version.
            write: a function that publishes a payload, given the digest of its base's manifest. If
                it raises, the next increment builds on the version before.
        """
        self._history.record(payload)
        patch = None
        if self._published and self._count < self._every:
            patch = self._history.since(self._published)
        if patch is None:
            digest = write(payload)
            self._count = 1
        else:
            digest = write(patch.to_payload(), self._digest)
            self._count += 1
        self._published, self._digest = payload.version, digest
        self._history.forget(self._published, self._published)
        return digest


class IncrementReader:
    """Applies increments to a packed copy of the newest version, for a reader.

    There is no copy for a run without increments. Only one thread may call the methods; any thread
    may release the payloads that they return.
    """

    def __init__(self) -> None:
        self._kept: PackedVersion | None = None
        #: The manifest digest of the kept version; "" for none.
        self.digest = ""
        # Whether the caller still reads the kept version, which must not change then.
        self._lent = False

    def needs(self, manifest: Manifest) -> bool:
        """Return whether a version's base must be read first, since it is not kept."""
        return manifest.base > 0 and (manifest.base_digest or None) != self.digest

    def make(self, chain: Sequence[Manifest], payloads: Sequence[Payload]) -> Payload:
        """Return a whole version, made from its chain.

        Args:
            chain: the version's bases, the oldest first, and then the version itself.
            payloads: the payload of each.

        Raises:
            PayloadError: the payloads do not fit each other; the kept version is dropped.
        """
        whole: Payload | None = None
        for manifest, payload in zip(chain, payloads, strict=True):
            if manifest.base:
                whole = self._apply(manifest, payload)
            else:
                whole = payload
                if manifest.anchor:
                    self._copy(manifest, payload)
        assert whole is not None
        return whole

    def _copy(self, manifest: Manifest, payload: Payload) -> None:
        kept, self._kept, self.digest = self._kept, None, ""
        if kept is None or self._lent or kept.layout != payload.layout:
            kept, self._lent = PackedVersion.allocate(payload.layout), False
        kept.pack(payload)
        self._kept, self.digest = kept, manifest.digest

    def _apply(self, manifest: Manifest, payload: Payload) -> Payload:
        """Apply an increment to the kept version."""
        kept, digest, self._kept, self.digest = self._kept, self.digest, None, ""
        if kept is None:
            raise PayloadError(
                f"version {manifest.version} is an increment, and its base is not here"
            )
        patch = Patch.from_payload(payload, kept.body.nbytes)
        numbers = patch.base, patch.version
        if numbers != (manifest.base, manifest.version) or manifest.base_digest != digest:
            raise PayloadError(
                f"version {manifest.version} is an increment from {patch.base} to {patch.version}, "
                f"on the manifest {manifest.base_digest[:12]}…, and that of {digest[:12]}… is here"
            )
        if patch.digest != kept.layout.digest:
            raise PayloadError(f"version {manifest.version} is an increment of another layout")
        if self._lent:
            kept, self._lent = kept.copy(), False
        patch.apply(kept.body)
        self._kept, self.digest = kept, manifest.digest
        return self._lend(kept, payload)

    def _lend(self, kept: PackedVersion, payload: Payload) -> Payload:
        self._lent = True

        def release() -> None:
            if self._kept is kept:
                self._lent = False

        return Payload(
            payload.version,
            kept.layout,
            kept.tensors,
            release,
            payload.known_at,
            payload.stage_seconds,
        )
