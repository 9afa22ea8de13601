"""What errors say, and what they keep to themselves."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace

import pytest
import torch
from torch import nn

from sync_core import Address, Answer, Receiver, Sender, SendError
from sync_core.errors import AddressError

pytestmark = pytest.mark.timeout(120)


def _write_to_a_view(address: Address) -> None:
    model = nn.Linear(2, 2)
    receiver = Receiver(address, model)
    receiver.receive(60)
    with torch.no_grad():
        model.weight.add_(1.0)


def test_a_worker_that_wrote_to_a_view_is_explained() -> None:
    with Sender("shm", nn.Linear(2, 2), num_workers=1, zero_copy=True) as sender:
        arguments = (sender.address(0),)
        process = multiprocessing.get_context("spawn").Process(
            target=_write_to_a_view, args=arguments
        )
        process.start()
        sender.send()
        process.join(60)
        with pytest.raises(SendError, match=r"type Sender\(…, zero_copy=False\)"):
            sender.send()


def test_a_token_in_the_wrong_place_is_not_printed() -> None:
    with Sender("shm", nn.Linear(2, 2), num_workers=1) as sender:
        content = json.loads(sender.address(0).to_json())
    token = content["token"]
    for name in ("worker_id", "strategy", "zero_copy", "options"):
        with pytest.raises(AddressError, match=name) as failure:
            Address.from_json(json.dumps({**content, name: token}))
        assert token not in str(failure.value)


@pytest.mark.parametrize("endpoint", [None, 3, [], {"name": "x"}])
def test_an_endpoint_of_the_wrong_type_is_an_error_of_the_address(endpoint: object) -> None:
    with Sender("shm", nn.Linear(2, 2), num_workers=1) as sender:
        address = replace(sender.address(0), endpoint=endpoint)
        with pytest.raises(AddressError, match="must be the name of a socket"):
            Receiver(address, nn.Linear(2, 2))


def test_an_error_with_a_lone_surrogate_can_be_printed() -> None:
    error = Answer(version=1, error="name \ud800").to_error(0)
    assert str(error).encode().endswith(b"name \\ud800")
