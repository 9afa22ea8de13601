"""The first rank of a sharded trainer: it publishes the parts that all ranks have written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sync_core import Delivery, Layout, OptionError, Payload, SyncError
from sync_core.errors import PayloadError
from sync_plugin_scale import Holding
from sync_plugin_store.errors import ConflictError, SignatureError, StoreError
from sync_plugin_store.format import Manifest, Piece, digest_of
from sync_plugin_store.holdings import file_layout
from sync_plugin_store.keys import SigningKey
from sync_plugin_store.objects import Found, Objects
from sync_plugin_store.publisher import RunPublisher
from sync_plugin_store.ranks import HINT, JoinedSession, Rank, write_ranks
from sync_plugin_store.records import (
    PARTS,
    SESSION,
    RankPart,
    Session,
    read_record_name,
)
from sync_plugin_store.transport import StoreEndpoint

__all__ = ["FirstRank"]

_log = logging.getLogger("sync_core")
# The longest recorded reason for giving up a version, in characters.
_LONGEST_REASON = 1000


class FirstRank(Rank):
    """Publishes each version as soon as all ranks have written their parts.

    Args:
        objects: where the run is.
        key: signs the run and the records of the ranks.
        holding: the parts that this rank holds.
        publisher: writes the run.
        endpoint: the endpoint of readers.
        make_address: a function from the layout of whole versions to the address of the run.
        timeout: how long to wait for the other ranks, in seconds.
        poll: the longest pause between two looks for their records, in seconds.
    """

    def __init__(
        self,
        objects: Objects,
        key: SigningKey,
        holding: Holding,
        publisher: RunPublisher,
        *,
        endpoint: StoreEndpoint,
        make_address: Callable[[Layout], bytes | None],
        timeout: float,
        poll: float,
    ) -> None:
        super().__init__(objects, key, holding, publisher.writer, timeout=timeout, poll=poll)
        self._publisher = publisher
        self._endpoint = endpoint
        self._make_address = make_address
        self._address: bytes | None = None
        # The object with the parts of all ranks; it is written with the first version.
        self._piece: Piece | None = None
        self._session = Session(publisher.run, publisher.session, self._size)
        self._write_session(self._read_session())
        # Ranks that find this session later write their records again.
        self._remove_parts(0)
        self.write_holding(self._session)

    def address(self, worker_id: int) -> StoreEndpoint:
        """Return the endpoint of any reader."""
        del worker_id
        return self._endpoint

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> Mapping[int, Delivery]:
        """Publish a version; readers can read it when this returns.

        Raises:
            StoreError: a rank has not written its part, or the store failed. Readers keep the
                version they have.
            ConflictError: another trainer has written to the run.
        """
        del worker_ids
        deadline = time.monotonic() + self._timeout
        self._publisher.check_newer(payload.version)
        try:
            self._publish(payload, deadline)
        except BaseException as error:
            self._give_up(payload.version, error)
            self._publisher.abandon()
            raise
        self._remove_parts(payload.version)
        return {}

    def close(self) -> None:
        """Mark the run as closed."""
        self._closing.set()
        self._publisher.close()

    def _publish(self, payload: Payload, deadline: float) -> None:
        joined = self.wait_for(lambda: self.join(self._session), deadline)
        if joined is None:
            raise StoreError(
                f"{write_ranks(self.missing_holdings())} of {self._size} did not begin within "
                f"{self._timeout:g} s, and version {payload.version} was not published; {HINT}"
            )
        known = self._publisher.known
        file = self._writer.write(self.part_of(payload, joined), known)
        parts = self._wait_for_parts(payload.version, joined, deadline)
        if self._piece is None or self._piece.digest not in known:
            self._piece = self._writer.write_object(joined.data, known)
        if self._address is None:
            self._address = self._make_address(joined.holdings.layout)
        manifest = Manifest(
            run=self._publisher.run,
            version=payload.version,
            created=round(time.time(), 3),
            ranks=(file, *(parts[rank].file for rank in range(1, self._size))),
            holdings=self._piece,
        )
        after = {rank: part.after for rank, part in parts.items() if part.after}
        self._publisher.commit(manifest, address=self._address, after=after)

    def _wait_for_parts(
        self, version: int, joined: JoinedSession, deadline: float
    ) -> Mapping[int, RankPart]:
        found: dict[int, RankPart] = {}
        others: dict[int, int] = {}

        def look() -> bool | None:
            for listed in self._objects.list(PARTS) if self._size > 1 else ():
                session, sent, rank = read_record_name(listed.name) or ("", 0, 0)
                if session != self._session.session or not sent:
                    continue
                if sent != version:
                    others[rank] = sent
                elif 0 < rank < self._size and rank not in found:
                    part = self._read_part(listed.name, rank, version, joined)
                    if part is not None:
                        found[rank] = part
                        self._publisher.note_record(listed, part.file.objects)
            return True if len(found) == self._size - 1 else None

        if self.wait_for(look, deadline) is None:
            missing = [rank for rank in range(1, self._size) if rank not in found]
            sent = [f"rank {r} has sent version {others[r]}" for r in missing if r in others]
            raise StoreError(
                f"version {version} was not published, as {write_ranks(missing)} of {self._size} "
                f"did not write a part of it within {self._timeout:g} s; "
                f"{', '.join(sent) + '; ' if sent else ''}{HINT}"
            )
        return found

    def _read_part(
        self, name: str, rank: int, version: int, joined: JoinedSession
    ) -> RankPart | None:
        found = self._objects.look(name)
        if found is None:
            return None
        try:
            part = RankPart.from_bytes(found.data, self._key.public)
        except SignatureError as error:
            raise SignatureError(
                f"the part of rank {rank} in {self._objects.url} is not signed with the key of the "
                "run; give every rank the same file, Sender(…, key='FILE'), and no other "
                "process write access"
            ) from error
        written = joined.holdings.ranks[rank]
        layout = file_layout(written)
        about = (part.run, part.session, part.rank, part.version)
        if about != (self._session.run, self._session.session, rank, version):
            raise PayloadError(f"the record {name} is that of another rank or version: {about}")
        header = Piece(digest_of(layout.header), len(layout.header))
        if part.holdings != joined.digest or part.file.pieces[0] != header:
            raise PayloadError(
                f"rank {rank} has written other tensors than it held at first; make a new Sender "
                "on every rank"
            )
        if part.file.nbytes != layout.nbytes:
            raise PayloadError(
                f"rank {rank} has written {part.file.nbytes} bytes of version {version}, and its "
                f"tensors have {layout.nbytes}"
            )
        return part

    def _read_session(self) -> Found | None:
        """Return the session's record, which the next one replaces, if it belongs to the run."""
        found = self._objects.look(SESSION)
        try:
            if found is not None:
                Session.from_bytes(found.data, self._key.public)
        except (SignatureError, PayloadError) as error:
            raise OptionError(
                f"{SESSION} in {self._objects.url} is not of the ranks of this run: {error}; "
                "remove it, or give another url"
            ) from error
        return found

    def _write_session(self, standing: Found | None) -> None:
        tag = None if standing is None else standing.tag
        try:
            self._objects.swap(SESSION, self._session.to_bytes(self._key), tag)
        except ConflictError as error:
            raise ConflictError(
                f"another trainer writes to the run in {self._objects.url}; end it, or give one of "
                "them another url"
            ) from error

    def _give_up(self, version: int, error: BaseException) -> None:
        """Notify the other ranks that a version will not be published."""
        reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
        self._session = replace(self._session, given_up=version, reason=reason)
        try:
            # The last replacement may have succeeded although its answer was lost.
            found = self._objects.look(SESSION)
            if found is not None:
                standing = Session.from_bytes(found.data, self._key.public)
                # Leave the session of another trainer.
                found = found if standing.session == self._session.session else None
            self._write_session(found)
        except SyncError as failed:
            _log.warning("the other ranks wait for version %d in vain: %s", version, failed)

    def _remove_parts(self, version: int) -> None:
        """Remove the records of versions up to this one and of sessions that have ended."""
        try:
            self._publisher.remove_records(version)
        except StoreError as error:
            _log.warning("parts of version %d stay in %s: %s", version, self._objects.url, error)
