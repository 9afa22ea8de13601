"""The scheme ``rpc``: it calls workers by torch RPC, and sends weights as ``dist`` does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sync_core import ReceiverTransport, SenderTransport, TransportContext, hookimpl
from sync_core.hooks import Finding, FindingsContext
from sync_plugin_dist import findings
from sync_plugin_dist.options import DistOptions
from sync_plugin_dist.receiver import create_receiver
from sync_plugin_dist.rpc_sender import RpcSender
from sync_plugin_dist.rpc_world import check_initialised
from sync_plugin_dist.scheme import DistScheme
from sync_plugin_dist.sender import DistSender


@dataclass(frozen=True)
class RpcOptions:
    """Options of the scheme ``rpc``; see `sync_plugin_dist.options.DistOptions`.

    Args:
        host: the address of this machine to which workers connect for the weights.
        port: the port; 0 for a free one.
        bucket_mb: the size of the parts in which a version is packed and sent, in MB.
        shared_memory: whether workers on this machine read versions from shared memory.
    """

    host: str = "127.0.0.1"
    port: int = 0
    bucket_mb: float = 4.0
    shared_memory: bool = True


class RpcScheme:
    """Updates models in `torch.distributed.rpc` workers, whose code needs no changes.

    The user must initialise RPC. Without ``workers``, receivers connect with addresses, as in
    ``dist``.
    """

    capabilities = DistScheme.capabilities
    endpoint_type = DistScheme.endpoint_type

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """Return the sender's or a receiver's transport."""
        given = context.parse_options(RpcOptions)
        options = DistOptions(**vars(given))
        if context.side == "receiver":
            return create_receiver(context, options)
        check_initialised()
        if context.workers:
            return RpcSender(context, options)
        return DistSender(context, options)

    def findings(self, context: FindingsContext) -> Iterator[Finding]:
        """Return problems with the network, NCCL and the address to listen on."""
        return findings.find(DistOptions(**vars(context.parse_options(RpcOptions))))
