"""The records with which ranks write a version together: small objects in ``parts/``.

All records are signed with the run's key. Their names contain the session, a random number that the
first rank draws when it begins. Ranks ignore records of other sessions and versions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from sync_core.errors import PayloadError
from sync_plugin_store.errors import SignatureError
from sync_plugin_store.format import (
    RANKS_FORMAT,
    File,
    Piece,
    read_count,
    read_digest,
    read_json,
    read_piece,
    read_text,
    signed,
    signed_by,
    write_json,
)
from sync_plugin_store.keys import PARTS_PURPOSE, SigningKey

__all__ = [
    "PARTS",
    "SESSION",
    "RankHolding",
    "RankPart",
    "Session",
    "holding_name",
    "part_name",
    "pieces_of_record",
    "read_record_name",
]

#: The folder of the records.
PARTS = "parts/"
#: The name of the session's record, which only the first rank replaces.
SESSION = "parts/session.json"
_RECORD = re.compile(rf"{PARTS}([0-9a-f]{{32}})(?:-([0-9]{{1,19}}))?-([0-9]{{1,9}})\.json")


def holding_name(session: str, rank: int) -> str:
    """Return the name of the record with a rank's holding."""
    return f"{PARTS}{session}-{rank}.json"


def part_name(session: str, version: int, rank: int) -> str:
    """Return the name of the record for a rank's part of a version."""
    return f"{PARTS}{session}-{version}-{rank}.json"


def read_record_name(name: str) -> tuple[str, int, int] | None:
    """Return the session, version and rank of a rank's record; None for other names.

    The version is 0 if the record has the rank's holding.

    Example:
        >>> read_record_name(part_name("0" * 32, 7, 1)) == ("0" * 32, 7, 1)
        True
        >>> read_record_name(holding_name("0" * 32, 1)) == ("0" * 32, 0, 1)
        True
        >>> read_record_name(SESSION)
    """
    match = _RECORD.fullmatch(name)
    return None if match is None else (match[1], int(match[2] or 0), int(match[3]))


# The function that reads each field.
_READ: dict[str, Callable[[Any], Any]] = {
    "run": read_text,
    "session": read_text,
    "rank": read_count,
    "size": read_count,
    "version": read_count,
    "given_up": read_count,
    "after": read_count,
    "reason": str,
    "holding": read_piece,
    "holdings": read_digest,
    "file": File.from_json,
}


@dataclass(frozen=True, slots=True)
class _Record:
    """A signed record, stored as JSON with its kind and format.

    Args:
        run: the run.
        session: 32 hexadecimal digits.
    """

    kind: ClassVar[str]

    run: str
    session: str

    def to_bytes(self, key: SigningKey) -> bytes:
        """Return the record as stored."""
        content = {each.name: _plain(getattr(self, each.name)) for each in fields(self)}
        content |= {"format": RANKS_FORMAT, "kind": self.kind}
        return signed(write_json(content), key, PARTS_PURPOSE)

    @classmethod
    def from_bytes(cls, data: bytes, public: str) -> Self:
        """Return the record that `to_bytes` wrote.

        Raises:
            SignatureError: the data is signed with another key.
            PayloadError: the data is not such a record.
        """
        what = f"the record of a {cls.kind}"
        content = read_json(signed_by(public, data, what, PARTS_PURPOSE), what, (RANKS_FORMAT,))
        if content.get("kind") != cls.kind:
            raise PayloadError(f"{what} is of kind {content.get('kind')!r:.40}")
        try:
            return cls(**{each.name: _READ[each.name](content[each.name]) for each in fields(cls)})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PayloadError(f"not {what}: {error!r:.200}") from error


@dataclass(frozen=True, slots=True)
class Session(_Record):
    """The session of a trainer: from the start of its first rank to the next start.

    Args:
        size: the number of ranks.
        given_up: the newest version that the first rank gave up; 0 for none.
        reason: the reason for giving it up.

    Example:
        >>> key = SigningKey.generate()
        >>> session = Session("0" * 32, "1" * 32, 4)
        >>> Session.from_bytes(session.to_bytes(key), key.public) == session
        True
    """

    kind: ClassVar[str] = "session"

    size: int
    given_up: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RankHolding(_Record):
    """Refers to the object with the parts that a rank holds.

    Args:
        rank: the rank.
        holding: the object with the parts that it holds.
    """

    kind: ClassVar[str] = "holding"

    rank: int
    holding: Piece


@dataclass(frozen=True, slots=True)
class RankPart(_Record):
    """Lists the objects of the part of a version that a rank has written.

    Args:
        rank: the rank.
        version: the version.
        after: an earlier version, which has the pieces that the rank did not write again; 0 for
            none.
        holdings: the digest of the parts of all ranks, as computed by this rank.
        file: the file of the rank's part.
    """

    kind: ClassVar[str] = "part"

    rank: int
    version: int
    after: int
    holdings: str
    file: File


def pieces_of_record(data: bytes, public: str) -> tuple[Piece, ...] | None:
    """Return the objects that a rank's record refers to; None for other data."""
    for kind in (RankPart, RankHolding, Session):
        with suppress(SignatureError, PayloadError):
            record = kind.from_bytes(data, public)
            if isinstance(record, RankPart):
                return record.file.objects
            return (record.holding,) if isinstance(record, RankHolding) else ()
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, Piece):
        return [value.digest, value.nbytes]
    return value.to_json() if isinstance(value, File) else value
