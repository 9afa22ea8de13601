"""The stored form of a run: a head, manifests and objects; see "The format of a run".

Objects and manifests are named by the SHA-256 of their bytes and never change. The signed head
names the manifests, so the public key is enough to check every byte of a run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

from sync_core.errors import PayloadError
from sync_plugin_store.errors import SignatureError
from sync_plugin_store.keys import HEAD_PURPOSE, SigningKey, verify

__all__ = [
    "FORMAT",
    "HEAD",
    "MOST_HOLDINGS",
    "MOST_VERSIONS",
    "RANKS_FORMAT",
    "File",
    "Head",
    "Manifest",
    "Piece",
    "digest_of",
    "manifest_digest",
    "manifest_name",
    "object_name",
]

#: The version of the format.
FORMAT = 3
#: The format of a manifest for a version that several ranks wrote together.
RANKS_FORMAT = 2
#: The name of the head, the only object that is ever replaced.
HEAD = "HEAD"
_DIGEST = re.compile("[0-9a-f]{64}")
_MANIFEST = re.compile(r"manifests/([0-9a-f]{64})\.json")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Versions, sizes and counts must be smaller.
_BEYOND = 1 << 63
# The most pieces of a manifest and versions of a head: more would take long to read.
_MOST_PIECES = 1_000_000
MOST_VERSIONS = 10_000
# The most JSON lists and objects without a digest in a record.
_CONTAINERS = 100
# More ranks than any trainer has.
_MOST_RANKS = 100_000
#: The largest object with the holdings of all ranks, in bytes.
MOST_HOLDINGS = 256 << 20


def digest_of(data: bytes | memoryview) -> str:
    """Return the SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def object_name(digest: str) -> str:
    """Return the name of the object with this digest."""
    return f"objects/{digest}"


def manifest_name(digest: str) -> str:
    """Return the name of the manifest with this digest."""
    return f"manifests/{digest}.json"


def manifest_digest(name: str) -> str | None:
    """Return the digest in the name of a manifest; None for other names."""
    match = _MANIFEST.fullmatch(name)
    return None if match is None else match[1]


def is_name(text: object) -> bool:
    """Return whether a text can be the name of a version.

    Example:
        >>> is_name("best"), is_name("../best"), is_name("7")
        (True, False, False)
    """
    return isinstance(text, str) and bool(_NAME.fullmatch(text)) and not text.isdecimal()


@dataclass(frozen=True, slots=True)
class Piece:
    """An object with a part of a version; the concatenated pieces are the version.

    Args:
        digest: its SHA-256, which is also its name.
        nbytes: its size.
    """

    digest: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class File:
    """A ``.safetensors`` file that is stored in pieces.

    Args:
        pieces: the header, followed by the pieces of the body.
        chunks: the object with the sizes and digests of the body's chunks, with which readers check
            parts of the file; None if the trainer wrote none.
    """

    pieces: tuple[Piece, ...]
    chunks: Piece | None = None

    @property
    def nbytes(self) -> int:
        """Size of the file, in bytes."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def objects(self) -> tuple[Piece, ...]:
        """All objects that contain the file."""
        return self.pieces if self.chunks is None else (*self.pieces, self.chunks)

    def to_json(self) -> dict[str, Any]:
        """Return the file as JSON values."""
        content: dict[str, Any] = {"pieces": [[p.digest, p.nbytes] for p in self.pieces]}
        if self.chunks is not None:
            content["chunks"] = [self.chunks.digest, self.chunks.nbytes]
        return content

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the file that `to_json` encoded.

        Raises:
            KeyError: the value is something else.
            TypeError: the value is something else.
            ValueError: the value is something else.
        """
        chunks = value.get("chunks")
        made = cls(
            tuple(map(read_piece, value["pieces"])), None if chunks is None else read_piece(chunks)
        )
        if not 0 < len(made.pieces) <= _MOST_PIECES or made.nbytes >= _BEYOND:
            raise ValueError(f"{len(made.pieces)} pieces of {made.nbytes} bytes")
        if made.chunks is not None and made.chunks.nbytes > made.nbytes:
            raise ValueError(f"a list of chunks of {made.chunks.nbytes} bytes")
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Describes a version: one ``.safetensors`` file in pieces, or one such file per rank.

    Args:
        run: the run to which it belongs.
        version: its number.
        base: the version that an increment builds on; 0 for a whole version.
        base_digest: the digest of the base's manifest; "" for a whole version. Also "" for an
            increment to readers that answer, since the sender agrees on the base with them.
        created: when it was written by the trainer's clock, in seconds since 1970.
        pieces: the header, followed by the pieces of the body.
        chunks: the object with the sizes and digests of the body's chunks, with which readers check
            parts of the file; None if the trainer wrote none.
        anchor: whether increments may build on this whole version.
        ranks: instead of pieces, the file of each rank, in order; empty if one process wrote the
            version.
        holdings: the object that lists the parts of tensors in each rank's file.

    Example:
        >>> manifest = Manifest(
        ...     run="0" * 32, version=1, base=0, created=0.0, pieces=(Piece("0" * 64, 128),))
        >>> Manifest.from_bytes(manifest.to_bytes()) == manifest
        True
    """

    run: str
    version: int
    base: int = 0
    base_digest: str = ""
    created: float = 0.0
    pieces: tuple[Piece, ...] = ()
    chunks: Piece | None = None
    anchor: bool = False
    ranks: tuple[File, ...] = ()
    holdings: Piece | None = None
    #: The digest of the bytes from which the manifest was read.
    digest: str = field(default="", compare=False)

    @property
    def files(self) -> tuple[File, ...]:
        """The files of the version: one, or one per rank."""
        return self.ranks or (File(self.pieces, self.chunks),)

    @property
    def nbytes(self) -> int:
        """Size of the version, in bytes."""
        return sum(file.nbytes for file in self.files)

    @property
    def objects(self) -> tuple[Piece, ...]:
        """Every object that the version refers to."""
        found = tuple(piece for file in self.files for piece in file.objects)
        return found if self.holdings is None else (*found, self.holdings)

    def to_bytes(self) -> bytes:
        """Return the manifest as it is stored."""
        content: dict[str, Any] = {
            "format": RANKS_FORMAT if self.ranks else FORMAT,
            "run": self.run,
            "version": self.version,
            "base": self.base,
            "created": self.created,
        }
        if self.base_digest:
            content["base_digest"] = self.base_digest
        if self.ranks:
            assert self.holdings is not None
            content["holdings"] = [self.holdings.digest, self.holdings.nbytes]
            content["ranks"] = [file.to_json() for file in self.ranks]
        else:
            content |= File(self.pieces, self.chunks).to_json()
        if self.anchor:
            content["anchor"] = True
        return write_json(content)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the manifest that `to_bytes` wrote.

        Raises:
            PayloadError: the bytes are something else; the message says why.
        """
        content = read_json(data, "a manifest", (FORMAT, RANKS_FORMAT))
        try:
            known: dict[str, Any] = {
                "digest": digest_of(data),
                "run": read_text(content["run"]),
                "version": read_count(content["version"]),
                "base": read_count(content["base"]),
                "base_digest": read_digest(digest)
                if (digest := content.get("base_digest"))
                else "",
                "created": float(content["created"]),
                "anchor": content.get("anchor") is True,
            }
            if content["format"] == FORMAT:
                file = File.from_json(content)
                return cls(**known, pieces=file.pieces, chunks=file.chunks)
            ranks = tuple(map(File.from_json, content["ranks"]))
            made = cls(**known, ranks=ranks, holdings=read_piece(content["holdings"]))
            if made.holdings is None or made.holdings.nbytes > MOST_HOLDINGS:
                raise ValueError(f"holdings of {made.holdings}")
            if not 0 < len(ranks) <= _MOST_RANKS or made.base or made.anchor:
                raise ValueError(f"{len(ranks)} ranks, and base {made.base}")
            if len(made.objects) > 2 * _MOST_PIECES or made.nbytes >= _BEYOND:
                raise ValueError(f"{len(made.objects)} objects of {made.nbytes} bytes")
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise PayloadError(f"not a manifest of a version: {error!r:.200}") from error
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The state of a run.

    Args:
        run: the run, 32 hexadecimal digits.
        sequence: increases each time the head is replaced.
        version: the newest version; 0 before the first.
        versions: the manifest digest of each kept version.
        names: the named versions, by name.
        address: the digest of the object with the readers' address; None if there is none.
        closed: whether the trainer has closed its sender.
        leaving: versions that can no longer be leased, since the next head may drop them.

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
    leaving: tuple[int, ...] = ()

    def to_bytes(self, key: SigningKey) -> bytes:
        """Return the head as stored: a line with the key and the signature, then the content.

        Args:
            key: the trainer's key.
        """
        content = write_json(
            {
                "format": FORMAT,
                "run": self.run,
                "sequence": self.sequence,
                "version": self.version,
                "versions": {str(version): digest for version, digest in self.versions.items()},
                "names": dict(self.names),
                "address": self.address,
                "closed": self.closed,
                "leaving": self.leaving,
            }
        )
        return signed(content, key)

    @classmethod
    def from_bytes(cls, data: bytes, public: str) -> Self:
        """Return the head that `to_bytes` wrote.

        Args:
            data: the bytes in the store.
            public: the required public key, in hexadecimal.

        Raises:
            SignatureError: the data is unsigned or signed with another key.
            PayloadError: the bytes are something else; the message says why.
        """
        parsed = read_json(signed_by(public, data, HEAD), "a head", (FORMAT,))
        try:
            address = parsed["address"]
            made = cls(
                run=read_text(parsed["run"]),
                sequence=read_count(parsed["sequence"]),
                version=read_count(parsed["version"]),
                versions={int(v): read_digest(d) for v, d in parsed["versions"].items()},
                names={read_text(name): read_count(v) for name, v in parsed["names"].items()},
                address=None if address is None else read_digest(address),
                closed=bool(parsed["closed"]),
                leaving=tuple(map(read_count, parsed["leaving"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PayloadError(f"not a head of a run: {error!r:.200}") from error
        if len(made.versions) > MOST_VERSIONS:
            raise PayloadError(f"a head has {len(made.versions)} versions")
        return made


def signed(content: bytes, key: SigningKey, purpose: bytes = HEAD_PURPOSE) -> bytes:
    """Sign content: return it after a line with the key and the signature."""
    return f"ed25519 {key.public} {key.sign(content, purpose)}\n".encode() + content


def signed_by(public: str, data: bytes, what: str, purpose: bytes = HEAD_PURPOSE) -> bytes:
    """Check a signature, and return the content that `signed` was given.

    Args:
        public: the required public key, in hexadecimal.
        data: the bytes in the store.
        what: what the data is, for messages.
        purpose: see `SigningKey.sign`.

    Raises:
        SignatureError: the data is unsigned or signed with another key.
    """
    if not data:
        raise SignatureError(
            f"{what} is empty, as after a loss of power; put that of a mirror or of a backup in "
            "its place, or let the trainer begin a new run with another url"
        )
    line, _, content = data.partition(b"\n")
    words = line.decode("ascii", "replace").split(" ")
    if len(words) != 3 or words[0] != "ed25519":
        raise SignatureError(f"{what} begins with {line[:40]!r}, and not with a signature")
    verify(public, words[2], content, purpose)
    return content


def write_json(content: Mapping[str, Any]) -> bytes:
    """Return a record as it is stored."""
    return json.dumps(content, separators=(",", ":")).encode()


def read_json(data: bytes, what: str, formats: Sequence[int]) -> dict[str, Any]:
    """Return the record that `write_json` wrote.

    Args:
        data: any bytes.
        what: what the data is, for messages.
        formats: the formats that this release reads.

    Raises:
        PayloadError: the data is not such a record, or has an unknown format.
    """
    # Each list or object takes at least 60 bytes of memory. Genuine ones contain a digest.
    if data.count(b"[") + data.count(b"{") > _CONTAINERS + len(data) // 64:
        raise PayloadError(f"{what} has too many lists for its {len(data)} bytes")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"{what} must be JSON, got {data[:40]!r}") from error
    if not isinstance(content, dict) or content.get("format") not in formats:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise PayloadError(
            f"{what} has format {found!r:.40}, and this is sync-plugin-store for format "
            f"{' and '.join(map(str, formats))}; type: pip install -U sync-plugin-store, at both "
            "ends"
        )
    return content


def read_digest(value: object) -> str:
    """Return a SHA-256 in hexadecimal, or raise `ValueError`."""
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"{value!r:.80} is not a SHA-256 in hexadecimal")
    return value


def read_piece(value: Any) -> Piece:
    """Return the piece that a list of digest and size describes, or raise `ValueError`."""
    digest, nbytes = value
    return Piece(read_digest(digest), read_count(nbytes))


def read_count(value: object) -> int:
    """Return a non-negative integer, or raise `ValueError`."""
    if type(value) is not int or not 0 <= value < _BEYOND:
        raise ValueError(f"{value!r:.80} is not a natural number")
    return value


def read_text(value: object) -> str:
    """Return a text, or raise `ValueError`."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r:.80} is not a text")
    return value
