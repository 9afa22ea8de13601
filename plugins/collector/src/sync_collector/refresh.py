"""The worker's end of the weights: commits what has arrived, between two steps or when asked."""

from __future__ import annotations

import math
import time
from typing import Any

from sync_collector.policy_module import module_of
from sync_core import Address, Receiver, SenderLostError

# A worker gives at most one part in so many of its time to looking for weights. That takes 5 µs in
# shared memory, where a step takes 160, and a millisecond or more if it means to ask a process.
_SHARE = 50
# Where all cores are busy, whoever waits for a worker's answer gets one once the scheduler takes it
# from somebody, up to 5 ms later. A worker that rests gives its own at once. It does so for as long
# as the weights took, within these bounds in seconds (docs/decisions/0010-collector.md).
_SHORTEST_REST, _LONGEST_REST = 0.001, 0.004


class Refresher:
    """Feeds a policy with what its sender sends.

    Args:
        policy: the worker's policy.
        rests: whether to rest after weights that came between two steps.
    """

    def __init__(self, policy: Any, *, rests: bool) -> None:
        self._policy = policy
        self._rests = rests
        self._receiver: Receiver | None = None
        self._lost: SenderLostError | None = None
        self._error: Exception | None = None
        # The version that the error is about; infinite where nobody but this worker knows of it.
        self._error_about = math.inf
        self._increments = 0
        # What the version counted to when another one was restored, and that one.
        self._restored: tuple[int, int] | None = None
        self._cost = math.inf
        self._due = 0.0
        # The version beyond which there was nothing when it was looked for last.
        self._looked_beyond: int | None = None

    @property
    def version(self) -> int:
        """The version that the policy has."""
        counted = self._increments + self.received
        if self._restored is not None and self._restored[0] == counted:
            return self._restored[1]
        return counted

    @property
    def received(self) -> int:
        """The version that its sender calls the newest that came from there."""
        return 0 if self._receiver is None else self._receiver.version

    @property
    def receiver(self) -> Receiver | None:
        """What writes into the policy."""
        return self._receiver

    def restore(self, version: int, increments: int) -> None:
        """Have this version until newer weights come, which count from the trainer's on.

        Args:
            version: the version of weights that were written into the policy.
            increments: how much further the trainer counts since.
        """
        self._restored = None
        self._increments += increments
        self._restored = self.version, version

    def connect(self, address: Address) -> Receiver:
        """Get the weights from a sender from now on."""
        self.close()
        self._receiver = Receiver(address, module_of(self._policy))
        self._lost = self._error = None
        return self._receiver

    def increment_version(self, by: int) -> None:
        """The policy has newer weights, which came another way."""
        self._increments += by

    def reach(self, version: int, timeout: float) -> bool:
        """Commit a version, or a newer one, unless the policy has that; whether it came in time.

        Raises what went wrong in the middle of a batch, if anything did; but of an older version
        its sender was told.
        """
        if self._error_about < version:
            self._error = None
        self._raise_kept()
        deadline = time.monotonic() + timeout
        while self.received < version:
            left = max(0.0, deadline - time.monotonic())
            if self._receiver is None or self._receiver.receive(left) is None:
                return False
        return True

    def commit(self) -> bool:
        """Commit what has arrived, if anything has; what goes wrong must not be lost, and is kept.

        Returns:
            Whether something was committed.
        """
        if self._receiver is None or self._lost is not None:
            return False
        refused = self._receiver.refused
        try:
            if self._receiver.receive(timeout=0) is not None:
                self._error = None
                return True
        except SenderLostError as error:
            self._lost = error
        except Exception as error:
            self._error = error
            told = self._receiver.refused
            self._error_about = told if told > refused else math.inf
        return False

    def look(self) -> None:
        """Commit what has arrived as one who acts: rest after that, or be in no haste to look."""
        if self._receiver is None or self._lost is not None:
            return
        began = time.monotonic()
        self._due = 0.0
        if self.commit():
            if self._rests:
                took = time.monotonic() - began
                time.sleep(min(max(took, _SHORTEST_REST), _LONGEST_REST))
            return
        # The first look after new weights may have to ask for the next ones, as over Ray: others
        # only see whether they are there.
        if self._looked_beyond != self.received:
            self._looked_beyond = self.received
            return
        now = time.monotonic()
        # The least that it ever took: the rest was waiting for a core.
        self._cost = min(self._cost, now - began)
        self._due = now + _SHARE * self._cost

    def between_steps(self) -> int:
        """Commit what has arrived, unless that was looked for just now; the policy's version."""
        if time.monotonic() >= self._due:
            self.look()
        return self.version

    def look_soon(self) -> None:
        """Look after the next step: something has come. Another thread may call this."""
        self._due = 0.0

    def close(self) -> None:
        """Leave the sender."""
        if self._receiver is not None:
            self._receiver.close()

    def _raise_kept(self) -> None:
        error, self._error = self._lost or self._error, None
        if error is not None:
            raise error
