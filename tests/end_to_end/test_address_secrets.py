"""Errors for wrong addresses: of the right class, and without a secret."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from sync_core import Address, Receiver, Sender, SyncError
from sync_core.errors import AddressError, PluginNotFoundError

pytestmark = pytest.mark.timeout(180)

SCHEMES = ["none", "thread", "shm", "file", "dist", "chunked::shm", "increments::dist"]
QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "\ud800", "\0", "a\0b", "x" * 300, "127.0.0.1", "0"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["host", "port", "local", "farewell", "x"]), inner)
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module", params=SCHEMES)
def content(request: pytest.FixtureRequest, tmp_path_factory: Any) -> dict[str, Any]:
    scheme: str = request.param
    folder: Path = tmp_path_factory.mktemp("versions")
    options: dict[str, Any] = {"directory": str(folder)} if scheme == "file" else {}
    with Sender(scheme, nn.Linear(2, 2), num_workers=1, layers=["bf16"], **options) as sender:
        made: dict[str, Any] = json.loads(sender.address(0).to_json())
        return made


def _message(changed: Any) -> str:
    try:
        Address.from_json(json.dumps(changed))
    except (AddressError, PluginNotFoundError) as error:
        str(error).encode()
        return f"{error} {error.__cause__} {error!r}"
    return ""


def _secrets(content: dict[str, Any]) -> set[str]:
    return {
        content["token"],
        content["sender_token"],
        *re.findall("[0-9a-f]{16,}", json.dumps(content["endpoint"])),
    }


@pytest.mark.fuzz
@QUICK
@given(data=st.data())
def test_no_message_has_a_secret(content: dict[str, Any], data: Any) -> None:
    first, second = (data.draw(st.sampled_from(sorted(content))) for _ in range(2))
    secret = data.draw(
        st.sampled_from([content[name] for name in ("token", "sender_token", "endpoint")])
    )
    for changed in (
        {**content, first: secret},
        {**content, first: [secret]},
        {**content, first: {"x": secret}},
        {**content, first: content[second], second: content[first]},
        {(str(content[second]) if name == first else name): each for name, each in content.items()},
        {**content, first: data.draw(ODD)},
    ):
        message = _message(changed)
        assert not [each for each in _secrets(content) if each in message], message


def test_an_endpoint_moved_into_its_own_entries_is_not_printed(content: dict[str, Any]) -> None:
    endpoint = content["endpoint"]
    if isinstance(endpoint, dict):
        for name in endpoint:
            message = _message({**content, "endpoint": {**endpoint, name: [endpoint["local"]]}})
            assert not [each for each in _secrets(content) if each in message], message
            assert "the endpoint of an address of scheme 'dist' must have host: str" in message


@pytest.mark.fuzz
@QUICK
@given(odd=ODD)
def test_an_odd_endpoint_is_an_error_of_ours(content: dict[str, Any], odd: Any) -> None:
    changed = {**content, "endpoint": odd, "timeout": 1.0}
    try:
        address = Address.from_json(json.dumps(changed))
    except (AddressError, PluginNotFoundError):
        return
    try:
        Receiver(address, nn.Linear(2, 2)).close()
    except SyncError as error:
        str(error).encode()


@pytest.mark.parametrize("endpoint", [None, 3, [], {"name": "x"}, {}, "x", "\ud800", b"x"])
@pytest.mark.parametrize("scheme", [*SCHEMES, "mp"])
def test_an_endpoint_of_the_wrong_type_is_an_error_of_the_address(
    scheme: str, endpoint: object, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"directory": str(tmp_path)} if scheme == "file" else {}
    with Sender(scheme, nn.Linear(2, 2), num_workers=1, **options) as sender:
        address = replace(sender.address(0), endpoint=endpoint, timeout=1.0)
        if scheme == "file" or (scheme == "none" and isinstance(endpoint, str)):
            Receiver(address, nn.Linear(2, 2)).close()
        else:
            with pytest.raises(SyncError):
                Receiver(address, nn.Linear(2, 2))


def test_an_address_in_json_given_to_a_receiver_is_not_printed(content: dict[str, Any]) -> None:
    with pytest.raises(AddressError, match=r"type .*Address.from_json\(text\)") as failure:
        Receiver(json.dumps(content), nn.Linear(2, 2))  # type: ignore[arg-type]
    assert not [each for each in _secrets(content) if each in str(failure.value)]


def test_what_a_transport_is_made_from_hides_its_secrets() -> None:
    with Sender("shm", nn.Linear(2, 2), num_workers=1) as sender:
        address = sender.address(0)
    context = address.transport_context("shm", 1.0)
    for each in (address.token, address.sender_token, repr(address.endpoint)):
        assert each not in repr(context)
        assert each not in repr(address)
