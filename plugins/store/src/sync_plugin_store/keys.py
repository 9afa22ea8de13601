"""Keys of runs: a trainer signs with a private key; addresses contain the public key."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from sync_core import OptionError
from sync_plugin_store.errors import SignatureError

__all__ = ["HEAD_PURPOSE", "PARTS_PURPOSE", "SigningKey", "verify"]

#: Signed content begins with its purpose, so a signature is not valid for another purpose.
HEAD_PURPOSE, PARTS_PURPOSE = b"sync-plugin-store HEAD 1\n", b"sync-plugin-store parts 2\n"


class SigningKey:
    """An Ed25519 key.

    Args:
        key: the private key.
        path: its file; None for a key in memory.

    Example:
        >>> key = SigningKey.generate()
        >>> verify(key.public, key.sign(b"content"), b"content")
    """

    def __init__(self, key: Ed25519PrivateKey, path: Path | None = None) -> None:
        self._key = key
        #: The file with the key; None for a key in memory.
        self.path = None if path is None else path.absolute()
        #: The public key, in hexadecimal.
        self.public = key.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> SigningKey:
        """Return a new key that exists only in this process."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def of_file(cls, path: Path) -> SigningKey:
        """Return the key in a PEM file; make the file, readable only by its user, if missing.

        Raises:
            OptionError: the file holds something else, or cannot be read.
        """
        try:
            if not path.exists():
                _make(path)
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise OptionError(
                f"key={str(path)!r} must be a file with an Ed25519 private key in PEM: {error}; "
                "name a file that is not there yet, and a key is made"
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise OptionError(
                f"key={str(path)!r} must hold an Ed25519 key, got {type(key).__name__}; name a "
                "file that is not there yet, and a key is made"
            )
        return cls(key, path)

    def sign(self, content: bytes, purpose: bytes = HEAD_PURPOSE) -> str:
        """Return the signature of content for a purpose, in hexadecimal."""
        return self._key.sign(purpose + content).hex()


def _make(path: Path) -> None:
    """Write a new key, unless another process, such as another rank, has written one."""
    text = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    # The file appears complete and is never replaced.
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
        with suppress(FileExistsError):
            path.hardlink_to(part)
    finally:
        part.unlink()


def verify(public: str, signature: str, content: bytes, purpose: bytes = HEAD_PURPOSE) -> None:
    """Check the signature of content for a purpose.

    Args:
        public: the public key, in hexadecimal.
        signature: in hexadecimal.
        content: what was signed.
        purpose: see `SigningKey.sign`.

    Raises:
        SignatureError: the signature is from another key or for other content.

    Example:
        >>> key = SigningKey.generate()
        >>> verify(key.public, key.sign(b"content"), b"other")
        Traceback (most recent call last):
        ...
        sync_plugin_store.errors.SignatureError: not signed with the key ...
    """
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(bytes.fromhex(signature), purpose + content)
    except (InvalidSignature, ValueError) as error:
        raise SignatureError(
            f"not signed with the key {public[:12]}…; the run's own is what Run.key_of(sender) "
            "returns in its trainer"
        ) from error
