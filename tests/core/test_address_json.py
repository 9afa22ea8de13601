"""`Address.to_json` and `Address.from_json`."""

import base64
import copy
import json
import pickle
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sync_core import Address, Receiver, Sender, hookimpl
from sync_core.errors import AddressError, PluginNotFoundError, SyncError
from sync_plugin_scale import Pool


def _sender(scheme: str, tmp_path: Path, **options: Any) -> Sender:
    if scheme in ("file", "store"):
        options["directory" if scheme == "file" else "url"] = str(tmp_path)
    return Sender(scheme, torch.nn.Linear(2, 1), num_workers=2, timeout=20, **options)


@pytest.mark.parametrize("scheme", ["none", "thread", "shm", "file", "dist"])
def test_an_address_comes_back_as_it_was(scheme: str, tmp_path: Path) -> None:
    with _sender(scheme, tmp_path, layers=["bf16"]) as sender:
        address = sender.address(1)
        again = Address.from_json(address.to_json())
    assert again == address
    assert again.token == address.token
    assert again.layout.digest == address.layout.digest


def test_every_field_travels(written: dict[str, Any]) -> None:
    names = {field.name for field in fields(Address)}
    assert written.keys() - {"headers", "sync_address"} == names


@pytest.mark.parametrize("scheme", ["shm", "file", "dist"])
def test_a_receiver_is_made_from_json(scheme: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    with (
        _sender(scheme, tmp_path, layers=["bf16"]) as sender,
        Receiver(Address.from_json(sender.address(0).to_json()), model) as receiver,
    ):
        pending = sender.send_async(worker_ids=0)
        assert receiver.receive(20) == 1
        assert pending.wait().updated == (0,)


class Negated:
    @hookimpl(wrapper=True)
    def apply_weights(self) -> Generator[None, bool, bool]:
        return (yield)


def test_what_has_no_json_form_says_so(tmp_path: Path) -> None:
    with _sender("mp", tmp_path) as sender, pytest.raises(AddressError, match="PipeEnd"):
        sender.address(0).to_json()
    with (
        _sender("shm", tmp_path, layers=[Negated()]) as sender,
        pytest.raises(AddressError, match="by their installed names"),
    ):
        sender.address(0).to_json()


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    with Sender("dist", torch.nn.Linear(2, 1), num_workers=1, layers=["bf16"]) as sender:
        content: dict[str, Any] = json.loads(sender.address(0).to_json())
        return content


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@pytest.mark.fuzz
@given(data=st.data())
def test_a_changed_address_is_refused_or_is_valid(written: dict[str, Any], data: Any) -> None:
    name = data.draw(st.sampled_from(sorted(written)))
    value = data.draw(ANYTHING)
    try:
        address = Address.from_json(json.dumps(written | {name: value}))
    except (AddressError, PluginNotFoundError):
        return
    assert json.loads(address.to_json())[name] == value


ODD = [
    10**400,
    "\ud800",
    True,
    -1,
    1e308,
    None,
    [],
    {},
    [1],
    [None],
    [["a"]],
    {"a": 1},
    "\0",
    "a" * 300,
]


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values within one, as keys to follow."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield (*place, key)
        yield from _places(value[key], (*place, key))


def _put(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    made = copy.copy(value)
    made[place[0]] = _put(value[place[0]], place[1:], new)
    return made


def _receiver(address: Address) -> Receiver:
    return Receiver(address, torch.nn.Linear(2, 1), timeout=0.2)


@pytest.mark.parametrize("scheme", ["shm", "dist", "file", "store", "two_phase::dist"])
def test_a_receiver_refuses_what_is_odd_anywhere(scheme: str, tmp_path: Path) -> None:
    with _sender(scheme, tmp_path) as sender:
        content = json.loads(sender.address(0).to_json())
    for place in _places(content):
        for odd in ODD:
            text = json.dumps(_put(content, place, odd))
            with suppress(SyncError), _receiver(Address.from_json(text)):
                pass


@pytest.mark.parametrize("missing", ["token", "endpoint", "headers", "layouts", "sync_address"])
def test_an_address_needs_every_entry(written: dict[str, Any], missing: str) -> None:
    with pytest.raises(AddressError):
        Address.from_json(json.dumps({k: v for k, v in written.items() if k != missing}))


@pytest.mark.parametrize(
    "text",
    [
        base64.b64encode(pickle.dumps({"sync_address": 1})).decode(),
        pickle.dumps({"sync_address": 1}),
        "[" * 100_000,
        "{}",
        "",
    ],
)
def test_other_texts_are_refused(text: Any) -> None:
    with pytest.raises(AddressError, match="not an address in JSON"):
        Address.from_json(text)


@pytest.mark.parametrize("scheme", ["shm", "file", "dist", "increments::shm", "chunked::dist"])
def test_the_address_that_workers_share_is_written(scheme: str) -> None:
    model, replica = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    with Sender(scheme, model, num_workers=0) as sender:
        text = Pool(sender).address().to_json()
        sender.send()
        with Receiver(Address.from_json(text), replica) as receiver:
            assert receiver.receive(10.0) == 1
    assert torch.equal(replica.weight, model.weight)


@pytest.mark.parametrize(
    "endpoint",
    [
        {"sync_endpoint": "pool", "value": {}},
        {"sync_endpoint": "pool", "value": {"admission": "{}", "workers": None}},
        {"sync_endpoint": "pool", "value": None},
        {"sync_endpoint": ["pool"], "value": None},
        {"sync_endpoint": "pool"},
    ],
)
def test_another_endpoint_is_refused(written: dict[str, Any], endpoint: Any) -> None:
    with pytest.raises(AddressError):
        Address.from_json(json.dumps({**written, "endpoint": endpoint}))


def test_an_endpoint_that_is_not_installed_is_named(written: dict[str, Any]) -> None:
    endpoint = {"sync_endpoint": "lobby", "value": {}}
    with pytest.raises(PluginNotFoundError, match="no endpoint of addresses 'lobby' is installed"):
        Address.from_json(json.dumps({**written, "endpoint": endpoint}))
