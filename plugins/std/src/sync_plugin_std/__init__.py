"""The standard schemes, worker groups and layers of sync-core.

Schemes, groups and layers are found by name; what is exported here is what users build themselves.
A layer that takes arguments can be called by its name, too: ``layers=[rename({"model.*": "*"}),
"bf16"]``. Each such name is that of the class next to it.

Schemes are in `schemes`, layers in `layers`, and what sends several models in `models`. The kits
that other plugins build on are `local`, `calls`, `stores` and `workers`; `history` is for tests and
`sync-core check-history`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sync_plugin_std.history import History
    from sync_plugin_std.layers.adapters import Lora
    from sync_plugin_std.layers.cast import BFloat16, Float16
    from sync_plugin_std.layers.checksums import Checksum, Readback
    from sync_plugin_std.layers.compression import Zstd
    from sync_plugin_std.layers.finite import Finite
    from sync_plugin_std.layers.float8 import Float8Blocks
    from sync_plugin_std.layers.interval import Interval
    from sync_plugin_std.layers.keep import Keep
    from sync_plugin_std.layers.metrics import Metrics
    from sync_plugin_std.layers.record import Record
    from sync_plugin_std.layers.regrouping import Fuse, Rename, Split, Transpose
    from sync_plugin_std.layers.selection import Select
    from sync_plugin_std.layers.stacking import Stack, Unstack
    from sync_plugin_std.models.multi_model import receive_together
    from sync_plugin_std.models.optimizers import optimizer_weights
    from sync_plugin_std.models.send_group import SendGroup
    from sync_plugin_std.models.stream import Stream
    from sync_plugin_std.schemes.getter import from_getter
    from sync_plugin_std.schemes.mp import with_pipe
    from sync_plugin_std.workers.restart import Restart

    rename, fuse, split, transpose = Rename, Fuse, Split, Transpose
    stack, unstack, select, lora = Stack, Unstack, Select, Lora
    bf16, fp16, fp8, zstd, keep = BFloat16, Float16, Float8Blocks, Zstd, Keep

__version__ = "0.1.0"

__all__ = [
    "BFloat16",
    "Checksum",
    "Finite",
    "Float8Blocks",
    "Float16",
    "Fuse",
    "History",
    "Interval",
    "Keep",
    "Lora",
    "Metrics",
    "Readback",
    "Record",
    "Rename",
    "Restart",
    "Select",
    "SendGroup",
    "Split",
    "Stack",
    "Stream",
    "Transpose",
    "Unstack",
    "Zstd",
    "bf16",
    "fp8",
    "fp16",
    "from_getter",
    "fuse",
    "keep",
    "lora",
    "optimizer_weights",
    "receive_together",
    "rename",
    "select",
    "split",
    "stack",
    "transpose",
    "unstack",
    "with_pipe",
    "zstd",
]

# The module of each name, and its name there. They are imported when they are first used: a scheme
# needs none of the layers.
_PLACES = {
    "Checksum": ("layers.checksums", "Checksum"),
    "Readback": ("layers.checksums", "Readback"),
    "BFloat16": ("layers.cast", "BFloat16"),
    "Finite": ("layers.finite", "Finite"),
    "Float8Blocks": ("layers.float8", "Float8Blocks"),
    "Float16": ("layers.cast", "Float16"),
    "Fuse": ("layers.regrouping", "Fuse"),
    "History": ("history", "History"),
    "Interval": ("layers.interval", "Interval"),
    "Keep": ("layers.keep", "Keep"),
    "Lora": ("layers.adapters", "Lora"),
    "Metrics": ("layers.metrics", "Metrics"),
    "Record": ("layers.record", "Record"),
    "Rename": ("layers.regrouping", "Rename"),
    "Restart": ("workers.restart", "Restart"),
    "Select": ("layers.selection", "Select"),
    "SendGroup": ("models.send_group", "SendGroup"),
    "Split": ("layers.regrouping", "Split"),
    "Stack": ("layers.stacking", "Stack"),
    "Stream": ("models.stream", "Stream"),
    "Transpose": ("layers.regrouping", "Transpose"),
    "Unstack": ("layers.stacking", "Unstack"),
    "Zstd": ("layers.compression", "Zstd"),
    "from_getter": ("schemes.getter", "from_getter"),
    "optimizer_weights": ("models.optimizers", "optimizer_weights"),
    "receive_together": ("models.multi_model", "receive_together"),
    "with_pipe": ("schemes.mp", "with_pipe"),
    # The entry points' names of the layers that change weights and take arguments.
    "bf16": ("layers.cast", "BFloat16"),
    "fp16": ("layers.cast", "Float16"),
    "fp8": ("layers.float8", "Float8Blocks"),
    "fuse": ("layers.regrouping", "Fuse"),
    "keep": ("layers.keep", "Keep"),
    "lora": ("layers.adapters", "Lora"),
    "rename": ("layers.regrouping", "Rename"),
    "select": ("layers.selection", "Select"),
    "split": ("layers.regrouping", "Split"),
    "stack": ("layers.stacking", "Stack"),
    "transpose": ("layers.regrouping", "Transpose"),
    "unstack": ("layers.stacking", "Unstack"),
    "zstd": ("layers.compression", "Zstd"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, there = _PLACES[name]
    return getattr(import_module(f"{__name__}.{module}"), there)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
