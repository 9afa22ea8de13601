"""The scheme ``dist``: weights over process groups of torch.distributed that are our own."""

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
    """Workers anywhere that can reach the trainer connect by the address alone.

    The default process group of either process is neither needed nor touched.
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
        """The sender's or a receiver's side."""
        options = context.parse_options(DistOptions)
        if context.side == "receiver":
            return create_receiver(context, options)
        return DistSender(context, options)

    def findings(self, context: FindingsContext) -> Iterator[Finding]:
        """Return problems of the network, of NCCL, and of the address to listen on."""
        return findings.find(context.parse_options(DistOptions))
