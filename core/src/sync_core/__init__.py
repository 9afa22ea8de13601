"""Weight synchronisation for reinforcement learning and RLHF, as a plugin framework."""

from typing import TYPE_CHECKING

from sync_core.arguments import check_count
from sync_core.calls import CallOutcome, RemoteCall, close_hosted, pickle_factory
from sync_core.errors import (
    AddressError,
    ApplyError,
    CapacityError,
    ClosedError,
    CorruptionError,
    HookResultError,
    LayoutMismatchError,
    ModelError,
    ModelPathError,
    NotAPluginError,
    OptionError,
    PayloadError,
    PendingSendError,
    PluginConflictError,
    PluginError,
    PluginImportError,
    PluginNewError,
    PluginNotFoundError,
    PluginVersionError,
    ReadbackError,
    RemoteCallError,
    RequirementError,
    SenderLostError,
    SendError,
    SyncError,
    TransportError,
    UnknownHookError,
    UnknownWorkerError,
    WorkerError,
    WorkerLostError,
    WorkerTimeoutError,
)
from sync_core.interrupts import uninterrupted
from sync_core.models.consolidate import consolidate
from sync_core.plugins.address import Address
from sync_core.plugins.contexts import ApplyContext, SendContext, SkipContext, TransportContext
from sync_core.plugins.finding import Finding
from sync_core.plugins.hookspecs import hookimpl
from sync_core.plugins.reporter import Reporter
from sync_core.processes import WorkerProcess, start_process
from sync_core.receiving.receiver import Receiver
from sync_core.report import SendReport, WorkerResult
from sync_core.sending.pending import PendingSend
from sync_core.sending.remedies import WorkerFailure
from sync_core.sending.sender import Sender
from sync_core.stores import Store, StoreOptions, store_transport
from sync_core.transports.answer import Answer
from sync_core.transports.channel import Channel, Message
from sync_core.transports.local_socket import LocalListener, connect_locally, same_user
from sync_core.transports.notice import Notice
from sync_core.transports.point_to_point import PointToPointTransport
from sync_core.transports.publisher import Publisher, Slot
from sync_core.transports.serving import Peer, ServingTransport, farewell, hello
from sync_core.transports.shared_memory import SharedMemory
from sync_core.transports.shared_slots import MappedSlots, SharedSlots
from sync_core.transports.transport import Delivery, ReceiverTransport, SenderTransport
from sync_core.weights.block import Block
from sync_core.weights.layout import Layout
from sync_core.weights.payload import Payload
from sync_core.weights.tensor_spec import TensorSpec
from sync_core.weights.update import Update
from sync_core.workers.launching import LaunchedGroup, LaunchedWorker, Launcher
from sync_core.workers.membership import MembershipEvent
from sync_core.workers.worker_group import WorkerGroup
from sync_core.workers.worker_status import WorkerState, WorkerStatus

if TYPE_CHECKING:
    from sync_core.collector import Collector
else:

    def __getattr__(name: str) -> object:
        # A collector needs tensordict, whose import takes as long as torch's; workers that only
        # receive weights need not wait for it.
        if name == "Collector":
            from sync_core.collector import Collector

            return Collector
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "Address",
    "AddressError",
    "Answer",
    "ApplyContext",
    "ApplyError",
    "Block",
    "CallOutcome",
    "CapacityError",
    "Channel",
    "ClosedError",
    "Collector",
    "CorruptionError",
    "Delivery",
    "Finding",
    "HookResultError",
    "LaunchedGroup",
    "LaunchedWorker",
    "Launcher",
    "Layout",
    "LayoutMismatchError",
    "LocalListener",
    "MappedSlots",
    "MembershipEvent",
    "Message",
    "ModelError",
    "ModelPathError",
    "NotAPluginError",
    "Notice",
    "OptionError",
    "Payload",
    "PayloadError",
    "Peer",
    "PendingSend",
    "PendingSendError",
    "PluginConflictError",
    "PluginError",
    "PluginImportError",
    "PluginNewError",
    "PluginNotFoundError",
    "PluginVersionError",
    "PointToPointTransport",
    "Publisher",
    "ReadbackError",
    "Receiver",
    "ReceiverTransport",
    "RemoteCall",
    "RemoteCallError",
    "Reporter",
    "RequirementError",
    "SendContext",
    "SendError",
    "SendReport",
    "Sender",
    "SenderLostError",
    "SenderTransport",
    "ServingTransport",
    "SharedMemory",
    "SharedSlots",
    "SkipContext",
    "Slot",
    "Store",
    "StoreOptions",
    "SyncError",
    "TensorSpec",
    "TransportContext",
    "TransportError",
    "UnknownHookError",
    "UnknownWorkerError",
    "Update",
    "WorkerError",
    "WorkerFailure",
    "WorkerGroup",
    "WorkerLostError",
    "WorkerProcess",
    "WorkerResult",
    "WorkerState",
    "WorkerStatus",
    "WorkerTimeoutError",
    "__version__",
    "check_count",
    "close_hosted",
    "connect_locally",
    "consolidate",
    "farewell",
    "hello",
    "hookimpl",
    "pickle_factory",
    "same_user",
    "start_process",
    "store_transport",
    "uninterrupted",
]
