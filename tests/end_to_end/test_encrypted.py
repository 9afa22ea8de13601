"""The page's example of a wrapping scheme, which passes the suite in `tests/chains`."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sync_core import OptionError, Receiver, Sender, hookimpl
from sync_testing.faults import Fault, Faulty

# Worker processes look for the example where this process does.
sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))

from encrypted import Encrypted  # type: ignore[import-not-found]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True, scope="module")
def key() -> Iterator[None]:
    """Have a key here, and in workers that start from now on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SYNC_KEY", secrets.token_hex(32))
        yield


def test_no_weights_travel_in_the_clear() -> None:
    seen: list[bytes] = []

    class Listening(Faulty):
        @hookimpl
        def create_transport(self, context: Any) -> Any:
            made: Any = super().create_transport(context)
            if context.side == "sender":
                send = made.send

                def listen(payload: Any, worker_ids: Any) -> Any:
                    seen.append(payload.to_bytes())
                    return send(payload, worker_ids)

                made.send = listen
            return made

    model, copy = {"secret": torch.full((64,), 0.7310585)}, {"secret": torch.zeros(64)}
    with Sender(Encrypted(Listening("thread")), model, num_workers=1) as sender:
        receiver = Receiver(sender.address(0), copy)
        pending = sender.send_async()
        assert receiver.receive() == 1
        pending.wait()
    assert torch.equal(copy["secret"], model["secret"])
    (travelled,) = seen
    assert model["secret"].numpy().tobytes()[:8] not in travelled
    assert b"secret" not in travelled


def test_a_version_that_was_changed_on_its_way_is_refused() -> None:
    fault = Fault(action="corrupt", point="staged", version=1, at_byte=40)
    model, copy = {"w": torch.ones(64)}, {"w": torch.zeros(64)}
    with Sender(Encrypted(Faulty("thread", fault)), model, num_workers=1) as sender:
        receiver = Receiver(sender.address(0), copy)
        pending = sender.send_async()
        with pytest.raises(Exception, match="version 1 does not decrypt"):
            receiver.receive()
        with pytest.raises(Exception, match="version 1 does not decrypt"):
            pending.wait()
        assert copy["w"].sum() == 0
        pending = sender.send_async()
        assert receiver.receive() == 2
        assert pending.wait().updated == (0,)


def test_a_missing_key_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNC_KEY")
    with pytest.raises(OptionError, match="export SYNC_KEY="):
        Sender(Encrypted("thread"), {"w": torch.zeros(2)}, num_workers=1)
