"""Findings of the schemes over torch.distributed: a line with a remedy each."""

from __future__ import annotations

import re

import pytest

from sync_plugin_dist import findings


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


def assert_line(line: str, pattern: str) -> None:
    assert "\n" not in line
    assert re.search(pattern, line), line
