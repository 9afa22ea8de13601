"""The worker's side: keeps a staged version until the sender has decided about it."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from sync_core import (
    Answer,
    Payload,
    ReceiverTransport,
    SenderLostError,
    SyncError,
    TransportContext,
)
from sync_core.errors import PayloadError
from sync_core.transports import Block
from sync_plugin_scale.resending import AGAIN
from sync_plugin_scale.two_phase.decision import Decision

if TYPE_CHECKING:
    from sync_plugin_scale.two_phase.scheme import TwoPhase

_log = logging.getLogger("sync_core")
# After how many seconds without a decision a worker logs that it waits. A decision takes
# milliseconds where all workers receive.
_QUIET = 1.0
# The versions that may wait for their answers; one, but for a receiver in the background.
_MOST_HANDED = 8


class TwoPhaseReceiver(ReceiverTransport):
    """Stages a version, says so, and hands it on when the sender decides to commit it.

    Args:
        context: of the receiver.
        scheme: the scheme.

    Attributes:
        keeps_own_copies: whether a staged version is copied, since the next one may be staged
            before it is committed.
    """

    keeps_own_copies = False

    def __init__(self, context: TransportContext, scheme: TwoPhase) -> None:
        self._worker_id = context.worker_id
        self._wait = context.timeout if scheme.wait is None else scheme.wait
        self._staged: Payload | None = None
        self._since = 0.0
        self._said = False
        # The number of a version that was dropped since no decision came.
        self._dropped = 0
        # The newest decision, and the number of the payload that brought it.
        self._newest: tuple[Decision, int] | None = None
        # By version: the number of the decision to commit it.
        self._handed: dict[int, int] = {}
        self._asked = False
        self._versions = scheme.versions_receiver(context)
        try:
            self._decisions = scheme.decisions_receiver(context)
        except BaseException:
            self._versions.close()
            raise

    def receive(self, timeout: float) -> Payload | None:
        """Return the newest version that the sender has decided to commit."""
        deadline = time.monotonic() + timeout
        first, self._asked = not self._asked, True
        if first and timeout <= 0:
            # A receiver that cannot be made asks once to learn that, and must promise nothing.
            return None
        while True:
            if self._staged is None and not self._stage(deadline):
                return None
            payload = self._await_decision(deadline)
            if payload is not None or self._staged is not None:
                return payload

    def acknowledge(self, answer: Answer) -> None:
        """Answer for a version that was committed, or could not be."""
        number = self._handed.pop(answer.version, None)
        if number is not None:
            self._decisions.acknowledge(replace(answer, version=number))

    def wake(self) -> None:
        """Wake both transports."""
        self._versions.wake()
        self._decisions.wake()

    def leave(self, reason: str) -> None:
        """Notify the sender."""
        self._versions.leave(reason)
        self._decisions.leave(reason)

    def close(self) -> None:
        """Drop what is staged, and close both transports."""
        self._drop()
        self._versions.close()
        self._decisions.close()

    def _stage(self, deadline: float) -> bool:
        """Wait for a version, and say that it is staged; False where none comes in time."""
        if self._dropped:
            self._refuse_what_was_dropped()
        payload = self._versions.receive(max(0.0, deadline - time.monotonic()))
        if payload is None:
            return False
        self._staged = _copied(payload) if self.keeps_own_copies else payload
        self._since, self._said, self._dropped = time.monotonic(), False, 0
        # Where the sender is gone, the transport of decisions says so.
        with suppress(SenderLostError):
            self._versions.acknowledge(Answer(version=payload.version))
        return True

    def _await_decision(self, deadline: float) -> Payload | None:
        """Return the staged version once the sender decides to commit it.

        None where there is no decision in time, or the version was dropped: see `_staged`.
        """
        assert self._staged is not None
        while self._newest is None or self._newest[0].number < self._staged.version:
            now = time.monotonic()
            gives_up = self._since + self._wait
            speaks = gives_up if self._said else min(gives_up, self._since + _QUIET)
            try:
                found = self._read_decision(max(0.0, min(deadline, speaks) - now))
            except SenderLostError as error:
                self._drop()
                raise SenderLostError(
                    f"{error}; a version was staged, and the sender had not decided about it: the "
                    "model keeps the version that it has"
                ) from error
            if not found and (now := time.monotonic()) >= speaks:
                self._speak(gives_up - now)
            if self._staged is None or (not found and now >= deadline):
                return None
        decision, number = self._newest
        staged, self._staged = self._staged, None
        if decision.number > staged.version or not decision.commit:
            staged.release()
            if decision.number == staged.version:
                self._answer(Answer(version=number))
            return None
        while len(self._handed) >= _MOST_HANDED:
            del self._handed[next(iter(self._handed))]
        self._handed[decision.version] = number
        return replace(staged, version=decision.version)

    def _speak(self, left: float) -> None:
        """Log that the worker waits, or drop the version when it has waited long enough."""
        assert self._staged is not None
        self._said = True
        if left > 0:
            _log.warning(
                "worker %d has staged a version and waits for the sender's decision, for %.1f s "
                "more; it keeps the version that it has",
                self._worker_id,
                left,
            )
            return
        number = self._staged.version
        message = (
            f"dropped a staged version, since the sender decided nothing within {self._wait:g} s; "
            "it keeps the version that it has"
        )
        _log.warning("worker %d %s", self._worker_id, message)
        self._drop()
        self._dropped = number
        with suppress(SenderLostError):
            self._versions.acknowledge(Answer.refusal(number, SyncError(message)))

    def _read_decision(self, timeout: float) -> bool:
        """Wait for a decision; False where none comes in time."""
        payload = self._decisions.receive(timeout)
        if payload is None:
            return False
        try:
            decision = Decision.from_payload(payload)
        except PayloadError as wrong:
            self._answer(Answer.refusal(payload.version, wrong))
            raise
        finally:
            payload.release()
        self._newest = decision, payload.version
        if decision.number == self._dropped or (
            self._staged is not None and decision.number < self._staged.version
        ):
            self._refuse(decision, payload.version)
        return True

    def _refuse_what_was_dropped(self) -> None:
        """Answer a decision that came after its version was dropped."""
        if self._read_decision(0.0):
            self._dropped = 0

    def _refuse(self, decision: Decision, number: int) -> None:
        if not decision.commit:
            self._answer(Answer(version=number))
            return
        error = SyncError("this worker no longer holds the version that is to be committed")
        refusal = Answer.refusal(number, error)
        dropped = decision.number == self._dropped
        self._answer(replace(refusal, request=AGAIN) if dropped else refusal)

    def _answer(self, answer: Answer) -> None:
        # The next receive() says that the sender has gone.
        with suppress(SenderLostError):
            self._decisions.acknowledge(answer)

    def _drop(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.release()


def _copied(payload: Payload) -> Payload:
    """Return a payload in its own memory, and release the one given."""
    try:
        block = Block.allocate(payload.nbytes)
        payload.pack(block)
    finally:
        payload.release()
    return Payload(
        payload.version,
        payload.layout,
        block,
        known_at=payload.known_at,
        stage_seconds=payload.stage_seconds,
        base=payload.base,
    )
