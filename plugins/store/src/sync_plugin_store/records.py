"""The records by which ranks write a version together: small objects in ``parts/``.

All are signed with the run's key, and named by the session: a number that the first rank draws when
it begins. No rank takes what was written for another session, or for another version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

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
#: The name of the record of the session, which the first rank alone replaces.
SESSION = "parts/session.json"
_RECORD = re.compile(rf"{PARTS}([0-9a-f]{{32}})(?:-([0-9]{{1,19}}))?-([0-9]{{1,9}})\.json")


def holding_name(session: str, rank: int) -> str:
    """Return the name of the record of the parts that a rank holds."""
    return f"{PARTS}{session}-{rank}.json"


def part_name(session: str, version: int, rank: int) -> str:
    """Return the name of the record of a part of a version."""
    return f"{PARTS}{session}-{version}-{rank}.json"


def read_record_name(name: str) -> tuple[str, int, int] | None:
    """Return the session, version and rank of a rank's record; None for other names.

    The version is 0 where the record is of the parts that the rank holds.

    Example:
        >>> read_record_name(part_name("0" * 32, 7, 1)) == ("0" * 32, 7, 1)
        True
        >>> read_record_name(holding_name("0" * 32, 1)) == ("0" * 32, 0, 1)
        True
        >>> read_record_name(SESSION)
    """
    match = _RECORD.fullmatch(name)
    return None if match is None else (match[1], int(match[2] or 0), int(match[3]))


@dataclass(frozen=True, slots=True)
class Session:
    """The session of a trainer: from the start of its first rank to the next start.

    Args:
        run: the run.
        session: 32 hexadecimal digits.
        size: the number of ranks.
        given_up: the newest version that the first rank has given up; 0 for none.
        reason: why.

    Example:
        >>> key = SigningKey.generate()
        >>> session = Session("0" * 32, "1" * 32, 4)
        >>> Session.from_bytes(session.to_bytes(key), key.public) == session
        True
    """

    run: str
    session: str
    size: int
    given_up: int = 0
    reason: str = ""

    def to_bytes(self, key: SigningKey) -> bytes:
        """Return the record as it is stored."""
        content = {
            "size": self.size,
            "given_up": self.given_up,
            "reason": self.reason,
        }
        return _write("session", self.run, self.session, content, key)

    @classmethod
    def from_bytes(cls, data: bytes, public: str) -> Self:
        """Return the record that `to_bytes` wrote.

        Raises:
            SignatureError: it is signed with another key.
            PayloadError: it is something else.
        """
        content = _read(data, public, "session")
        try:
            return cls(
                *_session_of(content),
                read_count(content["size"]),
                read_count(content["given_up"]),
                str(content["reason"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PayloadError(f"not the record of a session: {error!r:.200}") from error


@dataclass(frozen=True, slots=True)
class RankHolding:
    """The parts that a rank holds.

    Args:
        run: the run.
        session: the session.
        rank: the rank.
        holding: the object that says it.
    """

    run: str
    session: str
    rank: int
    holding: Piece

    def to_bytes(self, key: SigningKey) -> bytes:
        """Return the record as it is stored."""
        content = {"rank": self.rank, "holding": [self.holding.digest, self.holding.nbytes]}
        return _write("holding", self.run, self.session, content, key)

    @classmethod
    def from_bytes(cls, data: bytes, public: str) -> Self:
        """Return the record that `to_bytes` wrote; see `Session.from_bytes`."""
        content = _read(data, public, "holding")
        try:
            rank, holding = read_count(content["rank"]), read_piece(content["holding"])
            return cls(*_session_of(content), rank, holding)
        except (KeyError, TypeError, ValueError) as error:
            raise PayloadError(f"not the record of a rank: {error!r:.200}") from error


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part of a version that a rank has written.

    Args:
        run: the run.
        session: the session.
        rank: the rank.
        version: the version.
        after: a version that has the pieces which were not written again; 0 for none.
        holdings: the digest of what all ranks write, as this rank knows it.
        file: what it has written.
    """

    run: str
    session: str
    rank: int
    version: int
    after: int
    holdings: str
    file: File

    def to_bytes(self, key: SigningKey) -> bytes:
        """Return the record as it is stored."""
        content = {
            "rank": self.rank,
            "version": self.version,
            "after": self.after,
            "holdings": self.holdings,
            "file": self.file.to_json(),
        }
        return _write("part", self.run, self.session, content, key)

    @classmethod
    def from_bytes(cls, data: bytes, public: str) -> Self:
        """Return the record that `to_bytes` wrote; see `Session.from_bytes`."""
        content = _read(data, public, "part")
        try:
            return cls(
                *_session_of(content),
                read_count(content["rank"]),
                read_count(content["version"]),
                read_count(content["after"]),
                read_digest(content["holdings"]),
                File.from_json(content["file"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PayloadError(f"not the part of a rank: {error!r:.200}") from error


def pieces_of_record(data: bytes, public: str) -> tuple[Piece, ...]:
    """Return the objects that a record of a rank refers to; none for anything else."""
    for read in (_pieces_of_part, _pieces_of_holding):
        with suppress(SignatureError, PayloadError):
            return read(data, public)
    return ()


def _pieces_of_part(data: bytes, public: str) -> tuple[Piece, ...]:
    return RankPart.from_bytes(data, public).file.objects


def _pieces_of_holding(data: bytes, public: str) -> tuple[Piece, ...]:
    return (RankHolding.from_bytes(data, public).holding,)


def _write(kind: str, run: str, session: str, content: Mapping[str, Any], key: SigningKey) -> bytes:
    known = {"format": RANKS_FORMAT, "kind": kind, "run": run, "session": session}
    return signed(write_json({**known, **content}), key, PARTS_PURPOSE)


def _read(data: bytes, public: str, kind: str) -> dict[str, Any]:
    what = f"the record of a {kind}"
    content = read_json(signed_by(public, data, what, PARTS_PURPOSE), what, (RANKS_FORMAT,))
    if content.get("kind") != kind:
        raise PayloadError(f"{what} is of kind {content.get('kind')!r:.40}")
    return content


def _session_of(content: Mapping[str, Any]) -> tuple[str, str]:
    return read_text(content["run"]), read_text(content["session"])
