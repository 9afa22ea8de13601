"""The way into a pool that grows: workers that share one address are admitted one by one.

A pool keeps a side channel of its sender, with a number of places. A worker that comes takes one of
them and gives a random name; the pool adds a worker to the sender, and answers with its id. Should
two workers take the same place, one of them loses the connection and takes another.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from sync_core import (
    Address,
    Answer,
    Delivery,
    IndirectEndpoint,
    Layout,
    Payload,
    ReceiverTransport,
    SenderLostError,
    SenderTransport,
    SyncError,
)
from sync_core.errors import AddressError
from sync_core.transports import RESERVED_PREFIX

_log = logging.getLogger("sync_core")
#: Two of a hundred workers that come at the same moment take the same place about once; that costs
#: one of them a connection.
PLACES = 64
# How often in succession a place may be lost: of 20 workers that come at once, one may take the
# place of another in 3 of 10 attempts.
_ATTEMPTS = 8
_NAME_NBYTES = 16
# How long closing waits for a worker that is being admitted, in seconds; an estimate.
_PATIENCE = 5.0
#: The layout of what travels by the side channel: the name and the id of a worker.
LAYOUT = Layout.of_kinds([(RESERVED_PREFIX + "admission", torch.uint8, (_NAME_NBYTES + 8,))])


@dataclass(frozen=True, slots=True)
class Entrance(IndirectEndpoint):
    """The endpoint of an address that many workers share.

    Args:
        admission: the address of a place where workers are admitted.
        workers: the endpoint of the sender's own transport, the same for every worker.
    """

    kind: ClassVar[str] = "pool"

    admission: Address
    workers: Any

    def resolve(self, address: Address, timeout: float) -> Address:
        """Ask the sender for an id."""
        return enter(address, timeout)

    def to_json(self, inner: Callable[[Any], Any]) -> Any:
        """Return both addresses as plain values."""
        return {"admission": self.admission.to_json(), "workers": inner(self.workers)}

    @classmethod
    def from_json(cls, value: Any, inner: Callable[[Any], Any]) -> Self:
        """Return the entrance that `to_json` wrote."""
        if not isinstance(value, dict) or value.keys() != {"admission", "workers"}:
            raise AddressError(
                "the endpoint of an address that workers share must have admission and workers; "
                "type Pool(sender).address().to_json()"
            )
        return cls(Address.from_json(value["admission"]), inner(value["workers"]))


class Admission:
    """The sender's side: admits workers, in its own thread.

    Args:
        channel: a side channel of the sender; owned from now on.
        admit: adds a worker and returns its id; called in the thread.
        forget: removes a worker that was admitted and has not come.

    Raises:
        AddressError: the scheme gives each worker another endpoint.
    """

    def __init__(
        self,
        channel: SenderTransport,
        admit: Callable[[], int],
        forget: Callable[[int], object],
    ) -> None:
        self._channel = channel
        self._admit = admit
        self._forget = forget
        self._version = 0
        self._events: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        # By place, the name and the id of the worker that was admitted there last.
        self._named: dict[int, tuple[bytes, int]] = {}
        self._unanswered: set[int] = set()
        places = [channel.address(place) for place in range(PLACES)]
        #: The address of the first place; the others differ from it by their ``worker_id``.
        self.address: Address = places[0]
        if any(each.endpoint != self.address.endpoint for each in places):
            raise AddressError(
                "this scheme gives each worker another endpoint, so that workers cannot "
                "share an address; type sender.address(sender.add_worker()) for each of them"
            )
        self._invite(tuple(range(PLACES)))
        self._thread = threading.Thread(target=self._run, name="sync-admission", daemon=True)

    def start(self) -> None:
        """Start the thread, which ends with `close`."""
        self._thread.start()

    def close(self) -> None:
        """Admit no more workers."""
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)
        self._channel.close()

    def _run(self) -> None:
        while (delivery := self._events.get()) is not None:
            try:
                self._answer(delivery)
            except Exception:
                _log.exception("a worker could not be admitted")

    def _answer(self, delivery: Delivery) -> None:
        """Act on the outcome of what was sent to a place."""
        place, answer = delivery.worker_id, delivery.latest
        name = None if answer is None else _name_of(answer)
        known, worker_id = self._named.get(place, (b"", -1))
        if name == known:
            return  # its id is on its way
        if place in self._unanswered:
            self._unanswered.discard(place)
            if delivery.error is not None:
                self._forget(worker_id)
            if name is None:
                self._invite((place,))
        if name is not None:
            self._named[place] = name, self._admit()
            self._unanswered.add(place)
            self._send((place,), *self._named[place])

    def _invite(self, places: tuple[int, ...]) -> None:
        self._send(places, bytes(_NAME_NBYTES), 0)

    def _send(self, places: tuple[int, ...], name: bytes, worker_id: int) -> None:
        self._version += 1
        text = name + worker_id.to_bytes(8, "little")
        tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        payload = Payload(self._version, LAYOUT, (tensor,))
        for delivery in self._channel.send(payload, places).values():
            delivery.watch(partial(_put, self._events))


def _name_of(answer: Answer) -> bytes | None:
    """Return the name that a worker gives; None for an answer without one, or with none of ours."""
    try:
        name = bytes.fromhex(answer.request or "")
    except ValueError:
        return None
    return name if len(name) == _NAME_NBYTES else None


def _put(
    events: queue.SimpleQueue[Delivery | None], delivery: Delivery, error: SyncError | None
) -> None:
    del error
    events.put(delivery)


def enter(address: Address, timeout: float) -> Address:
    """Ask the sender for a place in its pool, and return the address of the worker with its id.

    Args:
        address: one that many workers share.
        timeout: in seconds.

    Raises:
        SenderLostError: the sender is gone.
        AddressError: it has not answered in time.
    """
    entrance: Entrance = address.endpoint
    name = secrets.token_bytes(_NAME_NBYTES)
    deadline = time.monotonic() + timeout
    known, repeated = "", 0
    while (left := deadline - time.monotonic()) > 0:
        place = replace(entrance.admission, worker_id=secrets.randbelow(PLACES))
        try:
            with closing(place.connect(timeout)) as transport:
                worker_id = _ask(transport, name, left)
        except SenderLostError as error:
            # Another worker has taken the place, or the sender is gone: further attempts tell.
            repeated = repeated + 1 if str(error) == known else 1
            if repeated == _ATTEMPTS:
                raise
            known = str(error)
            continue
        if worker_id is not None:
            return replace(address, worker_id=worker_id, endpoint=entrance.workers)
    raise AddressError(f"the sender has not admitted this worker within {timeout:g} s")


def _ask(transport: ReceiverTransport, name: bytes, timeout: float) -> int | None:
    deadline = time.monotonic() + timeout
    while (payload := transport.receive(max(0.0, deadline - time.monotonic()))) is not None:
        content = _read(payload.tensors[0])
        payload.release()
        if content[:_NAME_NBYTES] == name:
            with suppress(SenderLostError):
                transport.acknowledge(Answer(version=payload.version))
            return int.from_bytes(content[_NAME_NBYTES:], "little")
        refusal = Answer.refusal(payload.version, SyncError("this worker wants to be admitted"))
        transport.acknowledge(replace(refusal, request=name.hex()))
    return None


def _read(tensor: Tensor) -> bytes:
    return bytes(tensor.tolist())
