"""Findings of the scheme `ray` about the cluster that a sender would join."""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from sync_plugin_ray import findings
from sync_plugin_ray.findings import ClusterFacts

HERE = (ray.__version__, platform.python_version())
ROOM = (2e9, 4e9)


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of something that takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_the_address_of_the_cluster(tmp_path: Path) -> None:
    about = {"RAY_ADDRESS": "10.0.0.1:6379"}
    assert findings.cluster_address(about) == ("RAY_ADDRESS=10.0.0.1:6379", "10.0.0.1:6379")
    for value in ("local", "ray://10.0.0.1:10001"):
        assert findings.cluster_address({"RAY_ADDRESS": value})[1] is None
    there = {"RAY_TMPDIR": str(tmp_path), "TMPDIR": "/nowhere", "RAY_ADDRESS": "auto"}
    assert findings.cluster_address(there)[1] is None
    current = tmp_path / "ray" / "ray_current_cluster"
    current.parent.mkdir()
    current.write_text("10.0.0.2:6379\n")
    assert findings.cluster_address(there) == (str(current), "10.0.0.2:6379")
    assert findings.cluster_address(there, "auto")[1] == "10.0.0.2:6379"
    assert findings.cluster_address(there, "10.0.0.3:6379") == (
        "ray_init_config: address=10.0.0.3:6379",
        "10.0.0.3:6379",
    )


def test_a_cluster_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    address = ray.get_runtime_context().gcs_address
    facts = findings.ask(address)
    assert (facts.ray, facts.python) == HERE
    # The environment that the tests of this folder have set.
    assert facts.stores == (512 * 1024**2,)
    monkeypatch.setenv("RAY_ADDRESS", address)
    (finding,) = findings.find()
    assert str(finding) == (
        f"RAY_ADDRESS={address}: a node of its cluster has an object store of 537 MB, and "
        "sync-core bench ray --model large needs 839 MB; on that node, type: ray stop; then "
        "ray start … --object-store-memory=2000000000"
    )


@pytest.mark.parametrize(
    ("theirs", "problem", "remedy"),
    [
        (("2.9.3", HERE[1]), f"Ray 2.9.3, and here is {HERE[0]}", "type: pip install 'ray==2.9.3'"),
        (
            (HERE[0], "3.9.1"),
            f"Python 3.9.1, and here is {HERE[1]}",
            "make an environment with Python 3.9.1",
        ),
    ],
    ids=["ray", "python"],
)
def test_another_version(theirs: tuple[str, str], problem: str, remedy: str) -> None:
    (finding,) = findings.versions("here", ClusterFacts(*theirs, ROOM))
    assert str(finding) == (
        f"here: its cluster runs {problem}: ray.init() refuses that; {remedy}, or let a cluster "
        "of your own be started: export RAY_ADDRESS=local"
    )


def test_the_same_versions_and_room() -> None:
    assert not [*findings.versions("here", ClusterFacts(*HERE, ROOM))]
    assert not [*findings.stores("here", ClusterFacts(*HERE, ROOM))]


def test_a_cluster_that_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    (finding,) = findings.find()
    assert str(finding) == (
        f"RAY_ADDRESS={address}: no cluster answers at {address} ([Errno 111] Connection "
        "refused); if the cluster has ended, type: unset RAY_ADDRESS; or start it: ray start --head"
    )


def test_an_address_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    (finding,) = findings.find()
    assert "no cluster answers at nonsense (invalid literal" in str(finding)


def test_what_does_not_answer_is_not_waited_for(silent: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(TimeoutError):
        findings.ask(silent, timeout=0.3)
    assert time.perf_counter() - begin < 20.0
