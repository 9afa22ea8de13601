"""Deliver weights over torch.distributed (``dist``) and torch RPC (``rpc``)."""

from torch import distributed

if not distributed.is_available():
    raise ImportError("sync-plugin-dist needs a build of torch with torch.distributed")

__version__ = "0.1.0"

__all__: list[str] = []
