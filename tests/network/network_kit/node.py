"""The program of a host: a trainer that sends all the time, a worker, or a relay.

    python node.py trainer SCHEME NUM_WORKERS OPTIONS
    python node.py worker FILE
    python node.py relay FILE HOST NUM_WORKERS

Each prints what happens as lines of JSON, with the time, and ends when its input does. Every
element of version n is n, so that a model tells which version it has, and whether all of it.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sync_core import Receiver, Sender, SenderLostError, SendError, SyncError
from sync_plugin_scale import Relay

#: The deadline of each send, and of what a worker waits for, in seconds.
TIMEOUT = 4.0
# Between two sends, and before a worker that found no trainer tries again, in seconds.
_PAUSE = 0.05
_AGAIN = 0.25


def say(event: str, **content: Any) -> None:
    """Print what has happened."""
    print(json.dumps({"event": event, "time": time.monotonic(), **content}), flush=True)


def make_model() -> nn.Module:
    """Return a model of 256 KB in a few tensors: some frames for each version."""
    return nn.Sequential(nn.Linear(160, 160), nn.Linear(160, 160), nn.BatchNorm1d(160))


def fill(model: nn.Module, value: int) -> None:
    """Write a number to every element."""
    for tensor in model.state_dict().values():
        tensor.fill_(value)


def values(model: nn.Module) -> list[int]:
    """Return the numbers that a model's elements have."""
    found = [tensor.flatten().float() for tensor in model.state_dict().values()]
    return [int(value) for value in torch.cat(found).unique()]


def trainer(scheme: str, num_workers: str, options: str) -> None:
    """Send a version after the other; the first line printed has the addresses."""
    model = make_model()
    with Sender(
        scheme, model, num_workers=int(num_workers), timeout=TIMEOUT, **json.loads(options)
    ) as sender:
        addresses = [pickle.dumps(sender.address(i)).hex() for i in sender.all_worker_ids()]
        say("addresses", addresses=addresses)
        while True:
            time.sleep(_PAUSE)
            fill(model, sender.version + 1)
            began = time.monotonic()
            try:
                report = sender.send()
            except SendError as error:
                report = error.report
            say(
                "send",
                version=report.version,
                seconds=time.monotonic() - began,
                updated=list(report.updated),
                failed={i: str(result.error) for i, result in report.failed.items()},
                states={i: str(status.state) for i, status in sender.workers.items()},
            )


def worker(file: str) -> None:
    """Commit each version that comes, and connect again whenever the trainer is lost."""
    model, version = make_model(), 0
    while True:
        try:
            address = pickle.loads(Path(file).read_bytes())
            with Receiver(address, model, version=version, timeout=TIMEOUT) as receiver:
                say("connected")
                while True:
                    if receiver.receive() is not None:
                        version = receiver.version
                        say("commit", version=version, values=values(model))
        except SenderLostError as error:
            say("lost", error=str(error))
        except SyncError as error:
            say("error", error=f"{type(error).__name__}: {error}", version=version)
        time.sleep(_AGAIN)


def relay(file: str, host: str, num_workers: str) -> None:
    """Pass versions on, by a new relay whenever the trainer is lost."""
    while True:
        try:
            address = pickle.loads(Path(file).read_bytes())
            with Relay(address, num_workers=int(num_workers), host=host) as passing:
                addresses = [
                    pickle.dumps(passing.address(i)).hex() for i in range(int(num_workers))
                ]
                say("addresses", addresses=addresses)
                passing.wait()
                say("lost", error="")
        except SyncError as error:
            say("error", error=f"{type(error).__name__}: {error}")
        time.sleep(_AGAIN)


def main() -> None:
    """Run what the arguments name."""
    torch.set_num_threads(1)
    # Of each send that fails; what failed is printed as an event.
    logging.getLogger("sync_core").setLevel(logging.ERROR)
    # End with the process that started this one, even if it was killed.
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    roles: dict[str, Callable[..., None]] = {"trainer": trainer, "worker": worker, "relay": relay}
    roles[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    main()
