"""The sender's side: writes each version once, and watches for answers in a thread."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sync_core import (
    Delivery,
    Payload,
    SenderTransport,
    TransportContext,
    WorkerError,
    WorkerLostError,
)
from sync_plugin_file.files import PAUSE, Pulse, Watch, read_json, write, write_json


class FileSender(SenderTransport):
    """Each worker has a file that names the version it is to have.

    Args:
        context: what the core knows.
        directory: where the sender makes a directory of its own; None for a temporary one.
        keep: how many versions are left.
        lost_after: seconds without a sign of life after which a worker counts as dead.
    """

    def __init__(
        self, context: TransportContext, directory: str | None, keep: int, lost_after: float
    ) -> None:
        self._model = "".join(c if c.isalnum() else "-" for c in context.model_id)
        self._directory = Path(tempfile.mkdtemp(prefix="sync-", dir=directory))
        self._keep = keep
        self._lost_after = lost_after
        self._wanted: dict[int, str] = {}
        self._pending: dict[int, Delivery] = {}
        self._watches: dict[int, Watch] = {}
        self._newest: str | None = None
        self._written: list[str] = []
        self._changed = threading.Condition()
        self._closed = False
        for worker_id in context.worker_ids:
            self.add_worker(worker_id)
        proof = {"owner": hashlib.sha256(context.token.encode()).hexdigest()}
        self._pulse = Pulse(self._directory / "sender.json", proof, lost_after / 10)
        self._thread = threading.Thread(target=self._watch, name="sync-file", daemon=True)
        self._thread.start()

    def address(self, worker_id: int) -> str:
        """The directory."""
        del worker_id
        return str(self._directory)

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Write the weights once, then tell each worker their name."""
        name = f"{self._model}-{payload.version:08}.safetensors"
        write(self._directory / name, payload.to_bytes())
        deliveries = {i: Delivery(i, payload.version, payload.nbytes) for i in worker_ids}
        with self._changed:
            for worker_id, delivery in deliveries.items():
                self._want(worker_id, name, payload.version)
                self._pending[worker_id] = delivery
            if len(deliveries) == len(self._watches):
                self._newest = name
            self._forget_old(name)
            self._changed.notify()
        return deliveries

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, which wants what went to all."""
        del worker
        with self._changed:
            self._watches[worker_id] = Watch(
                self._directory / f"worker-{worker_id}.json", self._lost_after
            )
            if self._newest is not None:
                self._want(worker_id, self._newest, int(self._newest[-20:-12]))

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker."""
        with self._changed:
            del self._watches[worker_id]
            self._wanted.pop(worker_id, None)
            delivery = self._pending.pop(worker_id, None)
        if delivery is not None:
            delivery.fail(WorkerError(worker_id, "was removed from the sender"))
        (self._directory / f"wanted-{worker_id}.json").unlink(missing_ok=True)

    def close(self) -> None:
        """End the threads; the files go, so that workers see it."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for worker_id, delivery in self._pending.items():
                delivery.fail(WorkerError(worker_id, "the sender was closed"))
            self._changed.notify()
        self._thread.join()
        self._pulse.end()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _want(self, worker_id: int, name: str, version: int) -> None:
        self._wanted[worker_id] = name
        write_json(self._directory / f"wanted-{worker_id}.json", {"version": version, "file": name})

    def _forget_old(self, name: str) -> None:
        self._written.append(name)
        needed = {*self._wanted.values(), self._newest, *self._written[-self._keep :]}
        for old in [each for each in self._written if each not in needed]:
            # Whoever has opened it reads on.
            (self._directory / old).unlink(missing_ok=True)
            self._written.remove(old)

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._pending:
                    self._changed.wait()
                if self._closed:
                    return
                for worker_id, delivery in tuple(self._pending.items()):
                    self._look_for_answer(worker_id, delivery)
                    if delivery.wait(0):
                        del self._pending[worker_id]
                self._changed.wait(PAUSE)

    def _look_for_answer(self, worker_id: int, delivery: Delivery) -> None:
        answer = read_json(self._directory / f"answer-{worker_id}.json")
        if answer:
            delivery.settle(answer)
        watch = self._watches[worker_id]
        if watch.lives() is False:
            process = watch.message().get("process")
            delivery.fail(WorkerLostError(worker_id, f"its process {process} gives no sign"))
