"""Both sides of a transport over a store."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any

from sync_core import (
    Answer,
    ClosedError,
    Layout,
    Payload,
    ReceiverTransport,
    SenderLostError,
    SenderTransport,
    TransportContext,
)
from sync_core.errors import CapacityError, PayloadError
from sync_core.transports import Publication, Roster, uninterrupted
from sync_plugin_std.stores.store import (
    CLOSING,
    SENDER,
    SIGNS,
    NotAFileError,
    Pulse,
    Records,
    Store,
    StoreOptions,
    Versions,
    Watch,
    machine,
    worker_record,
)

# For how many workers that were removed the sender's record is still sealed.
_FAREWELLS = 64
_log = logging.getLogger("sync_core")


class StoreReceiver(ReceiverTransport):
    """Reads whole versions, so that a newer one may appear meanwhile.

    Args:
        context: what the core knows.
        store: where versions and records stand.
        options: how often to look, and how long to wait for a sign of life.
        versions: where the bytes of versions stand; None for the same store.
    """

    def __init__(
        self,
        context: TransportContext,
        store: Store,
        options: StoreOptions,
        versions: Versions | None = None,
    ) -> None:
        self._records = Records(store, context)
        self._versions = self._records if versions is None else versions
        self._worker_id = context.worker_id
        self._record = worker_record(context.worker_id)
        self._poll = options.poll
        self._seen = 0
        layout = Layout(()) if context.layout is None else context.layout
        self._most_nbytes = layout.most_nbytes
        self._owner = secrets.token_hex(8)
        self._answer: dict[str, Any] | None = None
        self._beats = 0
        self._replaced = False
        self._left = "closed its receiver"
        self._process = os.getpid()
        self._closed = False
        self._woken = threading.Event()
        self._lock = threading.RLock()
        self._sender = Watch(options.lost_after)
        if self._records.read(SENDER) is None:
            raise SenderLostError("the sender is gone, or the address is another sender's")
        self._write()
        self._pulse = Pulse(self._beat, options.lost_after / SIGNS)
        # Not `atexit`, which a process that multiprocessing has forked does not run.
        self._at_exit = Finalize(None, self._end, exitpriority=0)

    def receive(self, timeout: float) -> Payload | None:
        """The newest version that this worker has not seen."""
        deadline = time.monotonic() + timeout
        while True:
            payload = self._look()
            left = deadline - time.monotonic()
            if payload is not None or left <= 0 or self._woken.wait(min(self._poll, left)):
                return payload

    def acknowledge(self, answer: Answer) -> None:
        """Tell the sender that a version was committed, or why it was not."""
        with self._lock:
            self._answer = answer.to_message()
            if not self._rewrite():
                raise SenderLostError("the sender was closed, or has another receiver here")

    def leave(self, reason: str) -> None:
        """Have `close` say why."""
        self._left = reason

    def wake(self) -> None:
        """Look once more at most."""
        self._woken.set()

    def close(self) -> None:
        """Leave, and say so; in a process that was forked from this one, do nothing."""
        if os.getpid() != self._process:
            return
        self._at_exit.cancel()
        self._pulse.end()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._rewrite()
            except Exception as error:
                _log.warning("worker %d cannot say that it leaves: %r", self._worker_id, error)

    def _end(self) -> None:
        """Leave at the end of the process, and say which exception has ended it."""
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if isinstance(error, SystemExit):
            error = error.__context__ or error
        others = {*threading.enumerate()} - {threading.current_thread()}
        if error is None and not all(thread.daemon for thread in others):
            return  # a process of multiprocessing, which waits for its threads after this
        self._left = "has ended without closing its receiver"
        if error is not None:
            self._left += f", after {type(error).__name__}: {error}"
        self.close()

    def _look(self) -> Payload | None:
        """Read the newest version; where that fails, one that has taken its place meanwhile."""
        version, sealed = self._wanted()
        if version <= self._seen:
            return None
        failure = None
        try:
            payload = self._read(version, sealed)
            if payload is not None:
                return payload
        except Exception as error:
            failure = error
        newer, sealed = self._wanted()
        if newer > version:
            if failure is not None:
                _log.warning("version %d is read instead of %d: %s", newer, version, failure)
            return self._read(newer, sealed)
        if failure is not None:
            raise failure
        return None

    def _read(self, version: int, sealed: tuple[int, str]) -> Payload | None:
        """Return a version; None where it has been removed."""
        began = time.perf_counter()
        try:
            if sealed[0] > self._most_nbytes:
                raise PayloadError(
                    f"version {version} has {sealed[0]} bytes, and there is reason for "
                    f"{self._most_nbytes} at most"
                )
            block = self._versions.read_version(version, *sealed)
            if block is None:
                return None
            self._seen = version
            return Payload.unpack(block, version, since=began)
        except (CapacityError, PayloadError, NotAFileError) as error:
            self._seen = version
            self.acknowledge(Answer.refusal(version, error))
            if isinstance(error, CapacityError):
                raise
            raise PayloadError(str(error)) from error

    def _wanted(self) -> tuple[int, tuple[int, str]]:
        """Return the version for this worker, and its size and digest."""
        with self._lock:
            record = self._records.read(SENDER)
            if record is None:
                raise SenderLostError("the sender was closed, or another has written its record")
            if not self._sender.lives(record.get("beats")):
                raise SenderLostError("the sender gives no sign of life")
        if self._replaced:
            raise SenderLostError("another receiver was given the same address")
        wanted = record.get("wanted")
        if not isinstance(wanted, dict):
            raise SenderLostError(f"the sender names no versions, but wanted={wanted!r:.80}")
        if str(self._worker_id) not in wanted:
            raise SenderLostError(f"worker {self._worker_id} {Roster.REMOVED}")
        version = wanted[str(self._worker_id)]
        sealed = record.get("sealed")
        entry = sealed.get(str(version)) if isinstance(sealed, dict) else None
        nbytes, digest = entry if isinstance(entry, list) and len(entry) == 2 else (0, "")
        if type(version) is not int or type(nbytes) is not int:
            raise SenderLostError(f"the sender names no version of a size: {version!r:.80}")
        return version, (nbytes, str(digest))

    def _beat(self) -> None:
        with self._lock:
            self._beats += 1
            if self._rewrite():
                # Between two calls of receive() too, so that the next knows how long it is dead.
                record = self._records.read(SENDER)
                if record is not None:
                    self._sender.lives(record.get("beats"))

    def _rewrite(self) -> bool:
        """Write, unless another has taken the place or the sender has closed; whether it did."""
        standing = self._records.read(self._record)
        if standing is None or standing.get("owner") != self._owner:
            self._replaced = True
            return False
        self._write()
        return True

    def _write(self) -> None:
        record = {
            "owner": self._owner,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "beats": -1 if self._closed else self._beats,
            "answer": self._answer,
            "left": self._left if self._closed else None,
        }
        self._records.write(self._record, record)
        # Its own may have been removed just before, by a sender that closes.
        if self._records.read(SENDER) is None:
            self._records.delete(self._record)


@dataclass(eq=False)
class _Heard:
    """The receiver of a worker, and its last answer, by the worker's record."""

    watch: Watch
    owner: str | None = None
    answer: dict[str, Any] | None = None


class StoreSender(SenderTransport):
    """Publishes the version of each worker in one record, and rewrites it as a sign of life.

    Args:
        context: what the core knows.
        store: where versions and records stand.
        options: how often to look, and how long to wait for a sign of life.
        versions: where the bytes of versions stand; None for the same store.
    """

    def __init__(
        self,
        context: TransportContext,
        store: Store,
        options: StoreOptions,
        versions: Versions | None = None,
    ) -> None:
        self._records = Records(store, context)
        self._versions = self._records if versions is None else versions
        self.roster = Roster(context.worker_ids, context.notify)
        self._options = options
        self._beats = 0
        # Lets a later sender recognise records of a process that has ended.
        self._signature = {
            "process": os.getpid(),
            "machine": machine(),
            "lost_after": options.lost_after,
        }
        # The versions in the store, with their digests; None for one that is not written whole.
        self._written: dict[int, Publication | None] = {}
        self._served = set(context.worker_ids)
        # They find in the sender's record that they were removed.
        self._removed_last: deque[int] = deque(maxlen=_FAREWELLS)
        self._heard = {i: _Heard(Watch(options.lost_after)) for i in context.worker_ids}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        # Whether all that it had put into the store is gone.
        self._removed = False
        self._thread = threading.Thread(target=self._watch, name="sync-store", daemon=True)
        with uninterrupted():
            self._pulse = Pulse(self._write_record, options.lost_after / SIGNS)
            self._thread.start()
        # Last, as `close` removes it.
        self._write_record()

    def address(self, worker_id: int) -> None:
        """Nothing: the token, which every address has, leads to the records."""

    def publish(self, payload: Payload) -> Publication:
        """Put the weights once."""
        version = payload.version
        with self._lock:
            self._written[version] = None
        digest = self._versions.write_version(payload)
        with self._lock:
            if self._closed:
                self._versions.delete_version(version)
                raise ClosedError("the sender is closed")
            publication = self._written[version] = Publication(version, payload.nbytes, digest)
            # A worker that was lost may have come back, which `_watch` finds out.
            self.roster.expect(self.roster.worker_ids)
        return publication

    def offer(self, publication: Publication, worker_ids: Sequence[int]) -> None:
        """Name the version that each worker is owed."""
        del publication, worker_ids
        with self._lock:
            self._write_record()
            self._remove_old()
            self._changed.notify()

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, which wants what went to all."""
        del worker
        with self._lock:
            # One that had this id may have left its record, which says nothing of the new one.
            self._records.delete(worker_record(worker_id))
            self._served.add(worker_id)
            self._heard[worker_id] = _Heard(Watch(self._options.lost_after))
            self.roster.add(worker_id)
            self._write_record()

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker, which learns it by the record."""
        with self._lock:
            del self._heard[worker_id]
            self.roster.remove(worker_id)
            self._removed_last.append(worker_id)
            self._write_record()

    def close(self) -> None:
        """End the threads, and remove all that is in the store."""
        with self._lock:
            if self._removed:
                return
            self._closed = True
            self.roster.close()
            self._changed.notify()
        self._pulse.end()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSING)
        # First, so that no worker leaves a record after its own was removed.
        self._records.delete(SENDER)
        for worker_id in self._served:
            self._records.delete(worker_record(worker_id))
        for version in tuple(self._written):
            self._versions.delete_version(version)
        self._removed = True

    def _write_record(self) -> None:
        """Write the record, with the version that each worker is owed."""
        with self._lock:
            if self._closed:
                return
            self._beats += 1
            owed = {i: self.roster.wanted(i) for i in self.roster.worker_ids}
            written = [each for each in self._written.values() if each is not None]
            record = {
                "beats": self._beats,
                "wanted": {str(i): each.version if each else 0 for i, each in owed.items()},
                "sealed": {str(each.version): (each.nbytes, each.content) for each in written},
                **self._signature,
            }
            self._records.write(SENDER, record, (*owed, *self._removed_last))

    def _remove_old(self) -> None:
        """Remove the versions that are not needed, and what failed sends have written."""
        written = [each for each in self._written.values() if each is not None]
        needed = {*written[-self._options.keep :], *self.roster.owed()}
        for version, publication in tuple(self._written.items()):
            if publication in needed:
                continue
            try:
                # A worker that is too late to read it finds a newer one.
                self._versions.delete_version(version)
            except Exception as error:
                # Each further one might take as long.
                _log.warning("version %d stays until the next send: %r", version, error)
                return
            del self._written[version]

    def _watch(self) -> None:
        due = 0.0
        while True:
            with self._lock:
                if self._closed:
                    return
                heard, looked_at = dict(self._heard), self.roster.awaited()
            if time.monotonic() >= due:
                due = time.monotonic() + self._options.lost_after / SIGNS
                looked_at = set(heard)
            for worker_id in looked_at:
                self._look(worker_id, heard[worker_id])
            with self._lock:
                # A send may have begun, or all have ended, since the records were looked at.
                if not self._closed:
                    waits = self.roster.awaited()
                    self._changed.wait(
                        self._options.poll if waits else max(0.0, due - time.monotonic())
                    )

    def _look(self, worker_id: int, heard: _Heard) -> None:
        try:
            record = self._records.read(worker_record(worker_id), worker_id)
        except Exception as error:
            _log.warning("worker %d cannot be seen in the store: %r", worker_id, error)
            return
        with self._lock:
            if self._heard.get(worker_id) is not heard or (record is None and heard.owner is None):
                return  # it was removed meanwhile, or has not come yet
            try:
                reason = self._hear(worker_id, heard, record)
            except Exception as error:
                # Whatever a worker has written there costs its own place at most.
                reason = f"has written no record of ours: {error!r:.300}"
            if reason is None:
                self.roster.expect([worker_id])
            else:
                self.roster.lost(worker_id, heard.owner, reason)

    def _hear(self, worker_id: int, heard: _Heard, record: dict[str, Any] | None) -> str | None:
        """Report what a worker's record says; return why it is lost, or None where it is not."""
        if record is None:
            return "its record is gone from the store, or not whole"
        owner, answer = str(record["owner"]), record["answer"]
        if owner != heard.owner:
            heard.owner, heard.answer = owner, None
            self.roster.connected(worker_id, owner)
        if answer is not None and answer != heard.answer:
            self.roster.answered(worker_id, owner, Answer.from_message(answer))
            heard.answer = answer
        who = f"its process {record['process']} on {record['host']}"
        if record["beats"] < 0:
            return f"{who} {record['left']}"
        if not heard.watch.lives((owner, record["beats"])):
            return f"{who} has given no sign of life for {self._options.lost_after:g} s"
        return None


def store_transport(
    context: TransportContext,
    store: Store,
    options: StoreOptions,
    versions: Versions | None = None,
) -> SenderTransport | ReceiverTransport:
    """Either side of a transport that puts weights into a store, for a hook to return.

    A version is put there once, as a safetensors file, for all its workers, which look
    for it, and for signs of life. A scheme of this kind can declare ``broadcast``, ``late_join``
    and ``pull``, and ``cross_process`` or ``cross_host`` where its store is seen from there.

    Args:
        context: what `create_transport` was given.
        store: where the bytes go.
        options: what the user has chosen.
        versions: where the bytes of versions go; None for safetensors files in the same store.

    Raises:
        SenderLostError: a receiver's sender has closed, or its token is another.

    Example:
        >>> import torch
        >>> from sync_core import Receiver, Sender, hookimpl
        >>> class Memory(Store):
        ...     kept = {}
        ...     def put(self, name, data): self.kept[name] = data
        ...     def get(self, name): return self.kept.get(name)
        ...     def delete(self, name): self.kept.pop(name, None)
        >>> class MemoryScheme:
        ...     capabilities = frozenset({"broadcast", "late_join", "pull"})
        ...     @hookimpl
        ...     def create_transport(self, context):
        ...         options = context.parse_options(StoreOptions)
        ...         return store_transport(context, Memory(), options)
        >>> policy, copy = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> with Sender(MemoryScheme(), policy, num_workers=1, poll=0.001) as sender:
        ...     with Receiver(sender.address(0), copy) as receiver:
        ...         pending = sender.send_async()
        ...         receiver.receive(), pending.wait().updated
        (1, (0,))
        >>> Memory.kept
        {}
    """
    if context.side == "receiver":
        return StoreReceiver(context, store, options, versions)
    return StoreSender(context, store, options, versions)
