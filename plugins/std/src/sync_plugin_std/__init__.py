"""The standard schemes, worker groups and layers of sync-core.

Schemes, groups and layers are found by name; what is exported here is what users build themselves.
A layer that takes arguments can be called by its name, too: ``layers=[rename({"model.*": "*"}),
"bf16"]``. Each such name is that of the class next to it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sync_plugin_std.adapters import Lora
    from sync_plugin_std.cast import BFloat16, Float16
    from sync_plugin_std.checksums import Checksum, Readback
    from sync_plugin_std.compression import Zstd
    from sync_plugin_std.float8 import Float8Blocks
    from sync_plugin_std.getter import from_getter
    from sync_plugin_std.history import History
    from sync_plugin_std.interval import Interval
    from sync_plugin_std.metrics import Metrics
    from sync_plugin_std.mp import with_pipe
    from sync_plugin_std.record import Record
    from sync_plugin_std.regrouping import Fuse, Rename, Split, Transpose
    from sync_plugin_std.restart import Restart
    from sync_plugin_std.selection import Select
    from sync_plugin_std.stacking import Stack, Unstack
    from sync_plugin_std.stream import Stream

    rename, fuse, split, transpose = Rename, Fuse, Split, Transpose
    stack, unstack, select, lora = Stack, Unstack, Select, Lora
    bf16, fp16, fp8, zstd = BFloat16, Float16, Float8Blocks, Zstd

__version__ = "0.1.0"

__all__ = [
    "BFloat16",
    "Checksum",
    "Float8Blocks",
    "Float16",
    "Fuse",
    "History",
    "Interval",
    "Lora",
    "Metrics",
    "Readback",
    "Record",
    "Rename",
    "Restart",
    "Select",
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
    "lora",
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
    "Checksum": ("checksums", "Checksum"),
    "Readback": ("checksums", "Readback"),
    "BFloat16": ("cast", "BFloat16"),
    "Float8Blocks": ("float8", "Float8Blocks"),
    "Float16": ("cast", "Float16"),
    "Fuse": ("regrouping", "Fuse"),
    "History": ("history", "History"),
    "Interval": ("interval", "Interval"),
    "Lora": ("adapters", "Lora"),
    "Metrics": ("metrics", "Metrics"),
    "Record": ("record", "Record"),
    "Rename": ("regrouping", "Rename"),
    "Restart": ("restart", "Restart"),
    "Select": ("selection", "Select"),
    "Split": ("regrouping", "Split"),
    "Stack": ("stacking", "Stack"),
    "Stream": ("stream", "Stream"),
    "Transpose": ("regrouping", "Transpose"),
    "Unstack": ("stacking", "Unstack"),
    "Zstd": ("compression", "Zstd"),
    "from_getter": ("getter", "from_getter"),
    "with_pipe": ("mp", "with_pipe"),
    # The entry points' names of the layers that change weights and take arguments.
    "bf16": ("cast", "BFloat16"),
    "fp16": ("cast", "Float16"),
    "fp8": ("float8", "Float8Blocks"),
    "fuse": ("regrouping", "Fuse"),
    "lora": ("adapters", "Lora"),
    "rename": ("regrouping", "Rename"),
    "select": ("selection", "Select"),
    "split": ("regrouping", "Split"),
    "stack": ("stacking", "Stack"),
    "transpose": ("regrouping", "Transpose"),
    "unstack": ("stacking", "Unstack"),
    "zstd": ("compression", "Zstd"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, there = _PLACES[name]
    return getattr(import_module(f"{__name__}.{module}"), there)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
