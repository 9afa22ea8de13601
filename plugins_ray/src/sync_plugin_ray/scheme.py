"""The scheme ``ray``: call actors, or serve receivers in a cluster from a mailbox."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sync_core import OptionError, ReceiverTransport, SenderTransport, TransportContext, hookimpl
from sync_core.hooks import Finding, FindingsContext
from sync_plugin_ray import findings
from sync_plugin_ray.cluster import Cluster
from sync_plugin_ray.mailbox import MailboxEndpoint
from sync_plugin_ray.pull import PullSender
from sync_plugin_ray.push import PushSender
from sync_plugin_ray.receiver import MailboxReceiver
from sync_plugin_ray.store import ObjectStore
from sync_plugin_std.calls import HandedTransport


@dataclass(frozen=True)
class RayOptions:
    """Options of the scheme ``ray``.

    Args:
        model_getter: the name of an actor method that returns the model, for a sender with
            ``workers``; None to find the model at ``model_id``.
        tensor_transport: a direct transport of Ray, such as ``"nixl"``; None for the object store.
        ray_init_config: arguments for `ray.init`, if Ray is not initialised yet.
    """

    model_getter: str | None = None
    tensor_transport: str | None = None
    ray_init_config: Mapping[str, Any] | None = None


class RayScheme:
    """Puts weights into the object store once, for all workers to read.

    With ``workers=actors`` the sender updates the object at ``model_id`` in each actor, of any
    class. Instead of an actor, an object with the actor as its ``_actor`` can be given. Without
    ``workers``, workers connect with addresses, from any process of the cluster.
    """

    capabilities = frozenset(
        {
            "broadcast",
            "cross_host",
            "cross_process",
            "late_join",
            "pull",
            "worker_paths",
            "zero_copy",
        }
    )
    endpoint_type = MailboxEndpoint | HandedTransport

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """Return the sender's or a receiver's transport."""
        if isinstance(context.endpoint, HandedTransport):
            return context.endpoint
        if context.side == "receiver":
            return MailboxReceiver(context)
        options = context.parse_options(RayOptions)
        if options.model_getter is not None and not context.workers:
            raise OptionError("model_getter is for actors that are given as workers=[…]")
        assert context.layout is not None
        cluster = Cluster(options.ray_init_config)
        try:
            store = ObjectStore(context.layout.nbytes, options.tensor_transport)
            if context.workers:
                return PushSender(context, cluster, store, options.model_getter)
            return PullSender(context, cluster, store)
        except BaseException:
            cluster.leave()
            raise

    def findings(self, context: FindingsContext) -> Iterator[Finding]:
        """Return problems of the cluster that a sender would join, without starting one."""
        config = context.parse_options(RayOptions).ray_init_config or {}
        return findings.find(config.get("address"))
