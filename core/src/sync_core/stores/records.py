"""What stands in a store for one sender: its versions, and records that the token seals."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

from sync_core.errors import HookResultError
from sync_core.stores.store import Store

#: The record of the sender: which version each worker is to have.
SENDER = "sender.json"


def worker_record(worker_id: int) -> str:
    """The record of a worker: who it is, and what it has answered last."""
    return f"worker-{worker_id}.json"


class Records:
    """Reads and writes what belongs to one sender.

    A record is a line with its seal and one of JSON. Versions are plain safetensors, for other
    tools; which of them counts, a record says.

    Args:
        store: where it stands.
        token: the sender's secret; it is not written there.
        model_id: the model's name, which versions are named after.
    """

    def __init__(self, store: Store, token: str, model_id: str) -> None:
        self._store = store
        self._token = token.encode()
        self._folder = f"sync-{self._digest(b'folder')[:16]}"
        self._model = "".join(c if c.isalnum() else "-" for c in model_id)

    def read(self, name: str) -> dict[str, Any] | None:
        """The record of a name; None where there is none that was written with the token."""
        data = self._get(name)
        if data is None:
            return None
        seal, _, text = data.partition(b"\n")
        if not hmac.compare_digest(seal, self._seal(name, text)):
            return None
        record: dict[str, Any] = json.loads(text)
        return record

    def write(self, name: str, record: dict[str, Any]) -> None:
        """Put a record in the place of the one that is there."""
        text = json.dumps(record).encode()
        self._store.put(self._path(name), self._seal(name, text) + b"\n" + text)

    def delete(self, name: str) -> None:
        """Remove a record."""
        self._store.delete(self._path(name))

    def read_version(self, version: int) -> bytes | None:
        """The bytes of a version; None where it has been removed."""
        return self._get(self._version(version))

    def write_version(self, version: int, data: bytes) -> None:
        """Put the bytes of a version there."""
        self._store.put(self._path(self._version(version)), data)

    def delete_version(self, version: int) -> None:
        """Remove a version."""
        self.delete(self._version(version))

    def _get(self, name: str) -> bytes | None:
        data: object = self._store.get(self._path(name))
        if data is not None and not isinstance(data, bytes):
            raise HookResultError(
                f"{type(self._store).__name__}.get({self._path(name)!r}) returned a "
                f"{type(data).__name__}, not bytes or None"
            )
        return data

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _version(self, version: int) -> str:
        return f"{self._model}-{version:08}.safetensors"

    def _seal(self, name: str, text: bytes) -> bytes:
        return self._digest(name.encode() + b"\0" + text).encode()

    def _digest(self, data: bytes) -> str:
        return hmac.new(self._token, data, hashlib.sha256).hexdigest()
