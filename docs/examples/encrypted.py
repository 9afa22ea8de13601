"""A scheme that wraps another and encrypts its versions: ``encrypted::dist``.

    pip install cryptography
    export SYNC_KEY=$(python -c "import secrets; print(secrets.token_hex(32))")

AES-256-GCM seals every version and its number. See docs/authors/write-a-wrapping-scheme.md.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sync_core import (
    Answer,
    CorruptionError,
    Delivery,
    Layout,
    OptionError,
    Payload,
    ReceiverTransport,
    SenderTransport,
    TransportContext,
)
from sync_core.transports import Block
from sync_core.wrapping import WrappingReceiver, WrappingScheme, WrappingSender

_NONCE_NBYTES, _TAG_NBYTES = 12, 16


@dataclass(frozen=True)
class Encrypted(WrappingScheme):
    """Encrypts versions between the trainer and its workers.

    Args:
        inner: the scheme that sends the encrypted versions.
        variable: the environment variable with the key, 64 hexadecimal digits, in trainer and
            workers.
    """

    wrapper: ClassVar[str] = "encrypted"
    keeps: ClassVar[frozenset[str]] = frozenset(
        ("background", "broadcast", "cross_host", "cross_process", "descriptors", "late_join")
    )

    variable: str = "SYNC_KEY"

    def create_sender(self, context: TransportContext) -> SenderTransport:
        assert context.layout is not None
        inner = self.inner_sender(context, layout=_sealed(context.layout.nbytes))
        return EncryptingSender(inner, self._cipher())

    def create_receiver(self, context: TransportContext) -> ReceiverTransport:
        cipher = self._cipher()
        layout = None if context.layout is None else _sealed(context.layout.nbytes)
        inner = self.inner_receiver(context, layout=layout)
        return DecryptingReceiver(inner, cipher, context.worker_id)

    def _cipher(self) -> AESGCM:
        try:
            return AESGCM(bytes.fromhex(os.environ[self.variable]))
        except (KeyError, ValueError) as error:
            make = "python -c 'import secrets; print(secrets.token_hex(32))'"
            told = f"{self.name} needs a key at both ends; type: export {self.variable}=$({make})"
            raise OptionError(told) from error


class EncryptingSender(WrappingSender):
    """Sends every payload as one tensor of bytes: nonce, encrypted payload, tag."""

    def __init__(self, transport: SenderTransport, cipher: AESGCM) -> None:
        super().__init__(transport)
        self._cipher = cipher

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> Mapping[int, Delivery]:
        """Encrypt the payload, and send it with the same version number."""
        nonce, number = secrets.token_bytes(_NONCE_NBYTES), payload.version.to_bytes(8, "big")
        data = nonce + self._cipher.encrypt(nonce, payload.to_bytes(), number)
        source = (torch.frombuffer(bytearray(data), dtype=torch.uint8),)
        sealed = replace(payload, layout=_sealed(payload.nbytes), source=source)
        return self.transport.send(sealed, worker_ids)


class DecryptingReceiver(WrappingReceiver):
    """Decrypts every payload into separate memory."""

    def __init__(self, transport: ReceiverTransport, cipher: AESGCM, worker_id: int) -> None:
        super().__init__(transport)
        self._cipher = cipher
        self._worker_id = worker_id

    def receive(self, timeout: float) -> Payload | None:
        """Return the newest version, decrypted; raise an error if it was changed in transit."""
        payload = self.transport.receive(timeout)
        if payload is None:
            return None
        data = payload.tensors[0].cpu().numpy().tobytes()
        payload.release()
        nonce, sealed = data[:_NONCE_NBYTES], data[_NONCE_NBYTES:]
        try:
            content = self._cipher.decrypt(nonce, sealed, payload.version.to_bytes(8, "big"))
        except InvalidTag as cause:
            error = CorruptionError(self._worker_id, f"version {payload.version} does not decrypt")
            self.transport.acknowledge(Answer.refusal(payload.version, error))
            raise error from cause
        return Payload.unpack(Block.of_bytes(content), payload.version, since=payload.known_at)


@lru_cache(maxsize=16)
def _sealed(nbytes: int) -> Layout:
    sealed = torch.empty(_NONCE_NBYTES + nbytes + _TAG_NBYTES, dtype=torch.uint8, device="cpu")
    return Layout.of({"encrypted": sealed})
