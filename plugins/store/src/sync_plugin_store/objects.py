"""Named objects in a directory, in an object store, or behind a web server."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

from sync_core import OptionError
from sync_core.errors import PayloadError
from sync_core.transports import uninterrupted
from sync_plugin_store.errors import ConflictError, ReplacedError, StoreError

__all__ = [
    "LONGEST_PAUSE",
    "LONGEST_RECORD",
    "MAX_HEADER_BYTES",
    "PIECE",
    "Found",
    "ListedObject",
    "NoRangesError",
    "Objects",
    "Patience",
    "Validator",
    "is_temporary",
    "open_all",
    "open_objects",
]

#: The longest record (HEAD, manifests) that is accepted, in bytes.
LONGEST_RECORD = 1 << 24
#: The longest header that is accepted, as in the safetensors library, in bytes.
MAX_HEADER_BYTES = 100_000_000
#: The size of network reads, in bytes; a broken transfer loses at most one.
PIECE = 1 << 20
_WEB = ("http://", "https://")
# The first pause before a retry, in seconds; it doubles up to `LONGEST_PAUSE`.
_FIRST_PAUSE = 0.05
#: The longest pause before a retry, in seconds.
LONGEST_PAUSE = 2.0
# The prefix of the names of unfinished files; a random part follows.
_TEMPORARY = ".sync-store-"
_IS_TEMPORARY = re.compile(r"(?:[a-z]+/)?\.sync-store-[0-9a-f]{16}")
# A loss of power may delete these objects, since it also ends their users.
_VOLATILE = ("answers/", "parts/")


class NoRangesError(StoreError):
    """A web server serves only whole objects."""

    @classmethod
    def of(cls, url: str) -> Self:
        """Return the error for a server."""
        return cls(
            f"{url} brings whole objects alone, and readers of a shard ask for parts of them; "
            "serve the run by: sync-core serve DIRECTORY, or by another server with ranges, such "
            "as nginx, or give Receiver a whole model"
        )


def is_temporary(name: str) -> bool:
    """Return whether a name is that of an unfinished file of `Directory.put`.

    Example:
        >>> is_temporary("objects/.sync-store-0123456789abcdef"), is_temporary("objects/.half")
        (True, False)
    """
    return bool(_IS_TEMPORARY.fullmatch(name))


@dataclass(frozen=True, slots=True)
class Found:
    """A small object in its current state.

    Args:
        data: its bytes.
        tag: names this state, for `Objects.look` and `Objects.swap`.
    """

    data: bytes
    tag: str


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object in a listing.

    Args:
        name: its name.
        nbytes: its size.
        modified: when it was written, in seconds since 1970, by the clock of the store.
    """

    name: str
    nbytes: int
    modified: float


class Validator:
    """Checks that several reads find an object in the same state.

    The first read sets the state.
    """

    def __init__(self) -> None:
        self._tag: object = None
        #: Whether the tag is a time in seconds, so that the next state may have the same one.
        self.coarse = False

    def check(self, tag: object, name: str, url: str) -> None:
        """Raise `ReplacedError` unless the object is in the state of the first read."""
        if self._tag is None:
            self._tag = tag
        elif tag != self._tag:
            raise ReplacedError(
                f"{name} in {url} was replaced while it was read; try again when it is whole"
            )


class Patience:
    """Limits the time of retries, and makes the pauses between them.

    Args:
        seconds: how long to retry, from now.
        stopped: ends the retries early when set.

    Example:
        >>> Patience(0.0, threading.Event()).pause()
        False
    """

    def __init__(self, seconds: float, stopped: threading.Event) -> None:
        self._until = time.monotonic() + seconds
        self._stopped = stopped
        self._next = _FIRST_PAUSE

    def pause(self) -> bool:
        """Wait before the next try, longer each time; return False when the time is up."""
        seconds, self._next = self._next, min(2 * self._next, LONGEST_PAUSE)
        left = self._until - time.monotonic()
        return left > 0 and not self._stopped.wait(min(seconds, left))


class Objects(ABC):
    """A store of bytes under names; the trainer and each reader open one.

    Several threads may call the methods. They retry, and raise `StoreError` if the store fails
    until the timeout.

    Args:
        url: where it is.
    """

    #: Whether `look` takes less than a millisecond and costs no money.
    near = False

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def look(self, name: str, tag: str | None = None) -> Found | None:
        """Return a small object, if it has changed.

        Args:
            name: its name.
            tag: the state that the caller has already.

        Returns:
            None if the object does not exist or still has that state.
        """

    @abstractmethod
    def read(
        self,
        name: str,
        start: int,
        memory: memoryview,
        patience: Patience,
        *,
        whole: bool,
        validator: Validator | None = None,
    ) -> bool:
        """Read a range of an object's bytes.

        Args:
            name: its name.
            start: the first byte.
            memory: the memory to read into; as many bytes are read as it has.
            patience: how long a broken transfer is resumed.
            whole: whether this is the whole object, which servers without range requests can serve.
            validator: checks that several reads find the object in one state.

        Returns:
            Whether the object exists.

        Raises:
            PayloadError: the object is too short.
            ReplacedError: the object was replaced after the first read with the validator.
        """

    @abstractmethod
    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write an object that never changes; readers see it complete or not at all."""

    @abstractmethod
    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        """Replace a small object, unless another process has replaced it first.

        Args:
            name: its name.
            data: its new bytes.
            tag: the state that the caller has seen; None if the object must not exist.

        Returns:
            The tag of its new state.

        Raises:
            ConflictError: the object has another state.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object, if it exists."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[ListedObject]:
        """Return the objects in a folder, such as ``"objects/"``."""

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """Cancel all pending requests."""

    @abstractmethod
    def walk(self) -> Iterator[str]:
        """Iterate over the names of all objects, at any depth."""

    def check_record(self, name: str, nbytes: int) -> None:
        """Raise `StoreError` if a record is too long."""
        if nbytes > LONGEST_RECORD:
            raise StoreError(f"{name} in {self.url} has more than {LONGEST_RECORD} bytes")


def open_all(urls: Sequence[str], timeout: float) -> list[Objects]:
    """Open several stores with the same objects; see `open_objects`.

    If one fails, enough of the timeout is left to ask the others. Web servers may redirect to each
    other.
    """
    web = [url for url in urls if url.startswith(_WEB)]
    each = timeout / (2 * len(urls)) if urls[1:] else timeout
    return [open_objects(url, each, redirects=web) for url in urls]


def open_objects(
    url: str, timeout: float, *, redirects: Sequence[str] = (), durable: bool = True
) -> Objects:
    """Open the store at a URL.

    Args:
        url: a directory, ``file:///directory``, ``s3://bucket/run``, ``gs://…``, ``az://…``,
            ``http://host/run`` or ``https://…``.
        timeout: how long failed requests are retried, in seconds.
        redirects: URLs of other servers to which a web server may redirect.
        durable: whether files written to a directory must outlast a loss of power.

    Raises:
        OptionError: the URL is not valid.

    Example:
        >>> open_objects("ftp://host/run", 5.0)
        Traceback (most recent call last):
        ...
        sync_core.errors.OptionError: url must be a directory, or begin with file://, s3://, ...
    """
    scheme = urlsplit(url).scheme
    if scheme in ("", "file") and "\0" not in unquote(url):
        path = Path(unquote(urlsplit(url).path) if scheme else url)
        return Directory(path, url, timeout, durable=durable)
    if url.startswith(_WEB):
        from sync_plugin_store.web_objects import WebObjects

        return WebObjects(url, timeout, redirects)
    if scheme in ("s3", "s3a", "gs", "az", "abfs", "abfss"):
        from sync_plugin_store.remote_objects import RemoteObjects

        return RemoteObjects(url, timeout)
    raise OptionError(
        "url must be a directory, or begin with file://, s3://, gs://, az://, http:// or "
        f"https://, got {url!r}"
    )


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading; do not block on a pipe in its place.

    Raises:
        OSError: there is no such file, or the path is not a regular file.
    """
    return _opened(str(path), lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def open_below(directory: Path, name: str) -> BufferedReader:
    """Open a file below a directory for reading, as `open_file` does, without following links.

    Raises:
        OSError: there is no such file, or the path is not a regular file, such as a link.
    """
    with _folder_of(directory, name) as (folder, last):
        extra = os.O_NONBLOCK | os.O_NOFOLLOW
        return _opened(last, lambda file, flags: os.open(file, flags | extra, dir_fd=folder))


def _opened(name: str, opener: Callable[[str, int], int]) -> BufferedReader:
    file = open(name, "rb", opener=opener)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is not a file", name)
    return file


def _state_of(file: BufferedReader) -> tuple[int, ...]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@contextmanager
def _folder_of(directory: Path, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Open the folder of a name below a directory, without following links.

    Args:
        directory: the directory, which may itself be a link.
        name: the name of a file in a folder there.
        make: whether to make missing folders.

    Yields:
        The folder's descriptor, and the last part of the name.

    Raises:
        OSError: the folder does not exist or is a link.
    """
    *folders, last = name.split("/")
    flags = os.O_RDONLY | os.O_DIRECTORY
    descriptor = os.open(directory, flags)
    try:
        for folder in folders:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=descriptor)
            outer = descriptor
            descriptor = os.open(folder, flags | os.O_NOFOLLOW, dir_fd=outer)
            os.close(outer)
        yield descriptor, last
    finally:
        os.close(descriptor)


class Directory(Objects):
    """Objects as files in a directory, which other hosts may see by NFS or a web server.

    A rename makes each object appear. A replacement locks the directory's ``.lock`` file. Links
    below the directory are never followed.

    Args:
        path: the directory; the first write makes it.
        url: the URL that the user gave.
        timeout: how long to wait for the lock, in seconds.
        durable: whether written files must outlast a loss of power.
    """

    near = True

    def __init__(
        self, path: Path, url: str, timeout: float = 60.0, *, durable: bool = True
    ) -> None:
        super().__init__(url)
        self.path = path.absolute()
        self._timeout = timeout
        self._durable = durable

    def look(self, name: str, tag: str | None = None) -> Found | None:
        try:
            with uninterrupted(), open_file(self.path / name) as file:
                data = file.read(LONGEST_RECORD + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"cannot read {name} in {self.url}: {error}") from error
        self.check_record(name, len(data))
        found = hashlib.sha256(data).hexdigest()
        return None if found == tag else Found(data, found)

    def read(
        self,
        name: str,
        start: int,
        memory: memoryview,
        patience: Patience,
        *,
        whole: bool,
        validator: Validator | None = None,
    ) -> bool:
        del patience, whole
        try:
            with open_file(self.path / name) as file:
                # Another program may write the file in place.
                states = [_state_of(file)]
                file.seek(start)
                while memory and (count := file.readinto(memory)):
                    memory = memory[count:]
                states.append(_state_of(file))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise StoreError(f"cannot read {name} in {self.url}: {error}") from error
        if validator is not None:
            for state in states:
                validator.check(state, name, self.url)
        if memory:
            raise PayloadError(f"{name} in {self.url} ends {len(memory)} bytes too early")
        return True

    def put(self, name: str, data: bytes | memoryview) -> None:
        part = f"{_TEMPORARY}{secrets.token_hex(8)}"
        durable = self._durable and not name.startswith(_VOLATILE)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with (
                _folder_of(self.path, name, make=True) as (folder, last),
                ExitStack() as failed,
            ):
                # After a full disk or Ctrl-C, no partial file may stay.
                failed.callback(_unlink, part, folder)
                with uninterrupted():
                    file = failed.enter_context(
                        open(
                            part,
                            "xb",
                            buffering=0,
                            opener=lambda file, flags: os.open(file, flags, 0o666, dir_fd=folder),
                        )
                    )
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
                if durable:
                    os.fsync(file.fileno())
                # Before the rename: over NFS, others see the bytes only once the file is closed.
                file.close()
                os.replace(part, last, src_dir_fd=folder, dst_dir_fd=folder)
                if durable:
                    os.fsync(folder)
        except OSError as error:
            raise StoreError(
                f"cannot write {name} in {self.url}: {error}; {self._advice(name)}"
            ) from error

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        with self._locked():
            standing = self.look(name)
            if (None if standing is None else standing.tag) != tag:
                raise ConflictError(f"{name} in {self.url} was replaced meanwhile")
            self.put(name, data)
        return hashlib.sha256(data).hexdigest()

    def delete(self, name: str) -> None:
        with suppress(OSError), _folder_of(self.path, name) as (folder, last):
            os.unlink(last, dir_fd=folder)

    def list(self, prefix: str) -> Iterator[ListedObject]:
        with (
            suppress(FileNotFoundError, NotADirectoryError),
            _folder_of(self.path, prefix) as (folder, _),
            os.scandir(folder) as entries,
        ):
            for entry in entries:
                with suppress(OSError):  # it was removed meanwhile
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        yield ListedObject(prefix + entry.name, found.st_size, found.st_mtime)

    def walk(self) -> Iterator[str]:
        for folder, folders, files in os.walk(self.path):
            links = (name for name in folders if (Path(folder) / name).is_symlink())
            for name in (*files, *links):
                yield str((Path(folder) / name).relative_to(self.path))

    def _advice(self, name: str) -> str:
        folder = self.path / name.rpartition("/")[0]
        if folder != self.path and folder.is_symlink():
            return f"{folder} is a link, which is not followed: put a directory in its place"
        return "make room there, or give another url"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            path = str(self.path / ".lock")
            # A descriptor, since Ctrl-C within `open` would leave a file open.
            lock = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise StoreError(
                f"cannot write in {self.url}: {error}; make the directory writable, or give "
                "another url"
            ) from error
        try:
            patience = Patience(self._timeout, threading.Event())
            while not _try_lock(lock):
                if not patience.pause():
                    raise StoreError(
                        f"another process has held {path} for {self._timeout:g} s; end it, or "
                        "give another url"
                    )
            yield
        finally:
            os.close(lock)


def _unlink(name: str, folder: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _try_lock(descriptor: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
