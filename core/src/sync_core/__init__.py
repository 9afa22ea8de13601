"""Weight synchronisation for reinforcement learning and RLHF, as a plugin framework.

For authors of plugins: `sync_core.transports`, `sync_core.models`, `sync_core.hooks`,
`sync_core.registry`, `sync_core.checks` and `sync_core.lazy`. All errors are in `sync_core.errors`.
"""

import logging
from typing import TYPE_CHECKING

from sync_core.lazy import lazy_names
from sync_core.printable import PrintableRecords

if TYPE_CHECKING:
    from sync_core.address import Address, IndirectEndpoint
    from sync_core.errors import (
        ApplyError,
        CapacityError,
        ClosedError,
        CorruptionError,
        LayoutMismatchError,
        ModelError,
        ModelPathError,
        OptionError,
        PausedError,
        PendingSendError,
        PluginError,
        PluginNotFoundError,
        ReadbackError,
        RemoteCallError,
        SenderLostError,
        SendError,
        SyncError,
        TransportError,
        UnknownWorkerError,
        WorkerError,
        WorkerLostError,
        WorkerTimeoutError,
    )
    from sync_core.hooks import (
        ApplyContext,
        BindContext,
        SendContext,
        SkipContext,
        TransportContext,
        hookimpl,
    )
    from sync_core.models.extract import gathered
    from sync_core.receiving.receiver import Receiver
    from sync_core.report import Reporter, SendReport, WorkerResult
    from sync_core.sending.failure_policy import FailurePolicy, WorkerFailure
    from sync_core.sending.membership import MembershipEvent
    from sync_core.sending.pending import PendingSend
    from sync_core.sending.sender import Sender
    from sync_core.sending.worker_state import WorkerState, WorkerStatus
    from sync_core.transports.transport import Answer, Delivery, ReceiverTransport, SenderTransport
    from sync_core.weights.layout import Layout, TensorSpec
    from sync_core.weights.payload import Payload, Update
    from sync_core.worker_group import WorkerGroup

__version__ = "0.1.0"

# The project has this one logger.
logging.getLogger("sync_core").addFilter(PrintableRecords())

_MODULES = {
    "sync_core.address": ("Address", "IndirectEndpoint"),
    "sync_core.errors": (
        "ApplyError",
        "CapacityError",
        "ClosedError",
        "CorruptionError",
        "LayoutMismatchError",
        "ModelError",
        "ModelPathError",
        "OptionError",
        "PausedError",
        "PendingSendError",
        "PluginError",
        "PluginNotFoundError",
        "ReadbackError",
        "RemoteCallError",
        "SendError",
        "SenderLostError",
        "SyncError",
        "TransportError",
        "UnknownWorkerError",
        "WorkerError",
        "WorkerLostError",
        "WorkerTimeoutError",
    ),
    "sync_core.hooks": (
        "ApplyContext",
        "BindContext",
        "SendContext",
        "SkipContext",
        "TransportContext",
        "hookimpl",
    ),
    "sync_core.models.extract": ("gathered",),
    "sync_core.receiving.receiver": ("Receiver",),
    "sync_core.report": ("Reporter", "SendReport", "WorkerResult"),
    "sync_core.sending.failure_policy": ("FailurePolicy", "WorkerFailure"),
    "sync_core.sending.membership": ("MembershipEvent",),
    "sync_core.sending.pending": ("PendingSend",),
    "sync_core.sending.sender": ("Sender",),
    "sync_core.sending.worker_state": ("WorkerState", "WorkerStatus"),
    "sync_core.transports.transport": (
        "Answer",
        "Delivery",
        "ReceiverTransport",
        "SenderTransport",
    ),
    "sync_core.weights.layout": ("Layout", "TensorSpec"),
    "sync_core.weights.payload": ("Payload", "Update"),
    "sync_core.worker_group": ("WorkerGroup",),
}

_KITS = ("checks", "errors", "hooks", "lazy", "models", "registry", "transports", "wrapping")

__all__ = [
    "Address",
    "Answer",
    "ApplyContext",
    "ApplyError",
    "BindContext",
    "CapacityError",
    "ClosedError",
    "CorruptionError",
    "Delivery",
    "FailurePolicy",
    "IndirectEndpoint",
    "Layout",
    "LayoutMismatchError",
    "MembershipEvent",
    "ModelError",
    "ModelPathError",
    "OptionError",
    "PausedError",
    "Payload",
    "PendingSend",
    "PendingSendError",
    "PluginError",
    "PluginNotFoundError",
    "ReadbackError",
    "Receiver",
    "ReceiverTransport",
    "RemoteCallError",
    "Reporter",
    "SendContext",
    "SendError",
    "SendReport",
    "Sender",
    "SenderLostError",
    "SenderTransport",
    "SkipContext",
    "SyncError",
    "TensorSpec",
    "TransportContext",
    "TransportError",
    "UnknownWorkerError",
    "Update",
    "WorkerError",
    "WorkerFailure",
    "WorkerGroup",
    "WorkerLostError",
    "WorkerResult",
    "WorkerState",
    "WorkerStatus",
    "WorkerTimeoutError",
    "__version__",
    "gathered",
    "hookimpl",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES, _KITS)
