"""A worker process, seen from inside: it makes one object and runs calls on it, in order."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from dataclasses import dataclass
from multiprocessing import current_process
from typing import Any

import torch

from sync_core.workers import CallOutcome, close_hosted
from sync_plugin_std.framing import receive_message, send_message


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


def main(calls_fd: int, lifeline_fd: int) -> None:
    """Serve the parent until it hangs up.

    Args:
        calls_fd: this end of the connection for calls and their outcomes.
        lifeline_fd: this end of a connection that the parent keeps open as long as it lives, and
            writes to when it is about to hang up.
    """
    calls = socket.socket(fileno=calls_fd)
    lifeline = socket.socket(fileno=lifeline_fd)
    closing = threading.Event()
    for sock in calls, lifeline:
        # What this process starts must not keep them open: their end means that this one died.
        sock.set_inheritable(False)
        os.register_at_fork(after_in_child=sock.close)
    # A thread, so that not even a long call keeps this process alive without its parent.
    threading.Thread(
        target=_watch, args=(lifeline, closing), name="sync lifeline", daemon=True
    ).start()
    startup = receive_message(calls)
    if startup is not None:
        _, (pickled,) = startup
        _serve(calls, closing, pickle.loads(pickled))


def _watch(lifeline: socket.socket, closing: threading.Event) -> None:
    while lifeline.recv(1):
        closing.set()
    os._exit(1)


def _serve(calls: socket.socket, closing: threading.Event, startup: Startup) -> None:
    current_process().authkey = startup.authkey
    # OMP_NUM_THREADS may ask for fewer.
    torch.set_num_threads(min(startup.torch_threads, torch.get_num_threads()))
    # The first call is the factory's, on the id; each later one is on what that made.
    message = receive_message(calls)
    if message is None:
        return
    number, factory = message
    made = CallOutcome.of_pickled(factory, startup.worker_id)
    _reply(calls, number, made.without_value())
    if made.failed:
        return
    while _serve_next(calls, closing, made.value):
        pass
    close_hosted(startup.worker_id, made.value)


def _serve_next(calls: socket.socket, closing: threading.Event, hosted: Any) -> bool:
    message = receive_message(calls)
    if message is None or closing.is_set():
        return False
    number, call = message
    _reply(calls, number, CallOutcome.of_pickled(call, hosted))
    return True


def _reply(calls: socket.socket, number: int, outcome: CallOutcome) -> None:
    message = outcome.pickle()
    try:
        send_message(calls, number, message)
    except OSError:
        os._exit(1)
