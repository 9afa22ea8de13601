"""The later ranks of a sharded trainer: they write their parts and wait for the first rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from sync_core import Delivery, LayoutMismatchError, Payload, SyncError
from sync_plugin_scale import Holding
from sync_plugin_store.errors import ConflictError, SignatureError, StoreError, not_newer
from sync_plugin_store.format import File, Piece
from sync_plugin_store.keys import SigningKey
from sync_plugin_store.objects import Objects
from sync_plugin_store.pieces import PieceWriter
from sync_plugin_store.ranks import HINT, JoinedSession, Rank, write_ranks
from sync_plugin_store.reader import GoneError, RunReader
from sync_plugin_store.records import (
    SESSION,
    RankPart,
    Session,
    part_name,
)
from sync_plugin_store.transport import StoreEndpoint

__all__ = ["LaterRank"]

_log = logging.getLogger("sync_core")


class LaterRank(Rank):
    """Writes a rank's parts, and waits until the first rank has published them.

    Args:
        objects: where the run is.
        key: the run's key, which signs the records.
        holding: the parts that this rank holds.
        writer: writes the pieces.
        timeout: how long to wait for the other ranks, in seconds.
        poll: the longest time between two looks for their records, in seconds.
    """

    def __init__(
        self,
        objects: Objects,
        key: SigningKey,
        holding: Holding,
        writer: PieceWriter,
        *,
        timeout: float,
        poll: float,
    ) -> None:
        super().__init__(objects, key, holding, writer, timeout=timeout, poll=poll)
        self._reader = RunReader([objects], key.public, timeout=timeout, streams=1)
        self._session: Session | None = None
        self._tag: str | None = None
        # The version that was already given up when this rank first read the session, perhaps by a
        # trainer that has ended.
        self._given_up = 0
        # The session in which the last version was published.
        self._bound = ""
        # The newest version with this rank's part, and the digests of the part's objects.
        self._last, self._known = 0, frozenset[str]()
        # The reason why the parts of all ranks do not make up a model.
        self._mismatch: LayoutMismatchError | None = None
        # Notify the other ranks early of the parts that this one holds.
        self._look_session()

    def address(self, worker_id: int) -> StoreEndpoint:
        """Return the endpoint of any reader."""
        del worker_id
        run = "" if self._session is None else self._session.run
        return StoreEndpoint(urls=[self._objects.url], key=self._key.public, run=run)

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> Mapping[int, Delivery]:
        """Write this rank's part of a version; readers can read the version when this returns.

        Raises:
            StoreError: the first rank has not published the version, or the store failed.
            ConflictError: another trainer has written to the run.
        """
        del worker_ids
        deadline = time.monotonic() + self._timeout
        version = payload.version
        head = self._reader.look()
        if head is not None and head.version >= version:
            raise not_newer(self._objects.url, head.version, version)
        after = self._last if head is not None and self._last in head.versions else 0
        try:
            self._write(payload, after, deadline)
        except BaseException:
            self._name_left()
            self._withdraw(version)
            raise
        return {}

    def close(self) -> None:
        """End the threads."""
        self._closing.set()
        self._reader.close()
        self._writer.close()
        self._name_left()

    def _write(self, payload: Payload, after: int, deadline: float) -> None:
        """Write this rank's part, again for each new session, until the version is published."""
        version = payload.version
        written: tuple[JoinedSession, File] | None = None

        def look() -> bool | None:
            nonlocal written
            head = self._reader.look()
            if head is not None and head.version >= version:
                return True
            if head is not None and head.closed and self._bound:
                # Rank 0 may have given the version up before, for a reason in its record.
                self._look_joined(version)
                raise StoreError(
                    f"version {version} was not published, as rank 0 has closed its sender"
                )
            now = self._look_joined(version)
            if now is None or (written and written[0].session == now.session):
                return None
            if written and written[0].digest == now.digest:
                file = written[1]
            else:
                # In a session that has ended, ranks may have held other parts.
                known = self._known if after else ()
                file = self._writer.write(self.part_of(payload, now), known)
            self._write_part(version, after, now, file)
            written = now, file
            return None

        published = self.wait_for(look, deadline)
        if not written:
            raise self._taken_over(version) if published else self._not_begun(version)
        if published is None:
            raise StoreError(
                f"rank {self._rank} has written its part of version {version}, and rank 0 did not "
                f"publish the version within {self._timeout:g} s; see its error: {HINT}"
            )
        try:
            ranks = self._reader.manifest(version).ranks
        except GoneError as error:
            raise self._taken_over(version) from error
        joined, file = written
        if ranks[self._rank : self._rank + 1] != (file,):
            raise self._taken_over(version)
        self._bound = joined.session
        self._last = version
        self._known = frozenset(piece.digest for piece in file.objects)
        # Objects of failed sends.
        self._name_left(*file.objects)

    def _write_part(self, version: int, after: int, joined: JoinedSession, file: File) -> None:
        assert self._session is not None
        session, run = joined.session, self._session.run
        part = RankPart(run, session, self._rank, version, after, joined.digest, file)
        self._objects.put(part_name(session, version, self._rank), part.to_bytes(self._key))

    def _name_left(self, *but: Piece) -> None:
        """Record the written objects, except some, so that rank 0 can remove them."""
        said = () if self._said is None else (self._said,)
        left = self._writer.take_written((*but, *said))
        if self._session is not None:
            self._writer.name(self._session.run, self._last, left)

    def _withdraw(self, version: int) -> None:
        """Remove the record of a part, so that rank 0 does not join it with parts of later sends.

        Each rank counts versions on its own, and rank 0 may not have sent this one.
        """
        if self._session is None:
            return
        try:
            self._objects.delete(part_name(self._session.session, version, self._rank))
        except StoreError as error:
            _log.warning("a part of version %d stays in %s: %s", version, self._objects.url, error)

    def _look_joined(self, version: int) -> JoinedSession | None:
        """Return the parts that all ranks write; None while some ranks have not begun.

        Raises:
            StoreError: the first rank has given up the version.
            LayoutMismatchError: the ranks do not hold a whole model, so the version was given up.
        """
        session = self._look_session()
        if session is None:
            return None
        if session.given_up >= version and session.given_up != self._given_up:
            head = self._reader.look()
            if head is not None and head.version >= version:
                # The version was published, but rank 0 lost the store's answer and gave it up.
                return None
            # Each rank detects on its own that the ranks do not hold a whole model.
            self.join(session)
            raise StoreError(
                f"version {version} was not published, as rank 0 has given it up: {session.reason}"
            )
        try:
            return self.join(session)
        except LayoutMismatchError as error:
            # In a session that has ended, ranks may have held other parts.
            self._mismatch = error
            return None

    def _look_session(self) -> Session | None:
        """Return the session; if it is new, write what this rank holds for its other ranks."""
        found = self._objects.look(SESSION, self._tag)
        if found is None:
            return self._session
        try:
            session = Session.from_bytes(found.data, self._key.public)
        except SignatureError as error:
            raise SignatureError(
                f"the session in {self._objects.url} is not signed with this rank's key; give "
                "every rank the same file, Sender(…, key='FILE')"
            ) from error
        if self._bound and session.session != self._bound:
            raise ConflictError(
                f"the first rank of the trainer in {self._objects.url} has begun again, or is "
                "another trainer's; make a new Sender on every rank"
            )
        new = self._session is None or session.session != self._session.session
        if new and session.size != self._size:
            # A session that has ended may have had other ranks.
            return None
        if new:
            self._mismatch, self._given_up = None, session.given_up
            self.write_holding(session)
        self._session, self._tag = session, found.tag
        return session

    def _not_begun(self, version: int) -> SyncError:
        if self._mismatch is not None:
            return self._mismatch
        found = self._objects.look(SESSION)
        if found is None:
            what = "rank 0 did not begin"
        elif self._session is None:
            size = Session.from_bytes(found.data, self._key.public).size
            what = f"rank 0 is of {size} ranks, and not of {self._size}, and nothing changed that"
        else:
            what = f"{write_ranks(self.missing_holdings())} of {self._size} did not begin"
        return StoreError(
            f"{what} within {self._timeout:g} s, and rank {self._rank} has written nothing of "
            f"version {version}; {HINT}"
        )

    def _taken_over(self, version: int) -> ConflictError:
        return ConflictError(
            f"version {version} in {self._objects.url} has no part of rank {self._rank} of this "
            "trainer: another one writes to the run; end it, or give one of them another url"
        )
