"""The layer `Zstd`: versions travel compressed."""

from __future__ import annotations

from collections.abc import Generator

import torch

from sync_core import ApplyContext, BindContext, Layout, Payload, SendContext, Update, hookimpl
from sync_core.errors import PayloadError, RequirementError

try:
    import zstandard
except ImportError:
    zstandard = None  # type: ignore[assignment]

# No name of a module's tensor.
_NAME = "__zstd__"
# Bytes that the core adds to a version at most: its base, checksums.
_MORE = 1 << 20


class Zstd:
    """Compresses what travels with Zstandard, and restores it in each worker, bit by bit.

    Weights compress little: those of a language model in bfloat16 by about a seventh, in float32 by
    less. Put ``"bf16"`` before it. It pays on a slow network, or where most elements are equal. A
    level costs time in the trainer alone. Also named ``zstd``.

    Args:
        level: from 1, the fastest, to 22.

    Raises:
        RequirementError: the package zstandard is not installed.
        ValueError: there is no such level.

    Example:
        >>> model = {"weight": torch.zeros(100_000)}
        >>> from sync_core import Receiver, Sender
        >>> with Sender("thread", model, num_workers=1, layers=["zstd"]) as sender:
        ...     receiver = Receiver(sender.address(0), {"weight": torch.ones(100_000)})
        ...     pending = sender.send_async()
        ...     version = receiver.receive()
        ...     pending.wait().nbytes < 2_000
        True
    """

    def __init__(self, level: int = 1) -> None:
        if zstandard is None:
            raise RequirementError('Zstd needs pip install "sync-plugin-std[zstd]"')
        if level not in range(1, zstandard.MAX_COMPRESSION_LEVEL + 1):
            raise ValueError(
                f"level must be from 1 to {zstandard.MAX_COMPRESSION_LEVEL}, got {level!r}"
            )
        self._level = level

    def bind(self, context: BindContext) -> Zstd:
        """A layer for one end of one worker."""
        del context
        return Zstd(self._level)

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        """Compress a version."""
        update = yield
        if context.version == 0:
            # The most that it can take; a transport may make room for that.
            nbytes = update.layout.nbytes
            content = torch.empty(nbytes + nbytes // 128 + 1024, dtype=torch.uint8, device="cpu")
        else:
            data = Payload(context.version, update.layout, update.source).to_bytes()
            packed = zstandard.ZstdCompressor(level=self._level).compress(data)
            content = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        update.become(Layout.of({_NAME: content}), [content])
        return update

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update, context: ApplyContext) -> Generator[None, bool, bool]:
        """Restore it.

        Raises:
            PayloadError: what came is not what `prepare_weights` made, or would become larger
                than there is reason for.
        """
        if update.layout.names != (_NAME,) or update.layout.specs[0].dtype != torch.uint8:
            raise PayloadError(f"the weights are not compressed: {update.layout.names!r:.200}")
        (content,) = update.tensors
        try:
            packed = content.cpu().numpy().data
            nbytes = zstandard.frame_content_size(packed)
            if context.layout is not None:
                most = context.layout.nbytes * 2 + _MORE
                if not 0 < nbytes <= most:
                    raise PayloadError(
                        f"the weights would have {nbytes} bytes, and no version has over {most}"
                    )
            data = zstandard.ZstdDecompressor().decompress(packed)
        except zstandard.ZstdError as error:
            raise PayloadError(f"the weights cannot be decompressed: {error}") from error
        payload = Payload.from_bytes(bytearray(data), version=0)
        update.become(payload.layout, payload.tensors)
        return (yield)
