"""Every error the project raises: what went wrong, for which worker, and what to type."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sync_core.printable import printable

if TYPE_CHECKING:
    from sync_core.report import SendReport

__all__ = [
    "AddressError",
    "ApplyError",
    "CapacityError",
    "ClosedError",
    "CorruptionError",
    "HookResultError",
    "LayoutMismatchError",
    "LoadError",
    "ModelError",
    "ModelPathError",
    "NotAPluginError",
    "OptionError",
    "PausedError",
    "PayloadError",
    "PendingSendError",
    "PluginConflictError",
    "PluginError",
    "PluginImportError",
    "PluginNewError",
    "PluginNotFoundError",
    "PluginVersionError",
    "PrepareTimeoutError",
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


#: The weights of a model after a failure: the version that it had, the new one, or anything.
ModelState = Literal["kept", "new", "bad"]


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
    """Raised where a call needs that no send is pending, or that one is."""


class PausedError(SyncError, RuntimeError):
    """A send was called in a block of `Sender.paused`; nothing was sent."""


class PrepareTimeoutError(SyncError, TimeoutError):
    """The weights were not ready by the deadline, so that no worker was offered the version.

    The message names what took longest: a layer, a tensor of a stream, or reading the model. No
    worker is at fault, so ``on_failure`` leaves them alone.
    """


class ClosedError(SyncError, RuntimeError):
    """The sender, receiver, group or collector was closed."""


class AddressError(SyncError, ValueError):
    """An address that cannot be used here: another process, another host, or another model."""


class CapacityError(SyncError, MemoryError):
    """Not enough memory, or every slot is held by a reader."""


class SenderLostError(SyncError, ConnectionError):
    """The sender closed, died, or gave this worker's place to another receiver."""


class WorkerError(SyncError):
    """One worker's failure.

    A subclass that declares the attribute ``failure`` travels: where a worker raises it while it
    applies a version, the sender reports the same class. Its constructor takes these arguments.

    Args:
        worker_id: the worker that failed.
        message: one sentence that says how.

    Attributes:
        failure: the word for the class in a worker's answer; no other class has it. A sender whose
            process does not know the word reports an `ApplyError`, with the same ``model_state``.
        model_state: what the worker's model holds: ``"kept"``, the version that it had; ``"new"``,
            the version that was sent; ``"bad"``, neither. A bad worker is not current, and the next
            send is whole for it.

    Example:
        >>> class TooLargeError(WorkerError):
        ...     failure = "too-large"
        >>> from sync_core import Answer
        >>> answer = Answer.refusal(3, TooLargeError(0, "no memory"))
        >>> type(answer.to_error(worker_id=0)).__name__, answer.model_state
        ('TooLargeError', 'kept')
    """

    failure: ClassVar[str] = ""
    model_state: ModelState = "kept"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        word = vars(cls).get("failure")
        if word is None:
            return
        if not (isinstance(word, str) and _FAILURE.fullmatch(word)):
            raise TypeError(
                f"failure of {cls.__name__} must be a word of at most 64 of a-z, 0-9 and -, got "
                f"{word!r}"
            )
        known = _failures.setdefault(word, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"failure {word!r} of {cls.__name__} is that of {known.__module__}."
                f"{known.__qualname__}; give another word, such as the plugin's name before it"
            )
        _failures[word] = cls

    def __init__(self, worker_id: int, message: str) -> None:
        message = printable(message)
        super().__init__(worker_id, message)
        self.worker_id = worker_id
        self.message = message

    def __str__(self) -> str:
        return f"worker {self.worker_id}: {self.message}"


# The pattern of the words of failures, and the classes by their words.
_FAILURE = re.compile("[a-z0-9-]{1,64}")
_failures: dict[str, type[WorkerError]] = {}


def failure_named(word: str) -> type[WorkerError] | None:
    """Return the class that declares this word as its ``failure``; None where none here does."""
    return _failures.get(word)


class WorkerTimeoutError(WorkerError, TimeoutError):
    """The worker gave no answer before the deadline."""


class WorkerLostError(WorkerError, ConnectionError):
    """The worker died or disconnected."""


class TransportError(WorkerError):
    """The scheme's transport raised, so that no worker was sent the version; none is at fault."""


class ApplyError(WorkerError):
    """The worker raised while it applied the weights; it keeps the version it had.

    Where a layer or ``on_commit`` raised after the weights were loaded, the worker has the new
    version: ``error.model_state`` is ``"new"``.
    """

    failure = "apply"


class CorruptionError(ApplyError):
    """Weights changed on their way: a checksum did not match; the worker keeps the version it had.

    Only raised where a layer such as ``"checksum"`` compares.
    """

    failure = "corruption"


class ReadbackError(WorkerError):
    """The worker's model does not hold what was sent, though it was written: it is known bad.

    Its version does not count as committed, and the next send writes it again. Only raised where
    the sender has the layer ``"readback"``, or a layer leaves out tensors that the worker does
    not hold as the sender does.
    """

    failure = "readback"
    model_state = "bad"


class LoadError(WorkerError):
    """The worker's own ``load`` function raised, or left tensors out: its model may be in parts.

    It is known bad, and gets a whole version with the next send.
    """

    failure = "load"
    model_state = "bad"


class RemoteCallError(WorkerError):
    """A function called on a worker raised; the message carries the remote traceback."""


class SendError(SyncError):
    """Some workers were not updated. The others, if any, were, before this was raised.

    Also raised by the send in which ``on_failure`` drops the last worker, and by each later one
    until a worker is added; `SendReport.no_worker_left` is True then.

    Args:
        report: the result for every worker.
    """

    def __init__(self, report: SendReport) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        report = self.report
        failed = {i: r for i, r in report.workers.items() if r.error is not None}
        if not report.no_worker_left:
            failed = report.failed
        updated, addressed = report.updated, len(report.workers)
        whole = len(failed) + len(updated) == addressed
        have_it = "the others have it" if whole else f"{len(updated)} committed it"
        head = f"version {report.version} did not reach {len(failed)} of {addressed} workers"
        head += f" ({have_it}):" if updated else ":"
        errors = (str(result.error).replace("\n", "\n  ") for result in failed.values())
        lines = [head, *(f"  {error}" for error in errors)]
        if report.no_worker_left:
            lines.append(
                "on_failure has dropped the last worker, so that no worker would get a version; "
                "type worker_id = sender.add_worker(), and give sender.address(worker_id) to a new "
                "Receiver (sender.add_worker(worker=…) if the sender calls its workers)"
            )
        return "\n".join(lines)
