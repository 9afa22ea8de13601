"""Calls of workers: the request, its outcome, and waiting for several."""

from __future__ import annotations

import functools
import io
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch

from sync_core.errors import RemoteCallError, WorkerLostError, WorkerTimeoutError
from sync_plugin_std.workers.tracebacks import describe_failure

# From this many bytes on, leaving an array out of the pickle pays for the system calls it takes.
_BIG = 1 << 16

Buffer = bytes | bytearray | memoryview


def dumps(value: object) -> list[bytes | memoryview]:
    """Pickle a value into parts: the pickle, then the memory of each big array in it.

    Functions and classes of ``__main__`` travel by value. The arrays are not copied: what is
    written to them before the parts are sent is sent.
    """
    arrays: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes < _BIG:
            return True
        arrays.append(memory)
        return False

    return [_pickle(value, keep_inside), *arrays]


def dumps_copy(value: object) -> list[bytearray]:
    """Pickle a value as it is now, into parts."""
    return [bytearray(part) for part in dumps(value)]


def loads(parts: Sequence[Buffer]) -> Any:
    """The value that was pickled. Its arrays take the parts over as their memory."""
    pickled, *arrays = parts
    return pickle.loads(pickled, buffers=arrays)


def _pickle(value: object, keep_inside: Callable[[pickle.PickleBuffer], bool]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL, keep_inside).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            return _reduce(obj)
        return super().reducer_override(obj)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether values, dtype, shape and strides say everything about the tensor."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__
    )


def _reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
    # A clone keeps the order of the dimensions in memory (channels_last) but not the gaps.
    dense = tensor if tensor.is_contiguous() else tensor.clone()
    values = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    content = pickle.PickleBuffer(values.numpy().data)
    return _rebuild, (content, tensor.dtype, tuple(dense.shape), dense.stride())


def _rebuild(
    content: bytearray, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    if not content:
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    return torch.frombuffer(content, dtype=dtype).as_strided(shape, stride)


def close_hosted(worker_id: int, hosted: object) -> None:
    """Call ``close()`` of a hosted object whose class has one; a warning tells if that raises.

    For authors of worker groups: it is the last call that a worker runs, where all others ran.
    As with special methods, an attribute of the instance does not count.

    Args:
        worker_id: the worker, which the warning names.
        hosted: what its factory made.

    Example:
        >>> class Lamp:
        ...     def close(self):
        ...         print("off")
        >>> close_hosted(0, Lamp())
        off
        >>> close_hosted(0, ["nothing to close"])
    """
    close: Callable[[Any], object] | None = getattr(type(hosted), "close", None)
    if close is None:
        return
    try:
        close(hosted)
    except (Exception, SystemExit) as error:
        summary = traceback.format_exception_only(error)[0].strip()
        # Calls in transfer when the worker was ended are not among them.
        frames = traceback.format_exception(error, chain=error.__cause__ is not None)
        warnings.warn(
            f"worker {worker_id}: {type(hosted).__name__}.close raised {summary}\n"
            + "".join(frames).rstrip(),
            stacklevel=2,
        )


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The outcome of a call: a value, or an error.

    Args:
        value: what the function returned.
        verdict: what the function did instead; a sentence without its subject:
            ``raised KeyError: 'a'``.
        traceback: where, as text.
        cause: the exception, where there is one that could travel.

    Example:
        >>> from sync_plugin_std.workers import RemoteCall
        >>> call = RemoteCall(0, divmod)
        >>> message = call.pickle((3,), {})
        >>> reply = CallOutcome.of_pickled(message, 7).pickle()  # in the worker, which hosts 7
        >>> call.finish(CallOutcome.unpickle(reply))
        >>> call.future.result()
        (2, 1)
    """

    value: Any = None
    verdict: str | None = None
    traceback: str = ""
    cause: BaseException | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> CallOutcome:
        """Call the function. Whatever it raises, SystemExit included, is an outcome too."""
        try:
            return cls(function(*args, **kwargs))
        except BaseException as error:
            return cls.failure("raised", error)

    @classmethod
    def of_pickled(cls, message: Sequence[Buffer], hosted: object) -> CallOutcome:
        """Make the call that `RemoteCall.pickle` or `pickle_factory` has pickled.

        Args:
            message: the parts; arrays among the arguments take them over as their memory.
            hosted: the first argument; the worker's id for a factory.
        """
        try:
            function, args, kwargs = loads(message)
        except Exception as error:
            return cls.failure("or its arguments cannot be unpickled in the worker:", error)
        return cls.of(function, hosted, *args, **kwargs)

    @classmethod
    def failure(cls, verdict: str, error: BaseException) -> CallOutcome:
        """A failure by an exception, where it was caught."""
        summary, frames = describe_failure(error)
        return cls(None, f"{verdict} {summary}", frames, error)

    @property
    def failed(self) -> bool:
        """Return whether there is no value."""
        return self.verdict is not None

    def without_value(self) -> CallOutcome:
        """The same, with nothing of what was returned; for a factory, whose object stays."""
        return replace(self, value=None)

    def pickle(self) -> list[bytes | memoryview]:
        """The outcome as it is to travel, or as a failure that can; big arrays are not copied."""
        try:
            return dumps((self.value, self.verdict, self.traceback, _pickle_cause(self.cause)))
        except Exception as error:
            return self.failure("returned a value that cannot be pickled:", error).pickle()

    @classmethod
    def unpickle(cls, reply: Sequence[Buffer]) -> CallOutcome:
        """Unpickle a value. Arrays in it take the parts over as their memory."""
        try:
            value, verdict, where, cause = loads(reply)
        except Exception as error:
            return cls.failure("returned a value that cannot be unpickled here:", error)
        return cls(value, verdict, where, _unpickle_cause(cause))


def _pickle_cause(cause: BaseException | None) -> list[bytearray] | None:
    try:
        return None if cause is None else dumps_copy(cause)
    except Exception:
        # The traceback travels in any case; few exceptions hold what cannot.
        return None


def _unpickle_cause(pickled: list[bytearray] | None) -> BaseException | None:
    try:
        cause = None if pickled is None else loads(pickled)
    except Exception:
        # An exception class need not be able to travel; the text says it all.
        return None
    return cause if isinstance(cause, BaseException) else None


@dataclass(frozen=True, slots=True, eq=False)
class RemoteCall:
    """A call that a worker is to run, on its caller's side.

    Args:
        worker_id: the worker, which errors name.
        function: what it is to run.

    Example:
        >>> call = RemoteCall(3, list.pop)
        >>> call.finish(CallOutcome.of(list.pop, []))
        >>> print(str(call.future.exception()).splitlines()[0])
        worker 3: list.pop raised IndexError: pop from empty list
    """

    worker_id: int
    function: Callable[..., Any]
    #: Ends with the call. It cannot be cancelled.
    future: Future[Any] = field(default_factory=Future, init=False)

    def __post_init__(self) -> None:
        # Once posted, a call cannot be taken back: cancel() is to answer False.
        self.future.set_running_or_notify_cancel()

    @property
    def name(self) -> str:
        """Return the function's name for messages."""
        return _name_of(self.function)

    def pickle(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[bytearray] | None:
        """The call as it is now, for `CallOutcome.of_pickled`; the arguments are copied.

        Returns:
            Parts, of which the first is a pickle and each other the memory of a big array in it.
            None when it cannot be pickled; the future has ended by then, and says why.
        """
        try:
            return dumps_copy((self.function, args, kwargs))
        except Exception as error:
            self.finish(CallOutcome.failure("or its arguments cannot be pickled:", error))
            return None

    def finish(self, outcome: CallOutcome) -> None:
        """End the future: with the value, or with `RemoteCallError`."""
        if not outcome.failed:
            self.future.set_result(outcome.value)
            return
        message = f"{self.name} {outcome.verdict}\n{outcome.traceback}".rstrip()
        error = RemoteCallError(self.worker_id, message)
        error.__cause__ = outcome.cause
        self.future.set_exception(error)

    def lose(self, message: str, cause: BaseException | None = None) -> None:
        """End the future with `WorkerLostError`, which has that message."""
        error = WorkerLostError(self.worker_id, message)
        error.__cause__ = cause
        self.future.set_exception(error)


def pickle_factory(factory: Callable[[int], Any], worker_id: int) -> list[bytearray]:
    """A factory, for `CallOutcome.of_pickled` in each worker.

    Args:
        factory: makes what a worker hosts.
        worker_id: the first of the workers, which the error names.

    Raises:
        RemoteCallError: it cannot be pickled.
    """
    try:
        return dumps_copy((factory, (), {}))
    except Exception as error:
        message = f"was not started, its factory {_name_of(factory)} cannot be pickled: {error}"
        raise RemoteCallError(worker_id, message) from error


def _name_of(function: Callable[..., Any]) -> str:
    if isinstance(function, functools.partial):
        return _name_of(function.func)
    return getattr(function, "__qualname__", None) or repr(function)


def gather(futures: dict[int, Future[Any]], timeout: float, what: str) -> list[Any]:
    """The results of calls to workers, in the order given.

    Args:
        futures: the calls, by worker.
        timeout: seconds for all of them together.
        what: what the workers were to do, for the message.

    Raises:
        WorkerTimeoutError: a call did not end in time.
        WorkerError: a call failed.
    """
    deadline = time.monotonic() + timeout
    results = []
    for worker_id, future in futures.items():
        if not wait([future], max(0.0, deadline - time.monotonic())).done:
            raise WorkerTimeoutError(worker_id, f"did not {what} within {timeout:g} s")
        results.append(future.result())
    return results
