"""Increments in a run: whole versions, the anchors, and between them what changed since the last.

A reader that joins late takes the newest anchor and what follows it. The manifest of an increment
names that of its base, so that an increment of a run that went back applies to nothing else: the
digests of objects and manifests check every byte, and increments need no checksums of their own.
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
    """The trainer's side: makes increments of versions, and remembers what was published.

    Args:
        anchor_every: how many versions from one anchor to the next, at most.
    """

    def __init__(self, anchor_every: int) -> None:
        self._every = anchor_every
        self._history = IncrementHistory(Increments.below, checked=False)
        # The newest version that was published, the digest of its manifest, and how many since the
        # anchor, with it.
        self._published, self._digest = 0, ""
        self._count = 0

    def publish(self, payload: Payload, write: Callable[..., str]) -> str:
        """Publish a version, as an increment where that is short and an anchor is not due.

        Args:
            payload: the version.
            write: publishes what it is given, and the digest of the manifest of its base. Where it
                raises, the next increment builds on the version before.
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
    """A reader's side: keeps the newest version packed, and applies increments to it.

    Nothing is kept of a run without increments. One thread calls its methods; what it has given
    out may be released by another.
    """

    def __init__(self) -> None:
        self._kept: PackedVersion | None = None
        #: The digest of the manifest of the version that is kept; "" for none.
        self.digest = ""
        # Whether what is kept is read by the caller, so that it must not change.
        self._lent = False

    def needs(self, manifest: Manifest) -> bool:
        """Return whether a version needs its base, since what is kept is older."""
        return manifest.base > 0 and (manifest.base_digest or None) != self.digest

    def make(self, chain: Sequence[Manifest], payloads: Sequence[Payload]) -> Payload:
        """Return a version, whole.

        Args:
            chain: the version, last, and those that it needs.
            payloads: what has been read of each.

        Raises:
            PayloadError: they do not fit each other; nothing is kept.
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
        """Apply an increment to what is kept."""
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
