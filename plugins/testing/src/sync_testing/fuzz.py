"""Fuzzing: hostile messages that a peer may send although it knows the protocol.

`Mutator` changes messages and bytes by a seed, so that failures are reproducible. `hostile` makes a
real receiver's connection send mutated messages. The receiver's own code has authenticated the
connection before.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import nn

from sync_core import Address, Receiver, Sender, SenderLostError, SendError
from sync_plugin_std.local import Channel, Message

__all__ = ["VALUES", "Mutator", "besiege", "find", "hostile"]

Found = TypeVar("Found")

#: Values of every JSON type, including edge cases.
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    7,
    2**31,
    2**63,
    2**64,
    10**400,
    0.5,
    -0.0,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "0",
    "answer",
    "\ud800",
    "\0",
    "x" * 5000,
    [],
    [0],
    [None],
    [[[[]]]],
    {},
    {"type": "answer"},
    {"version": 1},
    {"": {"": {}}},
)


class Mutator:
    """Mutates messages and bytes, in the same way for the same seed.

    Args:
        seed: the seed.
        vocabulary: messages of the protocol to start from.

    Example:
        >>> mutator = Mutator(1, [{"type": "answer", "version": 3}])
        >>> mutator.frame(mutator.message()) == Mutator(1, mutator.vocabulary).frame({})
        False
    """

    def __init__(self, seed: int, vocabulary: Sequence[Message] = ()) -> None:
        self.random = random.Random(seed)  # noqa: S311
        self.vocabulary = list(vocabulary)

    def value(self) -> Any:
        """Return a random value."""
        return self.random.choice(VALUES)

    def message(self, message: Message | None = None) -> Any:
        """Return a mutation of a message, or of one from the vocabulary."""
        if message is None:
            message = self.random.choice(self.vocabulary)
        elif (
            isinstance(message, Mapping)
            and message not in self.vocabulary
            and len(self.vocabulary) < 100
        ):
            self.vocabulary.append(message)
        changed = json.loads(json.dumps(message))
        for _ in range(self.random.choice((0, 1, 1, 2, 4))):
            changed = self._change(changed)
        return changed

    def data(self, data: bytes) -> bytes:
        """Return a mutation of bytes."""
        changed = bytearray(data)
        for _ in range(self.random.choice((1, 1, 2, 8))):
            place = self.random.randrange(len(changed) + 1)
            how = self.random.randrange(4)
            if how == 0:
                changed[place:place] = self.random.randbytes(self.random.choice((1, 4, 64)))
            elif how == 1:
                del changed[place : place + self.random.choice((1, 4, 64))]
            elif how == 2:
                changed[place : place + 1] = self.random.choice((b"\0", b"\xff", b"{", b'"'))
            else:
                changed[place : place + 8] = (2 ** self.random.randrange(64)).to_bytes(8, "little")
        return bytes(changed)

    def frame(self, message: Any) -> bytes:
        """Return a message in the format of a `Channel`; sometimes a corrupted one."""
        text = json.dumps(message).encode()
        how = self.random.randrange(12)
        if how == 0:
            text = self.data(text)
        elif how == 1:
            text = b"[" * 100_000
        size = self.value() if how == 2 else len(text)
        number = size if type(size) is int and 0 <= size < 2**32 else len(text)
        return number.to_bytes(4, "little") + text

    def _change(self, value: Any) -> Any:
        if self.random.random() < 0.2:
            return self.value()
        if isinstance(value, Mapping) and value:
            name = self.random.choice(list(value))
            how = self.random.randrange(4)
            if how == 0:
                return {k: v for k, v in value.items() if k != name}
            if how == 1 and self.vocabulary:
                return {**value, **self.random.choice(self.vocabulary), "type": value.get("type")}
            return {**value, name: self._change(value[name])}
        if isinstance(value, list) and value:
            place = self.random.randrange(len(value))
            return [*value[:place], self._change(value[place]), *value[place + 1 :]]
        return self.value()


def hostile(channel: Channel, mutator: Mutator, *, share: float = 1.0) -> Callable[..., None]:
    """Make a connection send mutated messages from now on; return a function that sends one.

    Args:
        channel: the channel of a connected receiver.
        mutator: mutates the messages.
        share: the share of the messages that are mutated.
    """
    connection: socket.socket = channel._socket

    def send(message: Message | None = None, descriptors: Sequence[int] = ()) -> None:
        kept = message is not None and mutator.random.random() >= share
        frame = mutator.frame(message if kept else mutator.message(message))
        # The sender closes the connection after a message that it does not understand.
        with suppress(OSError):
            if mutator.random.random() < 0.05:
                descriptors = [connection.fileno()] * mutator.random.randrange(1, 6)
            socket.send_fds(connection, [frame], descriptors)

    channel.send = send  # type: ignore[method-assign]
    return send


def find(holder: Any, kind: type[Found]) -> Iterator[Found]:
    """Yield the objects of a class that the transports of a sender or receiver consist of."""
    seen: set[int] = set()
    left = [holder]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, kind):
            yield each
        elif isinstance(each, list | tuple):
            left += each
        elif type(each).__module__.startswith("sync_"):
            left += getattr(each, "__dict__", {}).values()


def besiege(
    sender: Sender,
    model: nn.Module,
    attack: Callable[[Receiver], object],
    *,
    rounds: int,
    patience: float = 5.0,
    address: Callable[[int], Address] | None = None,
) -> int:
    """Send versions to worker 0 while worker 1 attacks; worker 0 must get every version.

    Args:
        sender: a sender with these two workers, whose scheme has connections; closed at the end.
        model: the model to send.
        attack: does something hostile with the receiver of worker 1.
        rounds: the number of versions.
        patience: the longest time for worker 0 to get a version, in seconds.
        address: returns the address of a worker by id, if it is not the sender's, such as a
            relay's.

    Returns:
        The number of connections that the attacker has lost.

    Raises:
        AssertionError: worker 0 lacks a version, a thread has raised an exception, or worker 1 can
            no longer be served.
    """
    address = address or sender.address
    ended: list[threading.ExceptHookArgs] = []
    hook, threading.excepthook = threading.excepthook, ended.append
    attacker, lost = Receiver(address(1), deepcopy(model)), 0
    try:
        with Receiver(address(0), deepcopy(model)) as honest:
            for value in range(1, rounds + 1):
                hung_up = False
                try:
                    attack(attacker)
                except SenderLostError:
                    hung_up = True
                _send(sender, model, float(value), honest, patience)
                if hung_up or (1 in sender.workers and sender.workers[1].state == "lost"):
                    attacker.close()
                    attacker, lost = Receiver(address(1), deepcopy(model)), lost + 1
        attacker.close()
        with Receiver(address(1), deepcopy(model)) as successor:
            _send(sender, model, 0.0, successor, patience)
    finally:
        attacker.close()
        sender.close()
        threading.excepthook = hook
    assert not ended, f"{ended[0].thread} has ended by {ended[0].exc_value!r}"
    return lost


def _send(
    sender: Sender, model: nn.Module, value: float, receiver: Receiver, patience: float
) -> None:
    """Send a version, which a receiver must get in time while others attack."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    pending = sender.send_async()
    deadline = time.monotonic() + patience
    while receiver.version < pending.version:
        left = deadline - time.monotonic()
        assert left > 0, f"worker {receiver.worker_id} has no version {pending.version}"
        receiver.receive(left)
    with suppress(SendError):
        pending.wait(0.02)
