"""The standard schemes, worker groups and layers of sync-core.

Schemes, groups and layers are found by name; what is exported here is what users build themselves.
"""

from sync_plugin_std.cast import BFloat16, Float16
from sync_plugin_std.fp8 import Float8Blocks
from sync_plugin_std.interval import Interval
from sync_plugin_std.lora import MergedLora
from sync_plugin_std.metrics import Metrics
from sync_plugin_std.mp import with_pipe
from sync_plugin_std.record import Record
from sync_plugin_std.rename import Fuse, Rename, Split, Transpose
from sync_plugin_std.select import Select

__version__ = "0.1.0"

__all__ = [
    "BFloat16",
    "Float8Blocks",
    "Float16",
    "Fuse",
    "Interval",
    "MergedLora",
    "Metrics",
    "Record",
    "Rename",
    "Select",
    "Split",
    "Transpose",
    "with_pipe",
]
