"""Reading and writing the tensors of a model."""

from typing import TYPE_CHECKING

from sync_core.lazy import lazy_names

if TYPE_CHECKING:
    from sync_core.models.attributes import UnsentAttributes
    from sync_core.models.binding import Binding, consolidate
    from sync_core.models.extract import (
        ComputedWeights,
        Strategy,
        named_tensors,
        tensors_of_rank,
    )
    from sync_core.models.finder import tensor_finder
    from sync_core.models.lookup import modules_in, resolve
    from sync_core.models.match import cast_within, check_match
    from sync_core.models.modules import is_extra_state, plain_name
    from sync_core.weights.checksums import bytes_of
    from sync_core.weights.layout import Region, RegionSource, place_of
    from sync_core.weights.streamed import TensorStream


_MODULES = {
    "sync_core.models.attributes": ("UnsentAttributes",),
    "sync_core.models.binding": ("Binding", "consolidate"),
    "sync_core.models.extract": ("ComputedWeights", "Strategy", "named_tensors", "tensors_of_rank"),
    "sync_core.models.finder": ("tensor_finder",),
    "sync_core.models.lookup": ("modules_in", "resolve"),
    "sync_core.models.match": ("cast_within", "check_match"),
    "sync_core.models.modules": ("is_extra_state", "plain_name"),
    "sync_core.weights.checksums": ("bytes_of",),
    "sync_core.weights.layout": ("Region", "RegionSource", "place_of"),
    "sync_core.weights.streamed": ("TensorStream",),
}

__all__ = [
    "Binding",
    "ComputedWeights",
    "Region",
    "RegionSource",
    "Strategy",
    "TensorStream",
    "UnsentAttributes",
    "bytes_of",
    "cast_within",
    "check_match",
    "consolidate",
    "is_extra_state",
    "modules_in",
    "named_tensors",
    "place_of",
    "plain_name",
    "resolve",
    "tensor_finder",
    "tensors_of_rank",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
