"""The interface of stores, and the records in one."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sync_core import OptionError, Payload, TransportContext
from sync_core.errors import HookResultError, PayloadError
from sync_core.transports import Block
from sync_plugin_std.stores.parts import parts_of

#: The longest record, in bytes; a worker's error and the names of 100,000 workers have room.
LONGEST_RECORD = 1 << 24
#: How long the end of a thread is waited for, which may be in a call of the store, in seconds.
CLOSING = 10.0


class NotAFileError(OSError):
    """The path to read is not a regular file: a link, a pipe, a folder or a device."""


class Store(ABC):
    """Keeps bytes under names: a folder, a bucket of an object store, Redis.

    Both sides make one of their own, which has to lead to the same bytes. Methods are called by
    several threads and processes at once, must not wait for ever, and may raise whatever they
    like. Names have two parts, as in ``"sync-0123456789abcdef/sender.json"``; the first is the
    same for all that belongs to one sender, and for no other.

    Example:
        >>> class Memory(Store):
        ...     def __init__(self): self.kept = {}
        ...     def put(self, name, data): self.kept[name] = data
        ...     def get(self, name): return self.kept.get(name)
        ...     def delete(self, name): self.kept.pop(name, None)
        >>> memory = Memory()
        >>> memory.put("sync-0123456789abcdef/sender.json", b"{}")
        >>> memory.get("sync-0123456789abcdef/sender.json")
        b'{}'
    """

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Keep bytes under a name, in place of those that may be there.

        From its return on, `get` gives these bytes everywhere; until then, all of the old ones,
        or of these.
        """

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """All the bytes that were put last under a name; None where there are none."""

    def size(self, name: str) -> int | None:
        """Return how many bytes are kept under a name; None where none are, or it is not known.

        Asked before `get`, so that a peer which puts more there than was agreed costs no memory. A
        store that can tell a size at less than the cost of the bytes overrides this.
        """
        del name
        return None

    def put_parts(self, name: str, parts: Iterable[memoryview]) -> None:
        """Keep bytes that are given in parts, which are good until this returns.

        Versions are put so. A store that can write the parts one after the other overrides this.
        """
        self.put(name, b"".join(parts))

    def get_into(self, name: str, allocate: Callable[[int], memoryview]) -> bool:
        """Read all the bytes of a name into memory; return whether there are any.

        Versions are read so. A store that can read into memory overrides this.

        Args:
            name: the name.
            allocate: makes the memory for a number of bytes; called once at most.
        """
        size = self.size(name)
        memory = None if size is None else allocate(size)
        data = self.get(name)
        if data is None:
            return False
        check_bytes(self, name, data)
        if memory is None:
            memory = allocate(len(data))
        if len(data) != len(memory):
            raise PayloadError(f"{name} had {size} bytes, and then {len(data)}")
        memory[:] = data
        return True

    @abstractmethod
    def delete(self, name: str) -> None:
        """Keep nothing under a name any more. It may be that nothing is there."""


@dataclass(frozen=True)
class StoreOptions:
    """Options that every scheme over a store has; a subclass adds further ones.

    A subclass may declare other defaults, such as a longer ``poll`` where each look costs.

    Args:
        poll: seconds between two reads of the store while something in it is waited for.
        lost_after: seconds without a sign of life after which a peer counts as dead; a tenth of
            that is between two signs.
        keep: how many versions are left in the store, for other tools and slow workers.

    Raises:
        OptionError: one of them makes no sense.

    Example:
        >>> @dataclass(frozen=True)
        ... class BucketOptions(StoreOptions):
        ...     bucket: str = "weights"
        ...     poll: float = 0.5
        >>> BucketOptions(lost_after=30.0)
        BucketOptions(poll=0.5, lost_after=30.0, keep=2, bucket='weights')
    """

    poll: float = 0.005
    lost_after: float = 5.0
    keep: int = 2

    def __post_init__(self) -> None:
        if not all(
            0 < seconds <= threading.TIMEOUT_MAX for seconds in (self.poll, self.lost_after)
        ):
            raise OptionError(
                f"poll={self.poll} and lost_after={self.lost_after} must be finite numbers of "
                "seconds above 0"
            )
        if self.keep < 1:
            raise OptionError(f"keep={self.keep} leaves no version; it is 1 or more")


def check_bytes(store: Store, name: str, data: object) -> None:
    """Raise `HookResultError` where a store has returned something else than bytes."""
    if not isinstance(data, bytes):
        raise HookResultError(
            f"{type(store).__name__}.get({name!r}) returned a {type(data).__name__}, not bytes or "
            "None"
        )


def machine() -> str:
    """Return the name of what process ids belong to: a host since its start, and a container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


#: The record of the sender: the version that each worker should have.
SENDER = "sender.json"


def worker_record(worker_id: int) -> str:
    """The record of a worker: its identity and its last answer."""
    return f"worker-{worker_id}.json"


class Versions(ABC):
    """Reads and writes versions, for a scheme with its own form of them.

    Both sides make one. Methods are called by one thread at a time.
    """

    @abstractmethod
    def write_version(self, payload: Payload) -> str:
        """Write a version, whose tensors are read when this returns.

        Returns:
            A digest of all its bytes, which readers are given.
        """

    @abstractmethod
    def read_version(self, version: int, nbytes: int, digest: str) -> Block | None:
        """Return a block with the bytes of a version; None where it has been removed.

        Args:
            version: the version.
            nbytes: its size.
            digest: what `write_version` returned.

        Raises:
            PayloadError: other bytes are there.
        """

    @abstractmethod
    def delete_version(self, version: int) -> None:
        """Remove a version that no worker of the sender needs."""


class Records(Versions):
    """Reads and writes what belongs to one sender.

    A record is a line with its seals and one of JSON. A seal is made with the token of one worker:
    the sender's record has one for each worker, as none may write what another believes; a
    worker's record has its own. Versions are plain safetensors, for other tools; which of them
    counts, a record says.

    Args:
        store: where it stands.
        context: of this side; its tokens are not written there.
    """

    def __init__(self, store: Store, context: TransportContext) -> None:
        self._store = store
        self._context = context
        self._folder = f"sync-{_mac(context.token, b'folder')[:16]}"
        self._model = "".join(c if c.isalnum() else "-" for c in context.model_id)

    def read(self, name: str, worker_id: int | None = None) -> dict[str, Any] | None:
        """The record of a name; None where there is none that was sealed for a worker.

        Args:
            name: the name.
            worker_id: the worker; a receiver's own by default.
        """
        data = self._get(name)
        if data is None:
            return None
        seals, _, text = data.partition(b"\n")
        own = self._seal(name, text, worker_id)
        start = (b" " + seals).find(b" " + own.partition(b":")[0] + b":")
        if not hmac.compare_digest(seals[start : start + len(own)], own):
            return None
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return record if isinstance(record, dict) else None

    def write(
        self, name: str, record: dict[str, Any], worker_ids: Iterable[int | None] = (None,)
    ) -> None:
        """Put a record in place of the one that is there.

        Args:
            name: the name.
            record: what it says.
            worker_ids: the workers for which it is sealed; a receiver's own by default.
        """
        text = json.dumps(record).encode()
        seals = b" ".join(self._seal(name, text, worker_id) for worker_id in worker_ids)
        self._store.put(self._path(name), seals + b"\n" + text)

    def delete(self, name: str) -> None:
        """Remove a record."""
        self._store.delete(self._path(name))

    def read_version(self, version: int, nbytes: int, digest: str) -> Block | None:
        blocks: list[Block] = []

        def allocate(found: int) -> memoryview:
            if found != nbytes:
                raise PayloadError(f"version {version} has {nbytes} bytes, and {found} are there")
            blocks.append(Block.allocate(nbytes))
            return blocks[-1].memory.numpy().data

        if not self._store.get_into(self._path(self._version(version)), allocate):
            return None
        if hashlib.sha256(blocks[-1].memory.numpy().data).hexdigest() != digest:
            raise PayloadError(
                f"the bytes of version {version} are not those that the sender has put there"
            )
        return blocks[-1]

    def write_version(self, payload: Payload) -> str:
        """Put the bytes of a version there, and return their SHA-256."""
        digest = hashlib.sha256()

        def summed() -> Iterator[memoryview]:
            for part in parts_of(payload):
                digest.update(part)
                yield part

        self._store.put_parts(self._path(self._version(payload.version)), summed())
        return digest.hexdigest()

    def delete_version(self, version: int) -> None:
        self.delete(self._version(version))

    def _get(self, name: str) -> bytes | None:
        if (self._store.size(self._path(name)) or 0) > LONGEST_RECORD:
            return None
        data = self._store.get(self._path(name))
        if data is not None:
            check_bytes(self._store, self._path(name), data)
        return data

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _version(self, version: int) -> str:
        return f"{self._model}-{version:08}.safetensors"

    def _seal(self, name: str, text: bytes, worker_id: int | None) -> bytes:
        # Of the digest, as the text grows with the number of workers.
        sealed = name.encode() + b"\0" + hashlib.sha256(text).digest()
        worker_id = self._context.worker_id if worker_id is None else worker_id
        return f"{worker_id}:{_mac(self._context.worker_token(worker_id), sealed)}".encode()


def _mac(token: str, data: bytes) -> str:
    return hmac.new(token.encode(), data, hashlib.sha256).hexdigest()


_log = logging.getLogger("sync_core")
#: How many signs there are in the time after which a peer counts as dead.
SIGNS = 10


class Pulse:
    """Calls a function again and again, in a thread.

    Args:
        beat: gives a sign of life.
        seconds: between two calls.
    """

    def __init__(self, beat: Callable[[], object], seconds: float) -> None:
        self._beat = beat
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sync-store-pulse", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop. Ending again is allowed."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSING)

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                self._beat()
            except Exception as error:
                _log.warning("a sign of life failed, and is tried again: %r", error)


class Watch:
    """Tells by the signs of a peer whether it lives, by this process's clock alone.

    Args:
        lost_after: seconds without a sign after which it does not.
    """

    def __init__(self, lost_after: float) -> None:
        self._lost_after = lost_after
        self._last: object = None
        self._since = self._looked = time.monotonic()

    def lives(self, sign: object) -> bool:
        """Return whether it lives.

        Args:
            sign: the newest; each is another than the one before.
        """
        now = time.monotonic()
        # A reader that has paused cannot know for how long no sign of life came.
        if sign != self._last or now - self._looked > self._lost_after / 2:
            self._last, self._since = sign, now
        self._looked = now
        return now - self._since <= self._lost_after
