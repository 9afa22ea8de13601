"""A worker process, seen from inside: it makes one object and runs calls on it, in order."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import current_process
from typing import Any

import torch

from sync_plugin_std.local.channel import close_when_forked, creator_of, open_process
from sync_plugin_std.workers import CallOutcome, close_hosted
from sync_plugin_std.workers.framing import Part, receive_message, send_message


@dataclass(frozen=True, slots=True)
class Startup:
    """The first message.

    Args:
        worker_id: given to the factory.
        authkey: the parent's, without which multiprocessing passes no file descriptors.
        torch_threads: at most so many threads for torch.
    """

    worker_id: int
    authkey: bytes
    torch_threads: int


# How long a worker whose parent has died, or that got SIGTERM, may take to leave its call and to
# close what it hosts, in seconds; an estimate.
_CLOSING = 5.0


class _Terminated(SystemExit):
    """SIGTERM came: the call in progress ends, what is hosted is closed, and the process ends."""


def main(calls_fd: int, lifeline_fd: int) -> None:
    """Serve the parent until it hangs up.

    Args:
        calls_fd: this end of the connection for calls and their outcomes.
        lifeline_fd: this end of a connection that the parent keeps open as long as it lives, and
            writes to when it is about to hang up.
    """
    # By its number, what this process starts and does not end can be ended after it.
    os.setpgid(0, 0)
    calls = socket.socket(fileno=calls_fd)
    lifeline = socket.socket(fileno=lifeline_fd)
    closing = threading.Event()
    # What this process starts must not keep them open: their end means that this one died.
    close_when_forked(calls, lifeline)
    for sock in calls, lifeline:
        sock.set_inheritable(False)
    os.register_at_fork(after_in_child=_be_terminated_at_once)
    signal.signal(signal.SIGTERM, _terminate)
    # A thread, so that not even a long call keeps this process alive without its parent.
    threading.Thread(
        target=_watch, args=(lifeline, closing), name="sync lifeline", daemon=True
    ).start()
    try:
        startup = receive_message(calls)
        if startup is not None:
            _, (pickled,) = startup
            _serve(calls, closing, pickle.loads(pickled))
    except _Terminated:
        # This ends the process group, which is this process and what it has started and not ended.
        _be_terminated_at_once()
        os.killpg(0, signal.SIGTERM)


def _watch(lifeline: socket.socket, closing: threading.Event) -> None:
    ready = select.poll()
    ready.register(lifeline, select.POLLIN)
    with suppress(ConnectionError, BlockingIOError):
        # It has made the pair. Something that it has forked may hold its end open.
        parent = open_process(creator_of(lifeline))
        if parent is not None:
            ready.register(parent, select.POLLIN)
        while ready.poll() and lifeline.recv(1, socket.MSG_DONTWAIT):
            closing.set()
    # The parent has died. The main thread leaves its call, also where that waits for something.
    main_thread = threading.main_thread()
    assert main_thread.ident is not None
    signal.pthread_kill(main_thread.ident, signal.SIGTERM)
    main_thread.join(_CLOSING)
    os.killpg(0, signal.SIGTERM)
    os._exit(1)


# Whether SIGTERM has come; a call may have turned what it raised into something else.
_terminated = threading.Event()


def _terminate(*_: object) -> None:
    # A second one interrupts nothing.
    signal.signal(signal.SIGTERM, _pass)
    # SIGALRM ends this process where closing takes longer.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _CLOSING)
    _terminated.set()
    raise _Terminated


def _pass(*_: object) -> None:
    """Do nothing; unlike ``SIG_IGN``, it is not inherited by programs that are started."""


def _be_terminated_at_once() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _serve(calls: socket.socket, closing: threading.Event, startup: Startup) -> None:
    current_process().authkey = startup.authkey
    # OMP_NUM_THREADS may ask for fewer.
    torch.set_num_threads(min(startup.torch_threads, torch.get_num_threads()))
    # The first call is the factory's, on the id; each later one is on what that made.
    message = receive_message(calls)
    if message is None:
        return
    number, factory = message
    made = _outcome(factory, startup.worker_id)
    _reply(calls, number, made.without_value())
    if made.failed:
        return
    try:
        while _serve_next(calls, closing, made.value):
            pass
        # Closing is not interrupted.
        signal.signal(signal.SIGTERM, _pass)
    except _Terminated:
        pass
    close_hosted(startup.worker_id, made.value)
    if _terminated.is_set():
        raise _Terminated


def _serve_next(calls: socket.socket, closing: threading.Event, hosted: Any) -> bool:
    message = receive_message(calls)
    if message is None or closing.is_set():
        return False
    number, call = message
    _reply(calls, number, _outcome(call, hosted))
    return True


def _outcome(call: Sequence[Part], hosted: object) -> CallOutcome:
    """Run a call.

    Raises:
        _Terminated: SIGTERM came meanwhile.
    """
    outcome = CallOutcome.of_pickled(call, hosted)
    if _terminated.is_set():
        raise _Terminated
    return outcome


def _reply(calls: socket.socket, number: int, outcome: CallOutcome) -> None:
    message = outcome.pickle()
    # Where the parent has died, the other thread notices it.
    with suppress(OSError):
        send_message(calls, number, message)
