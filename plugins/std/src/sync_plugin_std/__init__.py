"""The standard schemes, worker groups and layers of sync-core.

Schemes, groups and layers are found by name; what is exported here is what users build themselves.
A layer that takes arguments can be called by its name, too: ``layers=[rename({"model.*": "*"}),
"bf16"]``. Each such name is that of the class next to it.
"""

from sync_plugin_std.adapters import Lora
from sync_plugin_std.cast import BFloat16, Float16
from sync_plugin_std.compression import Zstd
from sync_plugin_std.float8 import Float8Blocks
from sync_plugin_std.interval import Interval
from sync_plugin_std.metrics import Metrics
from sync_plugin_std.mp import with_pipe
from sync_plugin_std.record import Record
from sync_plugin_std.regrouping import Fuse, Rename, Split, Transpose
from sync_plugin_std.selection import Select

# The entry points' names of the layers that change weights and take arguments.
rename, fuse, split, transpose = Rename, Fuse, Split, Transpose
select, lora, fp8, zstd = Select, Lora, Float8Blocks, Zstd

__version__ = "0.1.0"

__all__ = [
    "BFloat16",
    "Float8Blocks",
    "Float16",
    "Fuse",
    "Interval",
    "Lora",
    "Metrics",
    "Record",
    "Rename",
    "Select",
    "Split",
    "Transpose",
    "Zstd",
    "fp8",
    "fuse",
    "lora",
    "rename",
    "select",
    "split",
    "transpose",
    "with_pipe",
    "zstd",
]
