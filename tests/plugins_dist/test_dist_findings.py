"""Findings of the schemes over torch.distributed: a line with a remedy each."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest

from sync_core import OptionError
from sync_core.hooks import Finding, FindingsContext
from sync_plugin_dist import findings
from sync_plugin_dist.rpc_scheme import RpcScheme
from sync_plugin_dist.scheme import DistScheme

_each_scheme = pytest.mark.parametrize("scheme", [DistScheme(), RpcScheme()])


def test_a_host_name_without_an_address() -> None:
    assert not [*findings.host_name("localhost")]
    # Too long for any name, so no name server is asked.
    (finding,) = findings.host_name("x" * 64)
    assert_line(str(finding), r"host name: 'x+' has no address .*; type, as root: echo '127")


def test_an_interface_that_is_not_there() -> None:
    present = {"lo", "eth0"}
    assert not [*findings.interfaces({"GLOO_SOCKET_IFNAME": "eth0,lo"}, present)]
    (finding,) = findings.interfaces({"TP_SOCKET_IFNAME": "ib0"}, present)
    assert_line(
        str(finding),
        "TP_SOCKET_IFNAME=ib0: this machine has no network interface 'ib0'; "
        "type: unset TP_SOCKET_IFNAME, or name one of: eth0, lo",
    )


@pytest.mark.parametrize("value", ["", "-1"])
def test_no_gpu_is_meant(value: str) -> None:
    assert not [*findings.gpu({"CUDA_VISIBLE_DEVICES": value}, seen=False)]


def test_a_gpu_that_torch_does_not_see() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "eth0"}
    assert not [*findings.gpu(environment, seen=True)]
    (finding,) = findings.gpu(environment, seen=False)
    assert_line(
        str(finding),
        "NCCL_SOCKET_IFNAME=eth0: torch sees no GPU here, and backend='nccl' is refused; install",
    )


@_each_scheme
def test_an_address_of_another_machine(scheme: Any) -> None:
    # An address that is reserved for documentation.
    (finding,) = found(scheme, "host", host="192.0.2.1")
    assert_line(str(finding), r"host=192.0.2.1: is not an address of this machine .*; give an ")
    # Too long for any name, so no name server is asked.
    (finding,) = found(scheme, "host", host="x" * 64)
    assert_line(str(finding), r"host=x+: is not an address of this machine")
    assert not found(scheme, "host", host="localhost")


@_each_scheme
def test_a_port_that_is_taken(scheme: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (finding,) = found(scheme, "port", port=port)
    assert_line(str(finding), f"port={port}: another process listens .*; leave port out for a free")
    assert not found(scheme, "port", port=0)


@_each_scheme
def test_options_that_the_scheme_refuses(scheme: Any) -> None:
    with pytest.raises(OptionError):
        found(scheme, "host", host="0.0.0.0")


def found(scheme: Any, about: str, **options: Any) -> list[Finding]:
    context = FindingsContext(scheme="dist", options=options)
    return [each for each in scheme.findings(context) if each.about.startswith(f"{about}=")]


def assert_line(line: str, pattern: str) -> None:
    assert "\n" not in line
    assert re.search(pattern, line), line
