"""A receiver's side: looks into the directory for a version that it has not seen."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from pathlib import Path

from sync_core import Answer, Payload, ReceiverTransport, SenderLostError, TransportContext
from sync_plugin_file.files import PAUSE, Pulse, Watch, read_json, write_json


class FileReceiver(ReceiverTransport):
    """Reads whole files, so that a newer version may appear meanwhile.

    Args:
        context: what the core knows.
        lost_after: seconds without a sign of life after which the sender counts as dead.
    """

    def __init__(self, context: TransportContext, lost_after: float) -> None:
        self._directory = Path(context.endpoint)
        self._worker_id = context.worker_id
        self._seen = 0
        self._sender = Watch(self._directory / "sender.json", lost_after)
        proof = hashlib.sha256(context.token.encode()).hexdigest()
        if self._sender.message().get("owner") != proof:
            raise SenderLostError("the sender is gone, or the address is not one of its own")
        self._path = self._directory / f"worker-{self._worker_id}.json"
        self._owner = secrets.token_hex(8)
        message = {"owner": self._owner, "process": os.getpid()}
        self._pulse = Pulse(self._path, message, lost_after / 10)

    def receive(self, timeout: float) -> Payload | None:
        """The newest version that this worker has not seen."""
        deadline = time.monotonic() + timeout
        while True:
            if not self._sender.lives():
                raise SenderLostError("the sender was closed, or gives no sign of life")
            if read_json(self._path).get("owner") != self._owner:
                raise SenderLostError("another receiver was given the same address")
            payload = self._read_newer()
            if payload is not None or time.monotonic() >= deadline:
                return payload
            time.sleep(PAUSE)

    def acknowledge(self, answer: Answer) -> None:
        """Tell the sender that a version was committed, or why it was not."""
        try:
            write_json(self._directory / f"answer-{self._worker_id}.json", answer.to_message())
        except FileNotFoundError as error:
            raise SenderLostError("the sender was closed") from error

    def close(self) -> None:
        """Leave, and say so."""
        self._pulse.end()

    def _read_newer(self) -> Payload | None:
        wanted = read_json(self._directory / f"wanted-{self._worker_id}.json")
        if not wanted or wanted["version"] <= self._seen:
            return None
        try:
            data = (self._directory / wanted["file"]).read_bytes()
        except FileNotFoundError:
            return None  # a newer one has just taken its place
        self._seen = wanted["version"]
        return Payload.from_bytes(data, self._seen)
