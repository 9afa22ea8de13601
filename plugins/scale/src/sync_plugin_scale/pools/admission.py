"""The way into a pool that grows: workers that share one address are admitted one by one.

A pool keeps a side channel of its sender, with a number of places. A worker that comes takes one of
them and gives a random name; the pool adds a worker to the sender, and answers with its id. Should
two workers take the same place, one of them loses the connection and takes another.

All workers know the tokens of the side channel, and each must get a token that no other learns,
from the sender and from nothing else. So the name is a key of Diffie and Hellman, and the shared
address has the sender's: what both agree on encrypts and authenticates the token.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
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
_NAME_NBYTES = _TOKEN_NBYTES = _SEAL_NBYTES = 16
# After a name: the id, the token as it is encrypted, and the seal of all of it.
_ID_NBYTES = 8
# How long closing waits for a worker that is being admitted, in seconds; an estimate.
_PATIENCE = 5.0
_NBYTES = _NAME_NBYTES + _ID_NBYTES + _TOKEN_NBYTES + _SEAL_NBYTES
#: The layout of what travels by the side channel: the name, the id and the token of a worker.
LAYOUT = Layout.of_kinds([(RESERVED_PREFIX + "admission", torch.uint8, (_NBYTES,))])
_TOKEN = re.compile("[0-9a-f]{32}")
# The group of 2048 bits of RFC 3526, whose generator is 2.
_PRIME = int(
    "ffffffffffffffffc90fdaa22168c234c4c6628b80dc1cd129024e088a67cc74"
    "020bbea63b139b22514a08798e3404ddef9519b3cd3a431b302b0a6df25f1437"
    "4fe1356d6d51c245e485b576625e7ec6f44c42e9a637ed6b0bff5cb6f406b7ed"
    "ee386bfb5a899fa5ae9f24117c4b1fe649286651ece45b3dc2007cb8a163bf05"
    "98da48361c55d39a69163fa8fd24cf5f83655d23dca3ad961c62f356208552bb"
    "9ed529077096966d670c354e4abc9804f1746c08ca18217c32905e462e36ce3b"
    "e39e772c180e86039b2783a2ec07a28fb5c55df06f4c52c9de2bcbf695581718"
    "3995497cea956ae515d2261898fa051015728e5a8aacaa68ffffffffffffffff",
    16,
)
_KEY_NBYTES = 256
_SECRET_BITS = 256


class KeyAgreement:
    """One end of a key agreement: a random secret, and the key that the other end is given.

    Example:
        >>> left, right = KeyAgreement(), KeyAgreement()
        >>> left.agree(right.key) == right.agree(left.key)
        True
    """

    def __init__(self) -> None:
        self._secret = secrets.randbits(_SECRET_BITS)
        self.key = pow(2, self._secret, _PRIME).to_bytes(_KEY_NBYTES, "big")

    def agree(self, key: bytes) -> bytes:
        """Return the secret that only the two ends can have.

        Args:
            key: the other end's.
        """
        agreed = pow(int.from_bytes(key, "big"), self._secret, _PRIME)
        return hashlib.sha256(agreed.to_bytes(_KEY_NBYTES, "big")).digest()


def _is_key(key: bytes) -> bool:
    return len(key) == _KEY_NBYTES and 1 < int.from_bytes(key, "big") < _PRIME - 1


def _name(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()[:_NAME_NBYTES]


def _masked(agreed: bytes, worker: bytes, token: bytes) -> bytes:
    """Encrypt or decrypt the token of a worker, which is given as its name and its id."""
    mask = hmac.new(agreed, b"mask" + worker, hashlib.sha256).digest()[:_TOKEN_NBYTES]
    return bytes(a ^ b for a, b in zip(token, mask, strict=True))


def _seal(agreed: bytes, content: bytes) -> bytes:
    return hmac.new(agreed, b"seal" + content, hashlib.sha256).digest()[:_SEAL_NBYTES]


@dataclass(frozen=True, slots=True)
class Entrance(IndirectEndpoint):
    """The endpoint of an address that many workers share.

    Args:
        admission: the address of the first place where workers are admitted.
        tokens: the token of each place.
        workers: the endpoint of the sender's own transport, the same for every worker.
        key: the sender's, in hexadecimal digits; not a secret.
    """

    kind: ClassVar[str] = "pool"

    admission: Address
    tokens: tuple[str, ...] = field(repr=False)
    workers: Any
    key: str = field(repr=False)

    def resolve(self, address: Address, timeout: float) -> Address:
        """Ask the sender for an id."""
        return enter(address, timeout)

    def to_json(self, inner: Callable[[Any], Any]) -> Any:
        """Return both addresses as plain values."""
        return {
            "admission": self.admission.to_json(),
            "tokens": list(self.tokens),
            "workers": inner(self.workers),
            "key": self.key,
        }

    @classmethod
    def from_json(cls, value: Any, inner: Callable[[Any], Any]) -> Self:
        """Return the entrance that `to_json` wrote."""
        if (
            not isinstance(value, dict)
            or value.keys() != {"admission", "tokens", "workers", "key"}
            or not _are_tokens(value["tokens"])
            or _key(value["key"]) is None
        ):
            raise AddressError(
                "the endpoint of an address that workers share must have admission, tokens, "
                "workers and key; type Pool(sender).address().to_json()"
            )
        return cls(
            Address.from_json(value["admission"]),
            tuple(value["tokens"]),
            inner(value["workers"]),
            value["key"],
        )


class Admission:
    """The sender's side: admits workers, in its own thread.

    Args:
        channel: a side channel of the sender; owned from now on.
        admit: adds a worker and returns its id and its token; called in the thread.
        forget: removes a worker that was admitted and has not come.

    Raises:
        AddressError: the scheme gives each worker another endpoint.
    """

    def __init__(
        self,
        channel: SenderTransport,
        admit: Callable[[], tuple[int, str]],
        forget: Callable[[int], object],
    ) -> None:
        self._channel = channel
        self._admit = admit
        self._forget = forget
        self._agreement = KeyAgreement()
        self._version = 0
        self._events: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        # By place, the name and the id of the worker that was admitted there last.
        self._named: dict[int, tuple[bytes, int]] = {}
        self._unanswered: set[int] = set()
        places = [channel.address(place) for place in range(PLACES)]
        self._places = places
        if any(each.endpoint != places[0].endpoint for each in places):
            raise AddressError(
                "this scheme gives each worker another endpoint, so that workers cannot "
                "share an address; type sender.address(sender.add_worker()) for each of them"
            )
        self._invite(tuple(range(PLACES)))
        self._thread = threading.Thread(target=self._run, name="sync-admission", daemon=True)

    def entrance(self, workers: Any) -> Entrance:
        """Return the endpoint of the address that workers share.

        Args:
            workers: the endpoint of the sender's own transport.
        """
        tokens = tuple(place.token for place in self._places)
        return Entrance(self._places[0], tokens, workers, self._agreement.key.hex())

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
        key = None if answer is None else _key(answer.request)
        name = None if key is None else _name(key)
        known, worker_id = self._named.get(place, (b"", -1))
        if name == known:
            return  # its id is on its way
        if place in self._unanswered:
            self._unanswered.discard(place)
            if delivery.error is not None:
                self._forget(worker_id)
            if name is None:
                self._invite((place,))
        if key is not None and name is not None:
            worker_id, token = self._admit()
            self._named[place] = name, worker_id
            self._unanswered.add(place)
            agreed = self._agreement.agree(key)
            worker = name + worker_id.to_bytes(_ID_NBYTES, "little")
            content = worker + _masked(agreed, worker, bytes.fromhex(token))
            self._send((place,), content + _seal(agreed, content))

    def _invite(self, places: tuple[int, ...]) -> None:
        self._send(places, bytes(_NBYTES))

    def _send(self, places: tuple[int, ...], content: bytes) -> None:
        self._version += 1
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        payload = Payload(self._version, LAYOUT, (tensor,))
        for delivery in self._channel.send(payload, places).values():
            delivery.watch(partial(_put, self._events))


def _are_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == PLACES
        and all(type(each) is str and _TOKEN.fullmatch(each) for each in value)
    )


def _key(text: Any) -> bytes | None:
    """Return the key that a text has; None where it has none."""
    try:
        key = bytes.fromhex(text)
    except (TypeError, ValueError):
        return None
    return key if _is_key(key) else None


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
        SenderLostError: the sender is gone, or another process has its place.
        AddressError: it has not answered in time.
    """
    entrance: Entrance = address.endpoint
    agreement = KeyAgreement()
    agreed = agreement.agree(bytes.fromhex(entrance.key))
    deadline = time.monotonic() + timeout
    known, repeated = "", 0
    while (left := deadline - time.monotonic()) > 0:
        number = secrets.randbelow(len(entrance.tokens))
        place = replace(entrance.admission, worker_id=number, token=entrance.tokens[number])
        try:
            with closing(place.connect(timeout)) as transport:
                told = _ask(transport, agreement.key, left)
        except SenderLostError as error:
            # Another worker has taken the place, or the sender is gone: further attempts tell.
            repeated = repeated + 1 if str(error) == known else 1
            if repeated == _ATTEMPTS:
                raise
            known = str(error)
            continue
        if told is not None:
            worker_id, token = _read_place(told, agreed)
            return replace(address, worker_id=worker_id, endpoint=entrance.workers, token=token)
    raise AddressError(f"the sender has not admitted this worker within {timeout:g} s")


def _read_place(told: bytes, agreed: bytes) -> tuple[int, str]:
    """Return the id and the token that only the sender can have told to a worker."""
    content, seal = told[:-_SEAL_NBYTES], told[-_SEAL_NBYTES:]
    if not hmac.compare_digest(seal, _seal(agreed, content)):
        raise SenderLostError(
            "what admits workers at the pool's address is not its sender: another process has the "
            "place of a sender that is gone"
        )
    worker, token = content[:-_TOKEN_NBYTES], content[-_TOKEN_NBYTES:]
    return int.from_bytes(worker[_NAME_NBYTES:], "little"), _masked(agreed, worker, token).hex()


def _ask(transport: ReceiverTransport, key: bytes, timeout: float) -> bytes | None:
    """Return what the sender tells the worker of a key."""
    deadline, name = time.monotonic() + timeout, _name(key)
    while (payload := transport.receive(max(0.0, deadline - time.monotonic()))) is not None:
        content = _read(payload.tensors[0])
        payload.release()
        if content[:_NAME_NBYTES] == name:
            with suppress(SenderLostError):
                transport.acknowledge(Answer(version=payload.version))
            return content
        refusal = Answer.refusal(payload.version, SyncError("this worker wants to be admitted"))
        transport.acknowledge(replace(refusal, request=key.hex()))
    return None


def _read(tensor: Tensor) -> bytes:
    return bytes(tensor.tolist())
