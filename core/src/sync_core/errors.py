"""Every error the project raises: what went wrong, for which worker, and what to type."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sync_core.report import SendReport

__all__ = [
    "AddressError",
    "ApplyError",
    "CapacityError",
    "ClosedError",
    "CorruptionError",
    "HookResultError",
    "IncrementError",
    "LayoutMismatchError",
    "LoadError",
    "ModelError",
    "ModelPathError",
    "NotAPluginError",
    "OptionError",
    "PayloadError",
    "PendingSendError",
    "PluginConflictError",
    "PluginError",
    "PluginImportError",
    "PluginNewError",
    "PluginNotFoundError",
    "PluginVersionError",
    "ReadbackError",
    "RemoteCallError",
    "RequirementError",
    "SendError",
    "SenderLostError",
    "SyncError",
    "TransportError",
    "UnknownHookError",
    "UnknownWorkerError",
    "WorkerError",
    "WorkerLostError",
    "WorkerTimeoutError",
]


def printable(text: str) -> str:
    """Return a text that can be printed: a lone surrogate, which JSON carries, is written out."""
    return text.encode(errors="backslashreplace").decode()


class SyncError(Exception):
    """Base of every error raised by sync_core and its plugins."""

    def __str__(self) -> str:
        return printable(super().__str__())


class PluginError(SyncError):
    """A plugin could not be found, loaded or used."""


class PluginNotFoundError(PluginError, LookupError):
    """No installed distribution provides the name."""


class PluginConflictError(PluginError):
    """Two installed distributions claim one name."""


class PluginImportError(PluginError, ImportError):
    """The plugin is installed, but importing it failed; the cause is chained."""


class PluginVersionError(PluginError, ImportError):
    """The plugin was made for an older or a newer core than the one that is installed."""


class RequirementError(PluginError, ImportError):
    """The plugin cannot be made before something else is installed; the message says what to type.

    Raised by the plugin itself, in its constructor.
    """


class NotAPluginError(PluginError, TypeError):
    """The object found has none of the hooks that its kind needs."""


class UnknownHookError(PluginError, TypeError):
    """The plugin implements a hook that does not exist, or with a signature that does not fit."""


class HookResultError(PluginError, TypeError):
    """A plugin's hook returned something that the hook does not allow."""


class PluginNewError(PluginError, ValueError):
    """A plugin that cannot be written: its name is invalid or taken, or its folder exists."""


class OptionError(SyncError, TypeError):
    """An option that the scheme or worker group does not have, or of another type than it takes.

    Attributes:
        unknown: the name of an option that does not exist; None for other errors.
        known: the names of the options that exist.
    """

    unknown: str | None = None
    known: tuple[str, ...] = ()


class ModelError(SyncError, ValueError):
    """The model cannot be synchronised as it is: missing, empty, lazy or of an unsupported kind."""


class ModelPathError(ModelError):
    """A string reference such as ``"env.transform[0]"`` leads nowhere."""


class LayoutMismatchError(SyncError, ValueError):
    """Names, shapes or dtypes of weights and model differ; nothing was written."""


class PayloadError(SyncError, ValueError):
    """Bytes that are not a payload, or not the payload they claim to be."""


class UnknownWorkerError(SyncError, ValueError):
    """A worker id that the sender does not have."""


class PendingSendError(SyncError, RuntimeError):
    """A send is pending where none may be, or none is where one must be."""


class ClosedError(SyncError, RuntimeError):
    """The sender, receiver, group or collector was closed."""


class AddressError(SyncError, ValueError):
    """An address that cannot be used here: another process, another host, or another model."""


class CapacityError(SyncError, MemoryError):
    """Not enough shared memory, or every slot is held by a reader."""


class SenderLostError(SyncError, ConnectionError):
    """The sender closed, died, or gave this worker's place to another receiver."""


class WorkerError(SyncError):
    """One worker's failure.

    Args:
        worker_id: the worker that failed.
        message: one sentence that says how.
    """

    def __init__(self, worker_id: int, message: str) -> None:
        message = printable(message)
        super().__init__(worker_id, message)
        self.worker_id = worker_id
        self.message = message

    def __str__(self) -> str:
        return f"worker {self.worker_id}: {self.message}"


class WorkerTimeoutError(WorkerError, TimeoutError):
    """The worker gave no answer before the deadline."""


class WorkerLostError(WorkerError, ConnectionError):
    """The worker died or disconnected."""


class TransportError(WorkerError):
    """The scheme's transport raised, so that no worker was sent the version; none is at fault."""


class ApplyError(WorkerError):
    """The worker raised while it applied the weights; it keeps the version it had."""


class CorruptionError(ApplyError):
    """Weights changed on their way: a checksum did not match; the worker keeps the version it had.

    Only raised where the sender was given ``verify=``.
    """


class IncrementError(WorkerError):
    """The worker could not use an increment: it lacks the base, or the result has other bits.

    It keeps the version it had, and is sent the whole version in the same send.
    """


class ReadbackError(WorkerError):
    """The worker's model does not hold what was sent, though it was written: it is known bad.

    Its version does not count as committed, and the next send writes it again. Only raised where
    the sender was given ``verify="readback"``, or a layer leaves out tensors that the worker does
    not hold as the sender does.
    """


class LoadError(WorkerError):
    """The worker's own ``load`` function raised: its model may hold parts of a version.

    It is known bad, and gets a whole version with the next send.
    """


class RemoteCallError(WorkerError):
    """A function called on a worker raised; the message carries the remote traceback."""


class SendError(SyncError):
    """Some workers were not updated. The others, if any, were, before this was raised.

    Args:
        report: the result for every worker.
    """

    def __init__(self, report: SendReport) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        report = self.report
        failed, updated, addressed = report.failed, report.updated, len(report.workers)
        whole = len(failed) + len(updated) == addressed
        have_it = "the others have it" if whole else f"{len(updated)} committed it"
        head = f"version {report.version} did not reach {len(failed)} of {addressed} workers"
        head += f" ({have_it}):" if updated else ":"
        return "\n".join([head, *(f"  {result.error}" for result in failed.values())])
