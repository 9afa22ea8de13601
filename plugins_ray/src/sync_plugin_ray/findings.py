"""Check the Ray cluster that a sender would join, for `sync-core doctor`."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import ray

from sync_core.hooks import Finding

_ADDRESS = "RAY_ADDRESS"
_GIVEN = "ray_init_config: address"
# Below the first of these that is set, Ray looks for the cluster that was started last.
_TEMPORARY = ("RAY_TMPDIR", "TMPDIR")
_CURRENT = "ray/ray_current_cluster"
_CONNECTING, _ANSWERING = 1.0, 5.0
# The need of `sync-core bench ray --model large`: a version and the one that replaces it.
_LARGE = 2 * 200 * 2 * (1 << 20)
_MB = 1_000_000


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """The Ray and Python versions of a cluster, and its object store sizes.

    Args:
        ray: the version of Ray.
        python: the version of Python.
        stores: the size of each live node's object store, in bytes.
    """

    ray: str
    python: str
    stores: tuple[float, ...]


def find(given: str | None = None) -> Iterator[Finding]:
    """Yield the problems of the cluster that a sender would join.

    Args:
        given: the address in ``ray_init_config``, which takes precedence over ``RAY_ADDRESS``.
    """
    about, address = cluster_address(os.environ, given)
    if address is None:
        return
    try:
        facts = ask(address)
    except TimeoutError:
        problem = f"at {address} something listens, and no Ray answers within {_ANSWERING:g} s"
        yield Finding(about, problem, _leave(about))
    except Exception as error:
        yield Finding(about, f"no cluster answers at {address} ({_line(error)})", _leave(about))
    else:
        yield from versions(about, facts)
        yield from stores(about, facts)


def cluster_address(
    environment: Mapping[str, str], given: str | None = None
) -> tuple[str, str | None]:
    """Return the setting that names the cluster to join, and its address; None for a new cluster.

    A ``ray://`` address is not checked, since it belongs to a proxy that only `ray.init` can use.

    Args:
        environment: the environment variables.
        given: the address in ``ray_init_config``, if any.
    """
    # "auto" stands for the environment's address.
    given = "" if given in (None, "auto") else given
    setting = _GIVEN if given else _ADDRESS
    value = given or environment.get(_ADDRESS, "")
    if value not in ("", "auto"):
        skipped = value == "local" or value.startswith("ray://")
        return f"{setting}={value}", None if skipped else value
    folder = next((environment[name] for name in _TEMPORARY if name in environment), os.sep + "tmp")
    current = Path(folder, _CURRENT)
    try:
        return str(current), current.read_text(encoding="utf-8").strip() or None
    except OSError:
        return str(current), None


def ask(address: str, timeout: float = _ANSWERING) -> ClusterFacts:
    """Query a cluster's control service, without joining the cluster.

    Args:
        address: ``"host:port"``.
        timeout: how long to wait for the answer, in seconds.

    Raises:
        OSError: nothing listens at the address.
        ValueError: the address is not valid.
        TimeoutError: the server does not answer.
    """
    host, _, port = address.rpartition(":")
    # Fail at once: Ray itself would retry for a minute.
    socket.create_connection((host.strip("[]"), int(port)), _CONNECTING).close()
    facts: Future[ClusterFacts] = Future()
    threading.Thread(target=_read, args=(address, facts), daemon=True).start()
    return facts.result(timeout)


def versions(about: str, facts: ClusterFacts) -> Iterator[Finding]:
    """Yield findings if the cluster would refuse this process, since versions differ.

    Args:
        about: the setting that names the cluster.
        facts: the cluster's answer.
    """
    here = {"Ray": (facts.ray, ray.__version__), "Python": (facts.python, _python())}
    for name, (there, ours) in here.items():
        if there == ours:
            continue
        remedy = f"make an environment with Python {there}"
        # The command takes only a plain version number.
        if name == "Ray" and re.fullmatch(r"[0-9A-Za-z.+]{1,64}", there):
            remedy = f"type: pip install 'ray=={there}'"
        yield Finding(
            about,
            f"its cluster runs {name} {there}, and here is {ours}: ray.init() refuses that",
            f"{remedy}, or let a cluster of your own be started: {_local(about)}",
        )


def stores(about: str, facts: ClusterFacts) -> Iterator[Finding]:
    """Yield a finding if an object store is too small for two versions of a large model.

    Args:
        about: the setting that names the cluster.
        facts: the cluster's answer.
    """
    smallest = min(facts.stores, default=_LARGE)
    if smallest < _LARGE:
        yield Finding(
            about,
            f"a node of its cluster has an object store of {smallest / _MB:.0f} MB, and "
            f"sync-core bench ray --model large needs {_LARGE / _MB:.0f} MB",
            "on that node, type: ray stop; then ray start … --object-store-memory=2000000000",
        )


def _read(address: str, facts: Future[ClusterFacts]) -> None:
    # As `ray status` does: Ray has no public query without joining or a dashboard.
    try:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]  # it is compiled

        client = GcsClient(address=address)
        metadata = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster"))
        living = [node for node in client.get_all_node_info().values() if node.state == 0]
        sizes = [node.resources_total.get("object_store_memory", 0.0) for node in living]
        found = ClusterFacts(metadata["ray_version"], metadata["python_version"], tuple(sizes))
    except BaseException as error:
        facts.set_exception(error)
    else:
        facts.set_result(found)


def _local(about: str) -> str:
    return "leave out that address" if about.startswith(_GIVEN) else f"export {_ADDRESS}=local"


def _leave(about: str) -> str:
    if about.startswith(_GIVEN):
        return "give the address of one that runs, or start it: ray start --head"
    forget = f"unset {_ADDRESS}" if about.startswith(_ADDRESS) else f"rm {about}"
    return f"if the cluster has ended, type: {forget}; or start it: ray start --head"


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _python() -> str:
    return platform.python_version()
