"""The format of a run: a head, manifests and objects; see the page "The format of a run".

Objects and manifests are named by the SHA-256 of their bytes and never change. The head names the
manifests, and is signed: with the public key, every byte of a run can be checked.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

from sync_core.errors import PayloadError
from sync_plugin_store.errors import SignatureError
from sync_plugin_store.keys import SigningKey, verify

__all__ = [
    "FORMAT",
    "HEAD",
    "Head",
    "Manifest",
    "Piece",
    "digest_of",
    "manifest_name",
    "object_name",
]

#: The version of the format.
FORMAT = 1
#: The name of the one object that is ever replaced.
HEAD = "HEAD"
_DIGEST = re.compile("[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# No version, size or count is as large.
_BEYOND = 1 << 63
# More pieces, or versions, than these make a manifest or a head that takes long to read.
_MOST_PIECES, _MOST_VERSIONS = 1_000_000, 10_000


def digest_of(data: bytes | memoryview) -> str:
    """Return the SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def object_name(digest: str) -> str:
    """Return the name of the object with this digest."""
    return f"objects/{digest}"


def manifest_name(digest: str) -> str:
    """Return the name of the manifest with this digest."""
    return f"manifests/{digest}.json"


def is_name(text: object) -> bool:
    """Return whether a version can be given a name.

    Example:
        >>> is_name("best"), is_name("../best"), is_name("7")
        (True, False, False)
    """
    return isinstance(text, str) and bool(_NAME.fullmatch(text)) and not text.isdecimal()


@dataclass(frozen=True, slots=True)
class Piece:
    """One of the objects whose bytes, one after the other, are a version.

    Args:
        digest: its SHA-256, by which it is named.
        nbytes: its size.
    """

    digest: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A version: joined, its pieces are a ``.safetensors`` file.

    Args:
        run: the run that it belongs to.
        version: its number.
        base: the version that it builds on; 0 for a whole one.
        created: when it was written, in seconds since 1970, by the trainer's clock.
        pieces: the header, and then pieces of the body.
        chunks: the object with the sizes and digests of the body's chunks, by which readers of a
            part check what they read; None where the trainer wrote none.
        anchor: whether increments may build on this whole version.

    Example:
        >>> manifest = Manifest(
        ...     run="0" * 32, version=1, base=0, created=0.0, pieces=(Piece("0" * 64, 128),))
        >>> Manifest.from_bytes(manifest.to_bytes()) == manifest
        True
    """

    run: str
    version: int
    base: int = 0
    created: float = 0.0
    pieces: tuple[Piece, ...] = ()
    chunks: Piece | None = None
    anchor: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the version, in bytes."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def objects(self) -> tuple[Piece, ...]:
        """Every object that the version refers to."""
        return self.pieces if self.chunks is None else (*self.pieces, self.chunks)

    def to_bytes(self) -> bytes:
        """Return the manifest as it is stored."""
        content = {
            "format": FORMAT,
            "run": self.run,
            "version": self.version,
            "base": self.base,
            "created": self.created,
            "pieces": [[piece.digest, piece.nbytes] for piece in self.pieces],
        }
        if self.chunks is not None:
            content["chunks"] = [self.chunks.digest, self.chunks.nbytes]
        if self.anchor:
            content["anchor"] = True
        return _write(content)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the manifest that `to_bytes` wrote.

        Raises:
            PayloadError: the bytes are something else; the message says what.
        """
        content = _parse(data, "a manifest")
        try:
            pieces = tuple(map(_piece, content["pieces"]))
            chunks = content.get("chunks")
            made = cls(
                run=_text(content["run"]),
                version=_count(content["version"]),
                base=_count(content["base"]),
                created=float(content["created"]),
                pieces=pieces,
                chunks=None if chunks is None else _piece(chunks),
                anchor=content.get("anchor") is True,
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise PayloadError(f"not a manifest of a version: {error!r:.200}") from error
        if not 0 < len(pieces) <= _MOST_PIECES or made.nbytes >= _BEYOND:
            raise PayloadError(f"a manifest has {len(pieces)} pieces of {made.nbytes} bytes")
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The state of a run.

    Args:
        run: the run, 32 hexadecimal digits.
        sequence: grows with every replacement of the head.
        version: the newest version; 0 before the first.
        versions: the digest of the manifest of each version that is kept.
        names: the versions that have names.
        address: the digest of the object with the readers' address; None where it has none.
        closed: whether the trainer has closed its sender.

    Example:
        >>> key = SigningKey.generate()
        >>> head = Head(run="0" * 32, sequence=1)
        >>> Head.from_bytes(head.to_bytes(key), key.public) == head
        True
    """

    run: str
    sequence: int
    version: int = 0
    versions: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    names: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    address: str | None = None
    closed: bool = False

    def to_bytes(self, key: SigningKey) -> bytes:
        """Return the head as it is stored: the key and its signature in a line, then the content.

        Args:
            key: of the trainer.
        """
        content = _write(
            {
                "format": FORMAT,
                "run": self.run,
                "sequence": self.sequence,
                "version": self.version,
                "versions": {str(version): digest for version, digest in self.versions.items()},
                "names": dict(self.names),
                "address": self.address,
                "closed": self.closed,
            }
        )
        return f"ed25519 {key.public} {key.sign(content)}\n".encode() + content

    @classmethod
    def from_bytes(cls, data: bytes, public: str) -> Self:
        """Return the head that `to_bytes` wrote.

        Args:
            data: what the store has.
            public: the public key that it must be signed with, in hexadecimal.

        Raises:
            SignatureError: it is signed with another key, or by none.
            PayloadError: the bytes are something else; the message says what.
        """
        line, _, content = data.partition(b"\n")
        words = line.decode("ascii", "replace").split(" ")
        if len(words) != 3 or words[0] != "ed25519":
            raise SignatureError(f"HEAD begins with {line[:40]!r}, and not with a signature")
        verify(public, words[2], content)
        parsed = _parse(content, "a head")
        try:
            address = parsed["address"]
            made = cls(
                run=_text(parsed["run"]),
                sequence=_count(parsed["sequence"]),
                version=_count(parsed["version"]),
                versions={int(v): _digest(d) for v, d in parsed["versions"].items()},
                names={_text(name): _count(v) for name, v in parsed["names"].items()},
                address=None if address is None else _digest(address),
                closed=bool(parsed["closed"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PayloadError(f"not a head of a run: {error!r:.200}") from error
        if len(made.versions) > _MOST_VERSIONS:
            raise PayloadError(f"a head has {len(made.versions)} versions")
        return made


def _write(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _parse(data: bytes, what: str) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"{what} must be JSON, got {data[:40]!r}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise PayloadError(
            f"{what} has format {found!r:.40}, and this is sync-plugin-store for format {FORMAT}; "
            "type: pip install -U sync-plugin-store, at both ends"
        )
    return content


def _digest(value: object) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"{value!r:.80} is not a SHA-256 in hexadecimal")
    return value


def _piece(value: Any) -> Piece:
    digest, nbytes = value
    return Piece(_digest(digest), _count(nbytes))


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < _BEYOND:
        raise ValueError(f"{value!r:.80} is not a natural number")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r:.80} is not a text")
    return value
