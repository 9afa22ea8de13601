"""Each worker has a separate token, so it passes for neither another worker nor the sender."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sync_core import Address, Receiver, Sender, SenderLostError, SendError
from sync_core.sending import pipeline
from sync_plugin_scale import Pool, Relay, Sharded, join_addresses
from sync_plugin_scale.pools.admission import KeyAgreement
from sync_plugin_std.stores.store import SENDER, Records
from sync_testing.fuzz import find

pytestmark = pytest.mark.timeout(60)

SCHEMES: list[tuple[str, dict[str, Any]]] = [
    ("shm", {}),
    ("mp", {}),
    ("file", {}),
    ("dist", {}),
    ("dist", {"shared_memory": False, "topology": "broadcast"}),
    ("chunked::dist", {"shared_memory": False}),
    ("increments::file", {}),
    ("two_phase::shm", {}),
]


def model(value: float = 0.0) -> nn.Linear:
    made = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


def _sender(scheme: str, options: dict[str, Any], folder: Path, **more: Any) -> Sender:
    more |= {"directory": str(folder)} if scheme.endswith("file") else {}
    return Sender(scheme, model(1.0), timeout=5.0, **{"num_workers": 2, **options, **more})


@pytest.mark.parametrize(("scheme", "options"), SCHEMES)
def test_a_worker_does_not_pass_for_another(
    scheme: str, options: dict[str, Any], tmp_path: Path
) -> None:
    with _sender(scheme, options, tmp_path) as sender:
        own, others = sender.address(1), sender.address(0)
        assert own.token != others.token
        with pytest.raises(SenderLostError):
            Receiver(replace(others, token=own.token, sender_token=own.sender_token), model())
        with Receiver(sender.address(0), copy := model()) as receiver:
            pending = sender.send_async(worker_ids=0)
            assert receiver.receive() == 1
            assert pending.wait().updated == (0,)
        assert copy.bias.tolist() == [1.0, 1.0]


def _posing(address: Address, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Sender:
    """Return a sender in the place of another, with all that one of its workers knows."""
    known = {16: address.sender_token, 32: address.token}
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "secrets", SimpleNamespace(token_hex=known.__getitem__))
        return Sender(address.scheme, model(666.0), num_workers=2, timeout=5.0, **options)


def test_a_worker_does_not_pass_for_a_sender_that_is_gone(monkeypatch: Any) -> None:
    with Sender("dist", model(), num_workers=2, shared_memory=False) as sender:
        addresses = [replace(sender.address(i), timeout=5.0) for i in range(2)]
    port = addresses[1].endpoint.port
    with _posing(addresses[1], monkeypatch, port=port, shared_memory=False) as posing:
        assert posing.address(0).endpoint == addresses[0].endpoint
        assert posing.address(0).sender_token == addresses[0].sender_token
        with pytest.raises(SenderLostError, match="does not know its token"):
            Receiver(addresses[0], model())


def test_a_worker_writes_no_record_that_another_believes(tmp_path: Path) -> None:
    with _sender("file", {}, tmp_path) as sender:
        copies = [model() for _ in range(2)]
        honest, other = (Receiver(sender.address(i), copies[i]) for i in range(2))
        records = next(find(other, Records))
        record = records.read(SENDER)
        assert record is not None
        for name, forged in (
            (SENDER, {**record, "wanted": {"0": 7, "1": 7}}),
            (
                "worker-0.json",
                {
                    "owner": "x",
                    "process": 1,
                    "host": "x",
                    "beats": 1,
                    "answer": {"version": 1, "error": None},
                    "left": None,
                },
            ),
        ):
            records.write(name, forged, (0, 1))
            assert records.read(name) == forged
        with pytest.raises(SenderLostError, match="another has written"):
            honest.receive(0.0)
        with pytest.raises(SendError) as failed:
            sender.send(worker_ids=0)
        assert failed.value.report.updated == ()
        # The sender has written its record again.
        with Receiver(sender.address(0), copies[0]) as again:
            assert again.receive() == 1
        honest.close()
        other.close()
    assert copies[0].bias.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("scheme", ["thread", "shm", "dist", "file"])
def test_each_worker_of_a_pool_is_given_its_own(scheme: str, tmp_path: Path) -> None:
    with _sender(scheme, {}, tmp_path, num_workers=0) as sender:
        shared = Address.from_json(Pool(sender).address().to_json())
        resolved = [shared.endpoint.resolve(shared, 5.0) for _ in range(3)]
        assert {each.token for each in resolved} == {sender.address(i).token for i in range(3)}
        assert not [each for each in resolved if each.token in shared.to_json()]
        # What answers there has another key, as all that members know is no more than the address.
        stranger = replace(shared.endpoint, key=KeyAgreement().key.hex())
        with pytest.raises(SenderLostError, match="is not its sender"):
            stranger.resolve(replace(shared, endpoint=stranger), 5.0)


def test_workers_of_relays_and_of_ranks_have_separate_tokens() -> None:
    ranks = [
        Sender(
            Sharded("shm", i, 2, regions={"w": ((i, i + 1),)}), {"w": torch.ones(1)}, num_workers=2
        )
        for i in range(2)
    ]
    joined = [join_addresses([rank.address(i) for rank in ranks]) for i in range(2)]
    assert len({rank.token for each in joined for rank in each.endpoint.ranks}) == 4
    with Receiver(Address.from_json(joined[0].to_json()), {"w": torch.zeros(2)}):
        pass
    for rank in ranks:
        rank.close()
    with (
        Sender("chunked::shm", model(), num_workers=1) as sender,
        Relay(sender.address(0), num_workers=2) as relay,
    ):
        own = [relay.address(i) for i in range(2)]
        assert len({sender.address(0).token, own[0].token, own[1].token}) == 3
        with pytest.raises(SenderLostError):
            Receiver(replace(own[0], token=own[1].token), model())
