"""Findings for `sync-core doctor`: the network, and NCCL without a GPU."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Collection, Iterator, Mapping

import torch

from sync_core.hooks import Finding
from sync_plugin_dist.options import DistOptions
from sync_plugin_dist.protocol import listen

# Of torch.distributed's gloo and of torch RPC. NCCL's own takes patterns, and reports them itself.
_INTERFACE_NAMES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
# Variables that are set to use a GPU; container images set other ones.
_FOR_A_GPU = ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
_NO_DEVICES = ("", "-1", "NoDevFiles")


def find(options: DistOptions) -> Iterator[Finding]:
    """All of it, for a sender with these options."""
    yield from host_name(socket.gethostname())
    yield from interfaces(os.environ, {name for _, name in socket.if_nameindex()})
    yield from gpu(os.environ, seen=torch.cuda.is_available())
    yield from listening(options.host, options.port)


def listening(host: str, port: int) -> Iterator[Finding]:
    """An address or a port on which a sender of this machine cannot listen.

    Args:
        host: the address that workers connect to.
        port: the port; 0 for a free one.
    """
    try:
        listen(host, port).close()
    # A name that is too long for the resolver is refused by a codec.
    except (OSError, UnicodeError) as error:
        code = getattr(error, "errno", None)
        if code == errno.EADDRINUSE:
            yield Finding(
                f"port={port}",
                f"another process listens on it at {host}",
                f"leave port out for a free one, or see the process: ss -ltnp sport = :{port}",
            )
        elif code == errno.EACCES:
            yield Finding(
                f"port={port}",
                "only root may listen on it",
                "leave port out for a free one, or give one above 1023",
            )
        else:
            yield Finding(
                f"host={host}",
                f"is not an address of this machine ({error})",
                "give an address of the trainer's machine that workers reach; to see them, type: "
                "ip -brief address",
            )


def host_name(name: str) -> Iterator[Finding]:
    """A name of this machine that leads to no address, by which gloo and RPC would choose one."""
    try:
        socket.getaddrinfo(name, None)
    # A name that is too long for the resolver is refused by a codec.
    except (OSError, UnicodeError) as error:
        yield Finding(
            "host name",
            f"{name!r} has no address ({error}), so gloo and RPC find no interface by it",
            f"type, as root: echo '127.0.1.1 {name}' >> /etc/hosts; for several machines, with "
            "the address that the others reach",
        )


def interfaces(environment: Mapping[str, str], present: Collection[str]) -> Iterator[Finding]:
    """Environment variables that name a network interface which this machine lacks.

    Args:
        environment: the environment variables.
        present: the names of the interfaces that there are.
    """
    for variable in _INTERFACE_NAMES:
        names = filter(None, environment.get(variable, "").split(","))
        missing = [name for name in names if name not in present]
        if missing:
            yield Finding(
                f"{variable}={environment[variable]}",
                f"this machine has no network interface {missing[0]!r}",
                f"type: unset {variable}, or name one of: {', '.join(sorted(present))}",
            )


def gpu(environment: Mapping[str, str], *, seen: bool) -> Iterator[Finding]:
    """Environment variables that are meant for a GPU, where torch sees none.

    Args:
        environment: the environment variables.
        seen: whether torch sees one.
    """
    for variable in _FOR_A_GPU:
        value = environment.get(variable, "")
        if value not in _NO_DEVICES and not seen:
            yield Finding(
                f"{variable}={value}",
                "torch sees no GPU here, and backend='nccl' is refused",
                "install a build of torch for the GPU, or give the container one: docker run "
                "--gpus all …; backend='gloo' takes models on any device",
            )
