"""The sender's decision about a version, as it travels, and the error of an aborted version."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sync_core import Layout, Payload, TransportError
from sync_core.errors import PayloadError
from sync_core.transports import RESERVED_PREFIX

_NAME = RESERVED_PREFIX + "decision"
# The numbers of a decision: of the staged payload, the version, and whether it is committed.
_NUMBERS = 3
#: The layout of a decision.
DECISION_LAYOUT = Layout.of_kinds([(_NAME, torch.int64, (_NUMBERS,))])


class AbortedError(TransportError):
    """No worker of the send has committed the version, since another worker did not stage it.

    The worker is not at fault, so ``on_failure`` leaves it alone.
    """


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision to commit a staged payload, or to drop it.

    Args:
        number: the number under which the payload travelled.
        version: the version that it is.
        commit: whether it is committed; else it is dropped.

    Example:
        >>> decision = Decision(number=9, version=8, commit=True)
        >>> Decision.from_payload(decision.to_payload(1)) == decision
        True
    """

    number: int
    version: int
    commit: bool

    def to_payload(self, number: int) -> Payload:
        """Return the decision as a payload, under another number."""
        values = torch.tensor([self.number, self.version, int(self.commit)], device="cpu")
        return Payload(number, DECISION_LAYOUT, (values,))

    @classmethod
    def from_payload(cls, payload: Payload) -> Decision:
        """Return the decision in a payload.

        Raises:
            PayloadError: it holds none.
        """
        if payload.layout.plain != DECISION_LAYOUT:
            raise PayloadError(f"expected a decision, got {', '.join(payload.layout.names)[:200]}")
        number, version, commit = payload.tensors[0].tolist()
        if commit not in (0, 1) or min(number, version) < 1:
            raise PayloadError(f"a decision cannot be {[number, version, commit]}")
        return cls(number, version, bool(commit))
