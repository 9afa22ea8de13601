"""Open a run by its URL and public key: its versions, names, leases and addresses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from sync_core import Address, OptionError, Sender
from sync_core.errors import PayloadError
from sync_plugin_store.errors import StoreError
from sync_plugin_store.format import Head, Manifest, object_name
from sync_plugin_store.keys import SigningKey
from sync_plugin_store.leases import Lease, lease_name
from sync_plugin_store.objects import Patience, open_all
from sync_plugin_store.publisher import RunPublisher
from sync_plugin_store.reader import RunReader
from sync_plugin_store.transport import StoreEndpoint

__all__ = ["Run"]


class Run:
    """Reads and names a run's versions, from its store or from mirrors.

    Args:
        url: a directory, ``s3://bucket/run``, ``https://host/run`` and so on.
        key: the trainer's public key, in hexadecimal; see `Run.key_of`.
        mirrors: URLs of mirrors of the run.
        timeout: how long failed requests are retried, in seconds.

    Raises:
        StoreError: no store answers, or none has a run.
        SignatureError: the run is signed with another key.

    Example:
        >>> import tempfile, torch
        >>> from sync_core import Receiver
        >>> policy, copy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Sender("store", policy, url=folder) as sender:
        ...         for _ in range(3):
        ...             version = sender.send().version
        ...         with Run(folder, Run.key_of(sender)) as run:
        ...             versions = run.versions()
        ...             with Receiver(run.address(version=2), copy) as receiver:
        ...                 received = receiver.receive()
        >>> versions, received
        ((1, 2, 3), 2)
    """

    def __init__(
        self, url: str, key: str, *, mirrors: Sequence[str] = (), timeout: float = 60.0
    ) -> None:
        self._urls = [url, *mirrors]
        self._key = key
        self._timeout = timeout
        self._sources = open_all(self._urls, timeout)
        self._reader = RunReader(self._sources, key, timeout=timeout)
        if self._look() is None:
            self.close()
            raise StoreError(
                f"{url} has no run yet; its trainer makes one with its first "
                f"Sender('store', model, url=…).send()"
            )

    @staticmethod
    def key_of(sender: Sender) -> str:
        """Return the public key of a sender's run, in hexadecimal.

        Args:
            sender: a sender with the scheme ``store``.

        Raises:
            OptionError: the sender has another scheme.
        """
        endpoint = _endpoint_of(sender)
        return endpoint.key

    @property
    def version(self) -> int:
        """The newest version; 0 before the first."""
        return self._head().version

    def versions(self) -> tuple[int, ...]:
        """Return the kept versions, in ascending order."""
        return tuple(sorted(self._head().versions))

    def names(self) -> dict[str, int]:
        """Return the named versions, by name."""
        return dict(self._head().names)

    def manifest(self, version: int) -> Manifest:
        """Return a version's manifest.

        Raises:
            PayloadError: the version is not kept or cannot be read.
        """
        self._head()
        return self._reader.manifest(version)

    def address(
        self,
        *,
        version: int | None = None,
        name: str | None = None,
        poll: float | None = None,
    ) -> Address:
        """Return an address for receivers, which can be pickled or written as JSON.

        Args:
            version: the one version to receive; None for always the newest.
            name: the name of the one version to receive.
            poll: seconds between two looks for a new version; None for 0.005 in a directory, and 1
                elsewhere.

        Raises:
            OptionError: there is no such version or name, or the trainer has layers that are
                objects. With these, pickle the sender's own address instead.
        """
        head = self._head()
        if name is not None:
            if name not in head.names:
                known = ", ".join(sorted(head.names)) or "none"
                raise OptionError(f"{self._urls[0]} has no version named {name!r}; names: {known}")
            version = head.names[name]
        if version is not None and version not in head.versions:
            raise OptionError(
                f"version {version} is not in {self._urls[0]}, which has {sorted(head.versions)}"
            )
        return replace(
            Address.from_json(self._address_text(head)),
            endpoint=StoreEndpoint(
                urls=list(self._urls), key=self._key, run=head.run, version=version or 0
            ),
            timeout=self._timeout,
            options={} if poll is None else {"poll": poll},
        )

    @contextmanager
    def lease(self, version: int, seconds: float = 3600.0) -> Iterator[None]:
        """Keep a version while the block runs; this process must be able to write to the store.

        Args:
            version: the version.
            seconds: how long the version is kept if this process dies in the block.

        Raises:
            StoreError: the store cannot be written.
        """
        name, place, run = lease_name(), self._sources[0], self._head().run
        place.put(name, Lease(version, seconds, run).to_bytes())
        try:
            patience = Patience(self._timeout, self._reader.stopped)
            # The trainer may have listed the leases before this one was written.
            while version in (head := self._head()).leaving and patience.pause():
                pass
            if version not in head.versions or version in head.leaving:
                raise StoreError(
                    f"version {version} is not in {self._urls[0]}, which has "
                    f"{sorted(head.versions.keys() - {*head.leaving})}"
                )
            yield
        finally:
            place.delete(name)

    def set_name(self, name: str, version: int, key_file: str) -> None:
        """Name a version, which keeps it; a name that exists already moves.

        The trainer may publish versions at the same time, in another process.

        Args:
            name: letters, digits and ``._-``, and not only digits.
            version: the version.
            key_file: the file that the trainer gave as ``key=``.

        Raises:
            StoreError: the version is not kept, or the name is not valid.
        """
        publisher = RunPublisher(self._sources[0], SigningKey.of_file(Path(key_file)), streams=1)
        publisher.name(version, name)

    def forget_name(self, name: str, key_file: str) -> None:
        """Remove a name; see `set_name`."""
        publisher = RunPublisher(self._sources[0], SigningKey.of_file(Path(key_file)), streams=1)
        publisher.forget_name(name)

    def close(self) -> None:
        """End the threads."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _head(self) -> Head:
        head = self._look()
        assert head is not None
        return head

    def _look(self) -> Head | None:
        head = None
        for _ in self._sources:
            head = self._reader.look()
        return head

    def _address_text(self, head: Head) -> bytes:
        if head.address is None:
            raise OptionError(
                f"{self._urls[0]} has no address for its readers, as its trainer has layers or a "
                "scheme that are objects; give readers a pickle of sender.address()"
            )
        found = self._reader.read_record(object_name(head.address), head.address)
        if found is None:
            raise PayloadError(f"the address in {self._urls[0]} is gone or has other bytes")
        return found


def _endpoint_of(sender: Sender) -> StoreEndpoint:
    ids = sender.all_worker_ids()
    endpoint: Any = sender.address(ids[0] if ids else None).endpoint
    if not isinstance(endpoint, StoreEndpoint):
        raise OptionError(f"{sender!r} has no run; type Sender('store', model, url=…)")
    return endpoint
