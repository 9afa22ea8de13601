"""The options of the scheme ``dist``, and their validation."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from ipaddress import ip_address
from math import inf
from typing import Any

import torch
from torch import distributed

from sync_core import OptionError, TransportContext
from sync_plugin_dist.process_group import Link


@dataclass(frozen=True)
class DistOptions:
    """Options of the scheme ``dist``.

    Args:
        backend: ``"gloo"``, which sends through host memory, even for models on a GPU, or
            ``"nccl"``.
        topology: ``"p2p"``, a process group per worker, or ``"broadcast"``, one for all workers.
        host: the address of this machine to which workers connect.
        port: the port; 0 for a free one.
        bucket_mb: the size of the parts in which a version is packed and sent, in MB.
        shared_memory: whether workers of the same user on this machine read versions from shared
            memory. Other workers always receive them over the network, as do all with ``nccl`` or
            ``broadcast``.
        verify: whether workers check received bytes against a SHA-256 hash from the control
            connection. None for only with ``broadcast``, in which workers pass bytes on.
    """

    backend: str = "gloo"
    topology: str = "p2p"
    host: str = "127.0.0.1"
    port: int = 0
    bucket_mb: float = 4.0
    shared_memory: bool = True
    verify: bool | None = None

    def __post_init__(self) -> None:
        _check_one_of("topology", self.topology, ("p2p", "broadcast"))
        _check_one_of("backend", self.backend, ("gloo", "nccl"))
        if _is_any(self.host):
            raise OptionError(
                f"host={self.host!r} is not an address to connect to; give the one of this "
                "machine that workers can reach, such as host='10.0.0.5'; type hostname -I to see "
                "those of a Linux machine"
            )
        if not 0 <= self.port < 1 << 16:
            raise OptionError(f"port={self.port!r} is not a port; leave it out for a free one")
        if not 1 <= self.bucket_mb * 1e6 < inf:
            raise OptionError(f"bucket_mb={self.bucket_mb!r} holds nothing; give a size in MB")
        if self.backend == "nccl" and not _has_nccl():
            raise OptionError(
                "backend='nccl' needs a GPU and a build of torch for it, and there is none here; "
                "type backend='gloo', which goes through host memory and takes models on any "
                "device"
            )
        if self.backend == "gloo" and not distributed.is_gloo_available():
            raise OptionError("this build of torch has no gloo; install another one")

    @property
    def shares_memory(self) -> bool:
        """True if workers on this machine read versions from shared memory."""
        sent_alone = self.backend == "gloo" and self.topology == "p2p"
        return self.shared_memory and sent_alone and sys.platform != "win32"

    @property
    def verifies(self) -> bool:
        """True if workers check the received bytes."""
        return self.topology == "broadcast" if self.verify is None else self.verify

    @property
    def part_nbytes(self) -> int:
        """The size of a part in bytes."""
        return int(self.bucket_mb * 1e6)

    def link(self, context: TransportContext, interface: str) -> Link:
        """Return the parameters of a process group."""
        collective = self.topology == "broadcast"
        return Link(
            backend=self.backend,
            collective=collective,
            interface=interface,
            timeout=context.timeout / 2 if collective else context.timeout,
            verify=self.verifies,
        )


def _check_one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        names = " or ".join(map(repr, allowed))
        raise OptionError(f"{name}={value!r} is not known; type {name}={names}")


def _is_any(host: str) -> bool:
    """Return whether a host, in any spelling, stands for all addresses."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # a codec rejects names that are too long
        return not host
    return any(ip_address(str(address[0])).is_unspecified for *_, address in found)


def _has_nccl() -> bool:
    return distributed.is_nccl_available() and torch.cuda.is_available()
