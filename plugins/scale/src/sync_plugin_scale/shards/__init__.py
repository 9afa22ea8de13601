"""Sharded models: each rank of a trainer sends its shards, each worker takes the parts it needs.

Reading begins in `plan`, which knows nothing of transports. `local` finds the shards of a model on
one rank, `scheme` is the wrapping scheme, and `sender` and `receiver` are its transports.

Exported is the kit of schemes that publish, whose readers take parts of a version: what a model
wants of it (`is_divided`, `wanted_regions`), which rank has that (`WholeModel`, `plan_parts`), and
where it is written (`RegionViews`).
"""

from typing import TYPE_CHECKING

from sync_core.lazy import lazy_names

if TYPE_CHECKING:
    from sync_plugin_scale.shards.local import RegionViews, is_divided
    from sync_plugin_scale.shards.plan import (
        PlannedPart,
        intersect,
        plan_parts,
        shape_of,
        shifted,
        size_of,
        whole_region,
        write_region,
    )
    from sync_plugin_scale.shards.whole_model import WholeModel, wanted_regions

_MODULES = {
    "sync_plugin_scale.shards.local": ("RegionViews", "is_divided"),
    "sync_plugin_scale.shards.plan": (
        "PlannedPart",
        "intersect",
        "plan_parts",
        "shape_of",
        "shifted",
        "size_of",
        "whole_region",
        "write_region",
    ),
    "sync_plugin_scale.shards.whole_model": ("WholeModel", "wanted_regions"),
}

__all__ = [
    "PlannedPart",
    "RegionViews",
    "WholeModel",
    "intersect",
    "is_divided",
    "plan_parts",
    "shape_of",
    "shifted",
    "size_of",
    "wanted_regions",
    "whole_region",
    "write_region",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
