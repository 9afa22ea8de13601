"""Makes either side of a transport over a store."""

from __future__ import annotations

from sync_core import ReceiverTransport, SenderTransport, TransportContext
from sync_plugin_std.stores.receiver import StoreReceiver
from sync_plugin_std.stores.sender import StoreSender
from sync_plugin_std.stores.store import Store, StoreOptions


def store_transport(
    context: TransportContext, store: Store, options: StoreOptions
) -> SenderTransport | ReceiverTransport:
    """Either side of a transport that puts weights into a store, for a hook to return.

    A version is put there once, as a safetensors file, for whoever it is meant for; workers look
    for it, and for signs of life. A scheme of this kind can declare ``broadcast``, ``late_join``
    and ``pull``, and ``cross_process`` or ``cross_host`` where its store is seen from there.

    Args:
        context: what `create_transport` was given.
        store: where the bytes go.
        options: what the user has chosen.

    Raises:
        SenderLostError: a receiver's sender has closed, or its token is another.

    Example:
        >>> class Memory(Store):
        ...     kept = {}
        ...     def put(self, name, data): self.kept[name] = data
        ...     def get(self, name): return self.kept.get(name)
        ...     def delete(self, name): self.kept.pop(name, None)
        >>> class MemoryScheme:
        ...     capabilities = frozenset({"broadcast", "late_join", "pull"})
        ...     @hookimpl
        ...     def create_transport(self, context):
        ...         options = context.parse_options(StoreOptions)
        ...         return store_transport(context, Memory(), options)
        >>> policy, copy = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> with Sender(MemoryScheme(), policy, num_workers=1, poll=0.001) as sender:
        ...     with Receiver(sender.address(0), copy) as receiver:
        ...         pending = sender.send_async()
        ...         receiver.receive(), pending.wait().updated
        (1, (0,))
        >>> Memory.kept
        {}
    """
    if context.side == "receiver":
        return StoreReceiver(context, store, options)
    return StoreSender(context, store, options)
