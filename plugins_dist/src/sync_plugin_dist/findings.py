"""Check the network, and NCCL without a GPU, for `sync-core doctor`."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Collection, Iterator, Mapping

import torch

from sync_core.hooks import Finding
from sync_plugin_dist.options import DistOptions
from sync_plugin_dist.protocol import listen

# The variables of gloo and torch RPC. NCCL's variable has patterns, which NCCL checks itself.
_INTERFACE_NAMES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
# Variables that show that a user wants a GPU; container images set other ones.
_FOR_A_GPU = ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
_NO_DEVICES = ("", "-1", "NoDevFiles")


def find(options: DistOptions) -> Iterator[Finding]:
    """Yield all findings for a sender with these options."""
    yield from host_name(socket.gethostname())
    yield from interfaces(os.environ, {name for _, name in socket.if_nameindex()})
    yield from gpu(os.environ, seen=torch.cuda.is_available())
    yield from listening(options.host, options.port)


def listening(host: str, port: int) -> Iterator[Finding]:
    """Yield a finding if a sender cannot listen on an address and port.

    Args:
        host: the address that workers connect to.
        port: the port; 0 for a free one.
    """
    try:
        listen(host, port).close()
    # Python's codec rejects names that are too long for the resolver.
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
    """Yield a finding if the host name, by which gloo and RPC choose an address, has none."""
    try:
        socket.getaddrinfo(name, None)
    # Python's codec rejects names that are too long for the resolver.
    except (OSError, UnicodeError) as error:
        yield Finding(
            "host name",
            f"{name!r} has no address ({error}), so gloo and RPC find no interface by it",
            f"type, as root: echo '127.0.1.1 {name}' >> /etc/hosts; for several machines, with "
            "the address that the others reach",
        )


def interfaces(environment: Mapping[str, str], present: Collection[str]) -> Iterator[Finding]:
    """Yield a finding for each environment variable with an unknown network interface.

    Args:
        environment: the environment variables.
        present: the names of this machine's interfaces.
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
    """Yield a finding if environment variables are meant for a GPU but torch sees none.

    Args:
        environment: the environment variables.
        seen: whether torch sees a GPU.
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
