"""Reading and writing the tensors of a model."""

from typing import TYPE_CHECKING

from sync_core.lazy import lazy_names

if TYPE_CHECKING:
    from sync_core.models.binding import Binding, consolidate
    from sync_core.models.extract import named_tensors
    from sync_core.models.match import check_match
    from sync_core.models.paths import resolve
    from sync_core.models.sampling import TensorState, states
    from sync_core.models.wrappers import plain_name
    from sync_core.receiving.multi_model import receive_together
    from sync_core.shards.plan import Region
    from sync_core.shards.request import RegionSource


_MODULES = {
    "sync_core.models.binding": ("Binding", "consolidate"),
    "sync_core.models.extract": ("named_tensors",),
    "sync_core.models.match": ("check_match",),
    "sync_core.models.paths": ("resolve",),
    "sync_core.models.sampling": ("TensorState", "states"),
    "sync_core.models.wrappers": ("plain_name",),
    "sync_core.receiving.multi_model": ("receive_together",),
    "sync_core.shards.plan": ("Region",),
    "sync_core.shards.request": ("RegionSource",),
}

__all__ = [
    "Binding",
    "Region",
    "RegionSource",
    "TensorState",
    "check_match",
    "consolidate",
    "named_tensors",
    "plain_name",
    "receive_together",
    "resolve",
    "states",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
