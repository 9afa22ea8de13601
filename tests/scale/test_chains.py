"""Chains of schemes do what every scheme does; the others run in `tests/chains`."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from sync_core import Address, OptionError, Receiver, Sender, WorkerState, registry
from sync_core.errors import NotAPluginError, PluginNotFoundError
from sync_plugin_scale import Chunked, Increments, Relay, TwoPhase
from sync_testing import SchemeConformance
from sync_testing.worker_groups import eventually


@pytest.mark.long
class TestIncrementsInChunks(SchemeConformance):
    scheme = "increments::chunked::shm"


@pytest.mark.parametrize(
    "scheme",
    [
        "increments::shm",
        "chunked::shm",
        "increments::chunked::dist",
        "two_phase::shm",
        "two_phase::increments::dist",
        "two_phase::chunked::dist",
        TwoPhase("shm", failed="leave_out", wait=5.0),
        Increments("shm", below=0.5),
        Increments(Chunked("dist", mb=0.5), whole_every=3),
    ],
    ids=str,
)
def test_an_address_has_a_json_form(scheme: object) -> None:
    model, copy = {"w": torch.zeros(300)}, {"w": torch.ones(300)}
    with Sender(scheme, model, num_workers=1) as sender:
        address = Address.from_json(sender.address(0).to_json())
        assert address == sender.address(0)
        with Receiver(address, copy) as receiver:
            for version in (1, 2):
                model["w"][version] = version
                pending = sender.send_async()
                assert receiver.receive(20) == version
                pending.wait()
    assert torch.equal(copy["w"], model["w"])


def test_a_relay_of_a_chain_that_came_as_json() -> None:
    model, copy = {"w": torch.arange(300.0)}, {"w": torch.zeros(300)}
    with Sender(Chunked("shm", mb=0.0005), model, num_workers=1) as sender:
        address = Address.from_json(sender.address(0).to_json())
        with (
            Relay(address, num_workers=1) as relay,
            Receiver(Address.from_json(relay.address(0).to_json()), copy) as receiver,
        ):
            pending = sender.send_async()
            assert receiver.receive(20) == 1
            assert pending.wait().updated == (0,)
    assert torch.equal(copy["w"], model["w"])


@pytest.mark.parametrize(
    ("scheme", "kind", "message"),
    [
        ("increments", NotAPluginError, r"wraps another scheme; type increments::shm"),
        ("shm::dist", NotAPluginError, r"does not wrap another scheme; type scheme='shm'"),
        ("increment::shm", PluginNotFoundError, "did you mean 'increments'"),
        ("increments::shmm", PluginNotFoundError, "did you mean 'shm'"),
        ("increments::none", OptionError, "moves nothing"),
        ("chunked::none", OptionError, "moves nothing"),
        ("increments::increments::shm", OptionError, "leaves out already what a worker has"),
        ("increments::chunked::thread", OptionError, "does not leave this process"),
        ("two_phase::none", OptionError, "moves nothing"),
        ("two_phase::two_phase::shm", OptionError, "type scheme='two_phase::shm'"),
        ("increments::two_phase::shm", OptionError, "type scheme='two_phase::increments::shm'"),
        ("chunked::two_phase::shm", OptionError, "type scheme='two_phase::chunked::shm'"),
    ],
)
def test_chains_that_make_no_sense(scheme: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        registry.find(registry.SCHEMES, scheme)


@pytest.mark.parametrize("name", ["increments", "chunked", "sharded", "two_phase"])
def test_a_chain_whose_distribution_is_not_installed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = registry.installed(registry.SCHEMES)
    others = [entry for entry in entries if not entry.value.startswith("sync_plugin_scale.")]
    monkeypatch.setattr(registry, "installed", lambda group: others)
    with pytest.raises(PluginNotFoundError, match="type: pip install sync-plugin-scale"):
        registry.find(registry.SCHEMES, f"{name}::shm")


@pytest.mark.parametrize("scheme", ["chunked::thread", "two_phase::thread"])
def test_a_worker_that_leaves_right_after_its_answer_is_lost(scheme: str) -> None:
    """The thread that acts on answers may be late; what a transport knows at once is not newer."""
    with Sender(scheme, {"w": torch.ones(4)}, num_workers=1) as sender:
        transport: Any = sender._pipeline.transport
        receiver = Receiver(sender.address(0), {"w": torch.zeros(4)})
        pending = sender.send_async()
        if scheme.startswith("two_phase"):
            assert receiver._connection.transport._stage(time.monotonic() + 30)  # type: ignore[attr-defined]
            assert transport._round.decided.wait(30)
        with transport._lock:
            assert receiver.receive(30) == 1
            receiver.close()
        assert pending.wait().updated == (0,)
        assert eventually(lambda: sender.workers[0].state is WorkerState.LOST, 30.0)
