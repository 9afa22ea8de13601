"""Weight synchronisation for reinforcement learning and RLHF, as a plugin framework."""

from typing import TYPE_CHECKING

from sync_core.address import Address
from sync_core.answer import Answer
from sync_core.block import Block
from sync_core.calls import CallOutcome, RemoteCall, pickle_factory
from sync_core.channel import Channel, Message
from sync_core.consolidate import consolidate
from sync_core.contexts import ApplyContext, SendContext, SkipContext, TransportContext
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
    UnknownHookError,
    UnknownWorkerError,
    WorkerError,
    WorkerLostError,
    WorkerTimeoutError,
)
from sync_core.finding import Finding
from sync_core.hookspecs import hookimpl
from sync_core.launching import LaunchedGroup, LaunchedWorker, Launcher
from sync_core.layout import Layout
from sync_core.membership import MembershipEvent
from sync_core.notice import Notice
from sync_core.payload import Payload
from sync_core.pending import PendingSend
from sync_core.point_to_point import PointToPointTransport
from sync_core.processes import WorkerProcess, start_process
from sync_core.publisher import Publisher, Slot
from sync_core.receiver import Receiver
from sync_core.remedies import WorkerFailure
from sync_core.report import SendReport, WorkerResult
from sync_core.reporter import Reporter
from sync_core.sender import Sender
from sync_core.serving import Peer, ServingTransport, hello
from sync_core.stores import Store, StoreOptions, store_transport
from sync_core.tensor_spec import TensorSpec
from sync_core.transport import Delivery, ReceiverTransport, SenderTransport
from sync_core.update import Update
from sync_core.worker_status import WorkerState, WorkerStatus
from sync_core.workers import WorkerGroup

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
    "SkipContext",
    "Slot",
    "Store",
    "StoreOptions",
    "SyncError",
    "TensorSpec",
    "TransportContext",
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
    "consolidate",
    "hello",
    "hookimpl",
    "pickle_factory",
    "start_process",
    "store_transport",
]
