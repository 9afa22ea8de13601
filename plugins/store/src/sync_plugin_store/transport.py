"""The transports of both sides of the scheme ``store``."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sync_core import (
    ClosedError,
    Delivery,
    OptionError,
    Payload,
    SenderTransport,
)
from sync_core.errors import PayloadError
from sync_core.transports import Block
from sync_core.wrapping import WrappingSender
from sync_plugin_std.stores import Store, Versions
from sync_plugin_store.errors import StoreError
from sync_plugin_store.folders import OwnFolder
from sync_plugin_store.objects import Objects
from sync_plugin_store.publisher import RunPublisher
from sync_plugin_store.reader import Fetch, GoneError, RunReader, notify

if TYPE_CHECKING:
    from sync_plugin_store.increments import IncrementWriter
    from sync_plugin_store.parts import PartFetch, Parts

__all__ = [
    "AnsweringSender",
    "PartsEndpoint",
    "PublishedVersions",
    "Publishing",
    "PublishingSender",
    "ReadVersions",
    "RecordStore",
    "StoreEndpoint",
]

_log = logging.getLogger("sync_core")


@dataclass(frozen=True)
class StoreEndpoint:
    """The endpoint of a receiver.

    Args:
        urls: the URLs of the run: the trainer's, or those of mirrors.
        key: the trainer's public key, in hexadecimal.
        run: the run's id; "" to accept any run.
        version: the one version to receive; 0 for always the newest.
        answers: the URL to which readers write answers; "" for none.
    """

    urls: list[str] = field(default_factory=list)
    key: str = ""
    run: str = ""
    version: int = 0
    answers: str = ""


@dataclass(frozen=True)
class PartsEndpoint(StoreEndpoint):
    """The endpoint of a receiver that reads parts of each version.

    Args:
        parts: the parts that its model needs.
    """

    parts: Parts | None = None


class Publishing:
    """Publishes the versions of a run, and closes the run.

    Args:
        publisher: writes the run.
        endpoint: the readers' endpoint.
        make_address: a function that returns the address to publish with the run, or None.
        folder: a temporary directory to remove with the sender, if any.
        increments: makes increments; None to publish only whole versions.
    """

    def __init__(
        self,
        publisher: RunPublisher,
        endpoint: StoreEndpoint,
        make_address: Callable[[], bytes | None],
        folder: OwnFolder | None,
        increments: IncrementWriter | None = None,
    ) -> None:
        self.publisher = publisher
        self.endpoint = endpoint
        self._make_address = make_address
        self._folder = folder
        self._increments = increments
        self._address: bytes | None = None
        self._closed = False

    def publish(self, payload: Payload) -> str:
        """Write a version; return the digest of its manifest."""
        if self._address is None:
            self._address = self._make_address()
        if self._increments is None:
            return self._write(payload)
        return self._increments.publish(payload, self._write)

    def _write(self, payload: Payload, base_digest: str = "") -> str:
        return self.publisher.publish(
            payload,
            base=payload.base,
            base_digest=base_digest,
            anchor=self._increments is not None and not payload.base,
            address=self._address,
        )

    def close(self) -> None:
        """Mark the run as closed."""
        if self._closed:
            return
        self._closed = True
        self.publisher.close()
        if self._folder is not None:
            self._folder.close()


class PublishingSender(SenderTransport):
    """Publishes versions for readers that it does not know.

    Args:
        publishing: publishes the versions.
    """

    def __init__(self, publishing: Publishing) -> None:
        self._publishing = publishing

    def address(self, worker_id: int) -> StoreEndpoint:
        """Return the endpoint of any reader."""
        del worker_id
        return self._publishing.endpoint

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> Mapping[int, Delivery]:
        """Publish a version; readers can read it when this returns."""
        del worker_ids
        self._publishing.publish(payload)
        return {}

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Raise `OptionError`: readers that do not answer cannot be added."""
        del worker_id, worker
        raise OptionError(
            "this sender publishes for readers that it does not know; give each of them "
            "sender.address(), or let readers answer: Sender('store', …, num_workers=0, "
            "answers=URL)"
        )

    def remove_worker(self, worker_id: int) -> None:
        """Do nothing: there are no workers."""

    def close(self) -> None:
        """Mark the run as closed."""
        self._publishing.close()


class AnsweringSender(WrappingSender):
    """A sender whose workers answer with records in a store.

    Args:
        transport: writes the records and reads the answers.
        publishing: publishes the versions.
    """

    def __init__(self, transport: SenderTransport, publishing: Publishing) -> None:
        super().__init__(transport)
        self._publishing = publishing

    def address(self, worker_id: int) -> StoreEndpoint:
        """Return the endpoint of a reader."""
        del worker_id
        return self._publishing.endpoint

    def close(self) -> None:
        """Remove the records, and mark the run as closed."""
        self.transport.close()
        self._publishing.close()


class PublishedVersions(Versions):
    """Publishes versions for readers that answer.

    Args:
        publishing: publishes the versions.
    """

    def __init__(self, publishing: Publishing) -> None:
        self._publishing = publishing

    def write_version(self, payload: Payload) -> str:
        """Publish a version.

        Raises:
            OSError: the store failed; the report has the error for each worker.
        """
        try:
            return self._publishing.publish(payload)
        except StoreError as error:
            raise OSError(str(error)) from error

    def read_version(self, version: int, nbytes: int, digest: str) -> Block | None:
        """Return None: the trainer reads no versions."""
        del version, nbytes, digest
        return None

    def delete_version(self, version: int) -> None:
        """Do nothing: `RunPublisher` removes versions."""


class ReadVersions(Versions):
    """Reads the versions of a run, for a reader that answers.

    Args:
        reader: the reader of the run.
        timeout: the longest time for reading a version, in seconds.
        parts: the parts to read of each version; None for whole versions.
    """

    def __init__(self, reader: RunReader, timeout: float, parts: Parts | None = None) -> None:
        self._reader = reader
        self._timeout = timeout
        self._parts = parts

    def write_version(self, payload: Payload) -> str:
        """Raise `ClosedError`: a reader writes no versions."""
        raise ClosedError(f"a reader cannot write version {payload.version}")

    def read_version(self, version: int, nbytes: int, digest: str) -> Block | None:
        """Read a version; return None if a newer one has replaced it."""
        head = self._reader.look()
        if head is None or head.versions.get(version) != digest:
            return None
        try:
            manifest = self._reader.manifest(version)
            if manifest.nbytes != nbytes:
                raise PayloadError(
                    f"version {version} has {manifest.nbytes} bytes in its manifest, and {nbytes} "
                    "in the sender's record"
                )
            self._reader.check_size([manifest])
            arrived = threading.Condition()
            fetch: Fetch | PartFetch
            if self._parts is None:
                fetch = self._reader.fetch(manifest, lambda: notify(arrived))
            else:
                fetch = self._reader.fetch_parts(manifest, lambda: notify(arrived), self._parts)
            with arrived:
                if not arrived.wait_for(lambda: fetch.ended, self._timeout):
                    raise PayloadError(
                        f"version {version} did not arrive within {self._timeout:g} s; give a "
                        "longer timeout=, or send increments"
                    )
            return fetch.result()
        except GoneError:
            return None

    def delete_version(self, version: int) -> None:
        """Do nothing: the trainer removes versions."""

    def close(self) -> None:
        """Cancel all reads."""
        self._reader.close()


class RecordStore(Store):
    """The records of readers that answer, as small objects.

    Args:
        objects: the store for the records.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def put(self, name: str, data: bytes) -> None:
        """Keep a record."""
        self._objects.put(f"answers/{name}", data)

    def get(self, name: str) -> bytes | None:
        """Return a record."""
        found = self._objects.look(f"answers/{name}")
        return None if found is None else found.data

    def delete(self, name: str) -> None:
        """Remove a record."""
        self._objects.delete(f"answers/{name}")
