"""The receiver's side of incremental versions: makes whole versions of what arrives."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache

import torch

from sync_core import Answer, CorruptionError, Layout, Payload, ReceiverTransport, SyncError
from sync_core.errors import PayloadError
from sync_core.wrapping import WrappingReceiver
from sync_plugin_scale.increments.errors import IncrementError
from sync_plugin_scale.increments.history import PackedVersion
from sync_plugin_scale.increments.patch import INCREMENT, Patch


class IncrementalReceiver(WrappingReceiver):
    """Keeps the newest version in its own memory, and applies increments to it.

    It hands on whole versions, each good until the next `receive`. A version that cannot be
    made whole is refused, and the sender sends it again.

    Args:
        transport: what receives; owned from now on.
        worker_id: the worker, for messages.
    """

    def __init__(self, transport: ReceiverTransport, worker_id: int) -> None:
        super().__init__(transport)
        self._worker_id = worker_id
        self._kept: PackedVersion | None = None
        self._version = 0
        # The number under which the transport brought what was handed on last.
        self._number = 0
        # The version that the model has, and the number of its delivery.
        self._committed = 0
        self._delivered = 0

    @property
    def kept(self) -> PackedVersion:
        """The newest version, packed; increments are applied to it."""
        if self._kept is None:
            raise IncrementError(self._worker_id, "has no version to apply increments to")
        return self._kept

    def receive(self, timeout: float) -> Payload | None:
        """Return the newest version, whole; refuse what cannot be made whole, and wait for more."""
        deadline = time.monotonic() + timeout
        while True:
            payload = self.transport.receive(max(0.0, deadline - time.monotonic()))
            if payload is None:
                return None
            try:
                whole = self._make_whole(payload)
            except SyncError as error:
                self.transport.acknowledge(Answer.refusal(payload.version, error))
                payload.release()
                continue
            except BaseException:
                payload.release()
                raise
            if whole.version == self._committed:
                # The model has it already: the sender could not know.
                whole.release()
                self._delivered = payload.version
                self.transport.acknowledge(Answer(version=payload.version))
                continue
            self._number = payload.version
            return whole

    def acknowledge(self, answer: Answer) -> None:
        """Answer under the number that the sender's transport knows."""
        if answer.version == self._version and answer.version != self._committed:
            if answer.error is None or answer.model_state == "new":
                self._committed, self._delivered = answer.version, self._number
            elif answer.model_state == "bad":
                self._committed = 0
        self.transport.acknowledge(replace(answer, version=self._number))

    def delivered(self, version: int) -> int:
        """Return the number under which the inner transport brought the version."""
        del version
        return self.transport.delivered(self._delivered)

    def close(self) -> None:
        """Close the transport, and release the memory."""
        self.transport.close()
        self._kept = None

    def _make_whole(self, payload: Payload) -> Payload:
        begin = time.perf_counter()
        specs = payload.layout.specs
        if not specs or (specs[-1].name, specs[-1].dtype) != (INCREMENT, torch.uint8):
            raise PayloadError(f"version {payload.version} came without its description")
        if len(specs) == 1:
            try:
                held = 0 if self._kept is None else self._kept.body.nbytes
                patch = Patch.from_tensor(payload.tensors[0], held)
                kept = self._apply(patch)
            except PayloadError as error:
                raise IncrementError(self._worker_id, str(error)) from error
        else:
            # It describes what has come, and changes nothing.
            patch = Patch.from_tensor(payload.tensors[-1], 0)
            kept = self._copy(patch, payload)
        payload.release()
        self._kept, self._version = kept, patch.version
        took = time.perf_counter() - begin
        return replace(
            payload,
            version=patch.version,
            layout=kept.layout,
            source=kept.tensors,
            release=_nothing,
            # Where the transport measures it.
            stage_seconds=payload.stage_seconds and payload.stage_seconds + took,
        )

    def _apply(self, patch: Patch) -> PackedVersion:
        """Apply an increment to what is kept."""
        kept, held = self._kept, self._version
        if kept is None or not patch.base <= held <= patch.version:
            raise PayloadError(
                f"it brings what changed since version {patch.base}, and version "
                f"{held if kept is not None else 0} is here"
            )
        if kept.layout.digest != patch.digest:
            raise PayloadError("the layout has changed")
        # Interrupted from here on, it is neither version.
        self._kept, self._version = None, 0
        patch.apply(kept.body)
        return kept

    def _copy(self, patch: Patch, payload: Payload) -> PackedVersion:
        """Copy a whole version."""
        kept, self._kept, self._version = self._kept, None, 0
        layout = _without_description(payload.layout)
        if kept is None or kept.layout != layout:
            kept = PackedVersion.allocate(layout)
        whole = Payload(patch.version, layout, payload.tensors[:-1])
        kept.pack(whole)
        try:
            patch.check_fits(kept.body)
            if not patch.results_in(kept.body):
                # Bytes between the tensors are not copied, and may be what is wrong.
                kept.body.fill(0)
                kept.pack(whole)
            patch.check_result(kept.body)
        except PayloadError as error:
            raise CorruptionError(self._worker_id, str(error)) from error
        return kept


def _nothing() -> None:
    return


@lru_cache(maxsize=16)
def _without_description(layout: Layout) -> Layout:
    return Layout(layout.specs[:-1], layout.aliases)
