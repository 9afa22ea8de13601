"""The base class of transports, for transports that publish and offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sync_core import Receiver, Sender, SendError, SenderTransport, TransportContext, hookimpl
from sync_core.errors import TransportError
from sync_core.transports import Publication
from sync_testing import Loopback, LoopbackSender


class Noting(LoopbackSender):
    """Notes what it is asked for, and fails on request."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self.calls: list[tuple[str, int, tuple[int, ...]]] = []
        self.broken: set[str] = set()

    def offer(self, publication: Publication, worker_ids: Sequence[int]) -> None:
        self._note("offer", publication, tuple(worker_ids))

    def forget(self, publication: Publication) -> None:
        self._note("forget", publication)

    def _note(self, name: str, publication: Publication, worker_ids: tuple[int, ...] = ()) -> None:
        self.calls.append((name, publication.version, worker_ids))
        if name in self.broken:
            raise OSError("the line is down")

    def noted(self) -> list[Any]:
        calls, self.calls = self.calls, []
        return calls


class NotingScheme(Loopback):
    kind = Noting
    made: Noting

    @hookimpl
    def create_transport(self, context: TransportContext) -> Any:
        if context.side == "receiver":
            return super().create_transport(context)
        self.made = self.kind(context)
        return self.made


def commit(sender: Sender, receivers: Sequence[Receiver], *worker_ids: int) -> None:
    pending = sender.send_async(worker_ids=worker_ids or None)
    for receiver in receivers:
        receiver.receive(0)
    pending.wait()


def test_a_version_is_forgotten_when_no_worker_is_owed_it(caplog: pytest.LogCaptureFixture) -> None:
    scheme = NotingScheme()
    with Sender(scheme, torch.nn.Linear(2, 2), num_workers=2) as sender:
        receivers = [Receiver(sender.address(i), torch.nn.Linear(2, 2)) for i in range(2)]
        commit(sender, receivers)
        commit(sender, receivers[:1], 0)
        commit(sender, receivers[:1], 0)
        assert scheme.made.noted() == [
            ("offer", 1, (0, 1)),
            ("offer", 2, (0,)),
            ("offer", 3, (0,)),
            ("forget", 2, ()),
        ]
        sender.add_worker()
        sender.remove_worker(0)
        assert scheme.made.noted() == [("offer", 1, (2,)), ("forget", 3, ())]
        scheme.made.broken.add("forget")
        sender.remove_worker(2)
        commit(sender, receivers[1:])
        assert scheme.made.noted() == [("offer", 4, (1,)), ("forget", 1, ())]
        assert "version 1 could not be deleted: OSError('the line is down')" in caplog.text
        for receiver in receivers:
            receiver.close()


def test_no_worker_gets_a_version_that_could_not_be_offered() -> None:
    scheme = NotingScheme()
    with Sender(scheme, torch.nn.Linear(2, 2), num_workers=1) as sender:
        receiver = Receiver(sender.address(0), torch.nn.Linear(2, 2))
        commit(sender, [receiver])
        scheme.made.broken.add("offer")
        with pytest.raises(SendError, match="the line is down") as failed:
            sender.send()
        assert isinstance(failed.value.report.workers[0].error, TransportError)
        scheme.made.broken.clear()
        assert receiver.receive(0) is None
        late = sender.add_worker()
        assert scheme.made.noted()[-2:] == [("forget", 2, ()), ("offer", 1, (late,))]
        with Receiver(sender.address(late), torch.nn.Linear(2, 2)) as joined:
            assert joined.receive(0) == 1
            commit(sender, [receiver, joined])
        assert receiver.version == joined.version == 3
        receiver.close()


def test_what_a_transport_lacks_is_named() -> None:
    class Lacking(Noting):
        publish = SenderTransport.publish

    class LackingScheme(NotingScheme):
        kind = Lacking

    with (
        Sender(LackingScheme(), torch.nn.Linear(2, 2), num_workers=1) as sender,
        pytest.raises(SendError, match="Lacking defines neither publish nor send"),
    ):
        sender.send()
