"""Tries one scheme: sends to real workers, and checks the weights that arrive."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from types import MappingProxyType
from typing import Any

from torch import nn

from sync_core import Sender, WorkerGroup, registry
from sync_core.errors import OptionError, SendError, SyncError
from sync_plugin_std.workers import choose_group, gather, shares_policy
from sync_tools.bench import SETTLE_SECONDS, BenchWorker, make_model, mark
from sync_tools.commands.doctor import MODEL, VERSIONS, WORKERS, Outcome
from sync_tools.commands.findings import check_scheme
from sync_tools.commands.scheme_options import format_scheme_options

# Both fit into `doctor.GRACE`, between the deadline and the kill.
_STOPPING = 2.0
_EXPLAINING = 0.5
_TRACEBACK = "Traceback (most recent call last):"


def answer(fd: int, scheme: str, timeout: str) -> None:
    """Try a scheme in this process, which was started for the trial, and send the outcome.

    Sends a message when the process has started, then the scheme's findings, and then the outcome.

    Args:
        fd: a connection to the parent process, which sends the scheme's options. When the parent
            closes it, this process and everything that it started are killed.
        scheme: the scheme's name.
        timeout: deadline in seconds.
    """
    # Its own process group, so that everything that the scheme starts can be killed.
    os.setsid()
    os.set_inheritable(fd, False)
    # The output of plugins must not mix with this program's, which may be JSON.
    os.dup2(2, 1)
    connection = Connection(fd)
    options = connection.recv()
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    connection.send(None)
    connection.send(check_scheme(scheme, options=options))
    connection.send(try_scheme(scheme, float(timeout), options))


def _end_with(connection: Connection) -> None:
    connection.poll(None)
    os.killpg(0, signal.SIGKILL)


def try_scheme(
    scheme: str, timeout: float, options: Mapping[str, Any] = MappingProxyType({})
) -> Outcome:
    """Send a few versions of a small model by a scheme, and check the weights that arrive.

    Args:
        scheme: the scheme's name.
        timeout: deadline in seconds; a scheme may ignore it.
        options: the scheme's options. A scheme that refuses them has failed.

    Example:
        >>> try_scheme("none", 30.0).verdict
        'ok'
    """
    deadline = time.monotonic() + timeout
    try:
        return Outcome("ok", 1e3 * _median_seconds(scheme, timeout, options))
    except OptionError as error:
        return Outcome("failed" if options else "skipped", problem=str(error))
    except Exception as error:
        typed = f"{scheme}{format_scheme_options(options)}"
        problem = _sentence(error, typed)
        if time.monotonic() >= deadline:
            more_time = f"sync-core doctor {typed} --timeout {math.ceil(4 * timeout)}"
            problem += f"; if this machine is slow, type: {more_time}"
        return Outcome("failed", problem=problem)


def _median_seconds(scheme: str, timeout: float, options: Mapping[str, Any]) -> float:
    deadline = time.monotonic() + timeout
    group_type = choose_group([scheme], None)
    source = make_model(MODEL)
    host = partial(_host, source if shares_policy(scheme) else None)
    seconds = []
    with ExitStack() as stack:
        group = group_type(host, WORKERS, timeout=timeout)
        stack.callback(group.stop, _STOPPING)
        left = _until(deadline)
        sender = Sender(scheme, source, num_workers=WORKERS, timeout=left, **options)
        stack.enter_context(sender)
        connects = {
            i: group.call(i, BenchWorker.connect, sender.address(i)) for i in group.worker_ids
        }
        gather(connects, left, "connect to the sender")
        for version in range(1, VERSIONS + 1):
            mark(source, version)
            seconds.append(_send(sender, group, _until(deadline)))
            checks = {i: group.call(i, BenchWorker.has_arrived, version) for i in group.worker_ids}
            if not all(gather(checks, _until(deadline), "check what arrived")):
                raise SyncError(_lie(scheme, version))
    return median(seconds)


def _host(shared: nn.Module | None, worker_id: int) -> BenchWorker:
    del worker_id
    worker = BenchWorker(MODEL)
    if shared is not None:
        worker.model = shared
    return worker


def _lie(scheme: str, version: int) -> str:
    plugin = registry.find(registry.SCHEMES, scheme)
    return (
        f"{plugin.describe()} confirmed version {version}, but workers have other weights than "
        f"those sent; do not use it; for a newer one, {registry.how_to_update(plugin.distribution)}"
    )


def _until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _send(sender: Sender, group: WorkerGroup, timeout: float) -> float:
    calls: dict[int, Future[int | None]] = {}
    # Parallel workers wait for the version; an inline worker would wait forever.
    if "parallel" in group.capabilities:
        calls = _ask(group)
        time.sleep(SETTLE_SECONDS)
    pending = sender.send_async(timeout=timeout)
    calls = calls or _ask(group)
    try:
        seconds = pending.wait().seconds
    except SendError:
        # A worker's own error is more helpful than the missing acknowledgement.
        for call in wait(calls.values(), _EXPLAINING, FIRST_EXCEPTION).done:
            call.result()
        raise
    gather(calls, timeout, "receive")
    return seconds


def _ask(group: WorkerGroup) -> dict[int, Future[int | None]]:
    return {i: group.call(i, BenchWorker.receive) for i in group.worker_ids}


def _sentence(error: Exception, typed: str) -> str:
    """Return the first sentence of an error, and how to see the whole traceback."""
    if isinstance(error, SendError):
        return _sentence(next(r.error for r in error.report.failed.values() if r.error), typed)
    lines = str(error).splitlines() or [""]
    sentence = lines[0].replace(_TRACEBACK, lines[-1])
    if not isinstance(error, SyncError):
        sentence = f"{type(error).__name__}: {sentence}"
    elif len(lines) == 1:
        return sentence
    return f"{sentence}; to see all of it, type: sync-core bench {typed} --model {MODEL}"
