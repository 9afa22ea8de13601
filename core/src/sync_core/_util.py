"""Interrupts, locks, finalizers and clocks."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Finalize = weakref.finalize[Any, Any]
else:
    _Finalize = weakref.finalize

# What `signal.getsignal` and `signal.signal` call. They convert numbers to enums and back, which
# takes most of the time of a short block.
_handler_of = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
_set_handler = getattr(sys.modules.get("_signal"), "signal", signal.signal)


class uninterrupted:  # noqa: N801 - it is used as `contextlib.suppress` is
    """Delay Ctrl-C to the end of a ``with`` block, which must be short.

    Python looks for it between almost any two calls of the main thread. Where the other side is
    notified in one of them and it is recorded in the next, both would disagree from then on.

    Example:
        >>> done = []
        >>> try:
        ...     with uninterrupted():
        ...         signal.raise_signal(signal.SIGINT)
        ...         done.append("all of it")
        ... except KeyboardInterrupt:
        ...     done.append("and then Ctrl-C")
        >>> done
        ['all of it', 'and then Ctrl-C']
    """

    _handler: Callable[..., Any] | None = None
    _came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        # Only where Python itself handles the signal, and not in a block inside such a block.
        handler = _handler_of(signal.SIGINT)
        if not callable(handler) or isinstance(handler, uninterrupted):
            return
        self._handler = handler
        try:
            _set_handler(signal.SIGINT, self)
        except ValueError:
            self._handler = None  # only the main thread is interrupted, and this is another

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._handler is not None:
            _set_handler(signal.SIGINT, self._handler)
            if self._came is not None:
                self._handler(*self._came)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the signal."""
        self._came = number, frame


# How long closing waits for a thread that loads what it has received, in seconds.
_PATIENCE = 2.0


class Exclusive:
    """A lock for turns of one thread at a time, which may begin another one within a turn."""

    def __init__(self) -> None:
        #: For ``with``: Ctrl-C inside of methods written in Python would leave it taken.
        self.lock = threading.RLock()
        #: Whether the thread that holds it waits for what may never come.
        self.waiting = False
        _turns.add(self)

    def acquire(self, timeout: float) -> bool:
        """Begin a turn; False where another thread's lasts longer than ``timeout`` seconds."""
        return self.lock.acquire(timeout=min(max(0.0, timeout), threading.TIMEOUT_MAX))

    def release(self) -> None:
        """End a turn."""
        self.lock.release()

    @contextmanager
    def last(self, wake: Callable[[], None]) -> Iterator[None]:
        """Run a ``with`` block after every turn has ended.

        Args:
            wake: ends the wait of the thread that holds the lock.
        """
        alone = self.lock.acquire(blocking=False)
        # Interrupted by a signal, whose handler closes, this thread may wait itself.
        if not alone or self.waiting:
            wake()
        if not alone:
            alone = self.lock.acquire(timeout=_PATIENCE)
        try:
            yield
        finally:
            if alone:
                self.lock.release()


# Those of this process.
_turns: weakref.WeakSet[Exclusive] = weakref.WeakSet()


def _forget_threads() -> None:
    """In a forked process no thread receives, whatever the parent's threads do."""
    for turn in _turns:
        turn.lock, turn.waiting = threading.RLock(), False


os.register_at_fork(after_in_child=_forget_threads)


def release_with(
    owner: object, release: Callable[..., Any], *args: Any
) -> weakref.finalize[Any, Any]:
    """Call ``release(*args)`` when the owner is forgotten, when the process ends, or when called.

    As `weakref.finalize`, except that a process which was forked from this one does not: it has
    the owner in its memory, but what the owner holds is not its to release, locks may be held by
    threads that it lacks, and connections are the parent's.

    A release that Ctrl-C has interrupted is called again, by the next of these; so calling
    ``release`` again must be allowed.

    The garbage collector may run in a thread of a library such as Ray, which waits for that very
    thread in its own calls. There, another thread calls ``release``.

    Args:
        owner: the object that holds it; not kept alive by ``release`` or ``args``.
        release: what to call, once.
        args: its arguments.

    Example:
        >>> class Owner: ...
        >>> owner = Owner()
        >>> release = release_with(owner, print, "released")
        >>> del owner
        released
        >>> release()
    """
    return _Finalizer(owner, _release, os.getpid(), release, args)


class _Finalizer(_Finalize):
    """Stays alive where an explicit call of it is interrupted."""

    __slots__ = ()

    def __call__(self, owner: object = None) -> Any:
        alive = self.peek()
        if alive is None:
            return super().__call__(owner)
        _, function, args, _ = alive
        try:
            result = function(*args)
        except Exception:
            self.detach()
            raise
        self.detach()
        return result


def _release(process: int, release: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if os.getpid() != process:
        return
    if _is_of_a_library():
        threading.Thread(target=release, args=args, name="sync-release").start()
    else:
        release(*args)


def _is_of_a_library() -> bool:
    """Return whether this thread was not started by `threading`."""
    dummy = getattr(threading, "_DummyThread", ())
    return isinstance(threading.current_thread(), dummy)


class Stopwatch:
    """Runs in ``with`` blocks, of one thread at a time.

    Example:
        >>> stopwatch = Stopwatch()
        >>> for _ in range(2):
        ...     with stopwatch:
        ...         time.sleep(0.01)
        >>> stopwatch.seconds > 0.02
        True
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.seconds += time.perf_counter() - self._since


_BOOT = Path("/proc/sys/kernel/random/boot_id")


@cache
def clock_id() -> str | None:
    """Return a name of the clock: equal in processes whose `time.perf_counter` agrees.

    On Linux that clock is ``CLOCK_MONOTONIC``: one for all processes of a host, but for those in
    another time namespace (https://man7.org/linux/man-pages/man7/time_namespaces.7.html). None on
    other systems, where nothing says which processes share theirs.

    Example:
        >>> clock_id() == clock_id()
        True
    """
    try:
        boot = _BOOT.read_text().strip()
    except OSError:
        return None
    namespace = ""
    with suppress(OSError):  # there is one for all before Linux 5.6
        namespace = str(Path("/proc/self/ns/time").readlink())
    kind = time.get_clock_info("perf_counter").implementation
    # A digest, since a host's boot id is confidential.
    return hashlib.sha256(f"{boot} {namespace} {kind}".encode()).hexdigest()[:16]
