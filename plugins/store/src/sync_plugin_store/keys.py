"""Keys of runs: a trainer signs with its own, readers have the public one in their addresses."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from sync_core import OptionError
from sync_plugin_store.errors import SignatureError

__all__ = ["SigningKey", "verify"]

# Signed content begins with this, so that a signature holds for nothing else.
_PURPOSE = b"sync-plugin-store HEAD 1\n"


class SigningKey:
    """An Ed25519 key.

    Args:
        key: the private key.

    Example:
        >>> key = SigningKey.generate()
        >>> verify(key.public, key.sign(b"content"), b"content")
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        #: The public key, in hexadecimal.
        self.public = key.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> SigningKey:
        """Return a new key, which is in this process alone."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def of_file(cls, path: Path) -> SigningKey:
        """Return the key in a PEM file, which is made, for its user alone, where there is none.

        Raises:
            OptionError: the file holds something else, or cannot be read.
        """
        try:
            if not path.exists():
                made = Ed25519PrivateKey.generate()
                text = made.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.NoEncryption(),
                )
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(text)
                return cls(made)
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
        return cls(key)

    def sign(self, content: bytes) -> str:
        """Return the signature of a head's content, in hexadecimal."""
        return self._key.sign(_PURPOSE + content).hex()


def verify(public: str, signature: str, content: bytes) -> None:
    """Check the signature of a head's content.

    Args:
        public: the public key, in hexadecimal.
        signature: in hexadecimal.
        content: what was signed.

    Raises:
        SignatureError: it was made with another key, or of something else.

    Example:
        >>> key = SigningKey.generate()
        >>> verify(key.public, key.sign(b"content"), b"other")
        Traceback (most recent call last):
        ...
        sync_plugin_store.errors.SignatureError: not signed with the key ...
    """
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(bytes.fromhex(signature), _PURPOSE + content)
    except (InvalidSignature, ValueError) as error:
        raise SignatureError(
            f"not signed with the key {public[:12]}…; the run's own is what Run.key_of(sender) "
            "returns in its trainer"
        ) from error
