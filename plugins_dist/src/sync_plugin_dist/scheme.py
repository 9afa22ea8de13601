"""The scheme ``dist``: sends weights over its own torch.distributed process groups."""

from __future__ import annotations

from collections.abc import Iterator

from sync_core import ReceiverTransport, SenderTransport, TransportContext, hookimpl
from sync_core.hooks import Finding, FindingsContext
from sync_plugin_dist import findings
from sync_plugin_dist.options import DistOptions
from sync_plugin_dist.protocol import Endpoint
from sync_plugin_dist.receiver import create_receiver
from sync_plugin_dist.sender import DistSender


class DistScheme:
    """Sends versions to workers on any machine that can reach the trainer's address.

    It neither needs nor changes the default process group of a process.
    """

    capabilities = frozenset(
        {
            "background",
            "broadcast",
            "cross_host",
            "cross_process",
            "late_join",
            "zero_copy",
        }
    )

    endpoint_type = Endpoint

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """Return the sender's or a receiver's transport."""
        options = context.parse_options(DistOptions)
        if context.side == "receiver":
            return create_receiver(context, options)
        return DistSender(context, options)

    def findings(self, context: FindingsContext) -> Iterator[Finding]:
        """Return problems with the network, NCCL and the address to listen on."""
        return findings.find(context.parse_options(DistOptions))
