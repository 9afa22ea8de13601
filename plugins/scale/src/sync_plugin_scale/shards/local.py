"""The shards of a model on one rank: which region of each whole tensor it has, and where."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from sync_core.errors import LayoutMismatchError, ModelError
from sync_core.models import Region, Strategy, tensors_of_rank
from sync_plugin_scale.shards.plan import inside, shape_of, whole_region, write_region

#: Regions of plain tensors by name, as users give them; see `read_region`.
Regions: TypeAlias = Mapping[str, Sequence[Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Part:
    """A worker's model, some plain tensors of which are parts of the trainer's.

    Args:
        model: a module or a mapping of tensors.
        regions: by the tensor's name, the region of the whole tensor that it is: for each
            dimension ``(start, stop)`` or ``(start, stop, size)``.

    Example:
        >>> Part({"weight": torch.zeros(2, 3)}, regions={"weight": ((2, 4), (0, 3))}).regions
        {'weight': ((2, 4), (0, 3))}
    """

    model: Any
    regions: Regions = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one tensor that one rank has.

    Args:
        tensor: the rank's part, without a copy.
        region: the region of the whole tensor that it is.
        shape: the shape of the whole tensor; None where only the region is known.
    """

    tensor: Tensor
    region: Region
    shape: tuple[int, ...] | None


def region_of(tensor: Tensor) -> Region:
    """The region that this rank has of a distributed tensor, whatever its placements.

    Raises:
        ModelError: a tensor whose parts are still to be summed up over ranks.
    """
    if any(placement.is_partial() for placement in tensor.placements):  # type: ignore[attr-defined]
        raise ModelError("it is partial: its parts are still to be summed up over ranks")
    (region,) = _chunks(tensor)
    return region


def _chunks(tensor: Any) -> list[Region]:
    # Of torch's checkpoints; its name is not public.
    create = getattr(tensor, "__create_chunk_list__", None)
    if create is None:
        return [_computed_region(tensor)]
    return [
        tuple((first, first + n) for first, n in zip(chunk.offsets, chunk.sizes, strict=True))
        for chunk in create()
    ]


def _computed_region(tensor: Any) -> Region:
    """The region of a tensor that is cut as `torch.chunk` does, from its mesh and placements.

    The dimensions of a mesh cut from left to right, but for FSDP over tensor parallelism, whose
    placement says into how many pieces others have cut before.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return tuple((0, 0) for _ in tensor.shape)
    region = list(whole_region(tensor.shape))
    cuts = list(zip(tensor.placements, coordinate, range(tensor.device_mesh.ndim), strict=True))
    # What says that it is cut later, is cut later.
    for placement, index, axis in sorted(cuts, key=lambda cut: getattr(cut[0], "split_factor", 1)):
        if placement.is_shard() or hasattr(placement, "split_factor"):
            start, stop = region[placement.dim]
            step = -(-(stop - start) // tensor.device_mesh.size(axis))
            first = min(start + index * step, stop)
            region[placement.dim] = (first, min(first + step, stop))
    return tuple(region)


def is_distributed(value: object) -> bool:
    """Return whether this is a `DTensor`; none exists before torch's module of them is imported."""
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return isinstance(value, kind)


def is_divided(model: Any) -> bool:
    """Return whether a receiver's model has parts of the trainer's tensors.

    Example:
        >>> is_divided(torch.nn.Linear(2, 1)), is_divided(Part(torch.nn.Linear(2, 1)))
        (False, True)
    """
    if isinstance(model, Part):
        return True
    if model is None or isinstance(model, str) or "torch.distributed.tensor" not in sys.modules:
        return False
    try:
        return any(map(is_distributed, tensors_of_rank(model, "state_dict").values()))
    except ModelError:
        # Of several models by name, or of references; what reads them says what is wrong.
        return False


def shards_of(
    model: Any, regions: Regions | None = None, strategy: Strategy = "state_dict"
) -> dict[str, Shard]:
    """The shards that a model has on this rank, by name.

    Modules are read by their `state_dict`, since the parameters of a module under FSDP2 are whole
    or not, as its last forward left them. No rank waits for another.

    Args:
        model: a module, a mapping of tensors, or a `Part`; distributed tensors, and plain ones.
        regions: of plain tensors, those of which this rank has only a part; see `Part`.
        strategy: see `sync_core.models.tensors_of_rank`.

    Raises:
        ModelError: the model cannot be read, or a region is not as large as its tensor.
    """
    if isinstance(model, Part):
        return shards_of(model.model, model.regions, strategy)
    if isinstance(model, str):
        raise ModelError(f"{model!r} is a reference; give the sharded model itself")
    regions = {} if regions is None else regions
    found: dict[str, Shard] = {}
    named = tensors_of_rank(model, strategy)
    if unknown := regions.keys() - named.keys():
        raise ModelError(f"regions names {min(unknown)!r}, which the model does not have")
    for name, tensor in named.items():
        if is_lazy(tensor):
            raise ModelError(
                f"{name!r} has no shape yet (a lazy parameter); run the model once before this"
            )
        if is_distributed(tensor):
            try:
                region = region_of(tensor)
            except ModelError as error:
                raise ModelError(f"{name!r} cannot be sent: {error}") from error
            with torch.no_grad():
                part = tensor.to_local()  # type: ignore[attr-defined]
            found[name] = Shard(part, region, tuple(tensor.shape))
        elif name in regions:
            region, shape = read_region(name, regions[name], tensor)
            found[name] = Shard(tensor, region, shape)
        else:
            found[name] = Shard(tensor, whole_region(tensor.shape), tuple(tensor.shape))
    return found


def read_region(
    name: str, given: Sequence[Sequence[int]], tensor: Tensor
) -> tuple[Region, tuple[int, ...] | None]:
    """The region of a plain tensor as a user gave it, and the shape of the whole tensor.

    Args:
        name: the tensor's, for messages.
        given: for each dimension ``(start, stop)`` or ``(start, stop, size)``.
        tensor: what is in the region.

    Returns:
        The region, and the shape where all sizes were given; else None.

    Raises:
        ModelError: it is not as large as the tensor; both are in the message.

    Example:
        >>> read_region("weight", ((2, 4, 8), (0, 3, 3)), torch.zeros(2, 3))
        (((2, 4), (0, 3)), (8, 3))
    """
    if any(len(bounds) not in (2, 3) for bounds in given):
        raise ModelError(
            f"the region of {name!r} is {given!r}; give (start, stop), or (start, stop, size), for "
            "each dimension of the whole tensor"
        )
    region = tuple((int(bounds[0]), int(bounds[1])) for bounds in given)
    sizes = tuple(int(bounds[2]) for bounds in given if len(bounds) == 3)
    shape = sizes if len(sizes) == len(region) else None
    ends = shape or tuple(stop for _, stop in region)
    if any(not 0 <= start <= stop <= end for (start, stop), end in zip(region, ends, strict=True)):
        raise ModelError(f"the region {given!r} of {name!r} is not one of a tensor")
    if shape_of(region) != tuple(tensor.shape):
        raise ModelError(
            f"the region {write_region(region)} of {name!r} has the shape "
            f"{list(shape_of(region))}, and its tensor {list(tensor.shape)}"
        )
    return region, shape


class LocalShards:
    """Reads the shards of a trainer's rank, and checks that they stay the same regions.

    Args:
        regions: see `shards_of`.
    """

    def __init__(self, regions: Regions | None) -> None:
        self._regions = regions
        #: Without their tensors, by name; empty before the first reading.
        self.places: dict[str, tuple[Region, tuple[int, ...] | None]] = {}

    def read(self, weights: Any, strategy: Strategy) -> dict[str, Tensor]:
        """The tensors that this rank has, by name."""
        shards = shards_of(weights, self._regions, strategy)
        places = {name: (shard.region, shard.shape) for name, shard in shards.items()}
        if self.places and places != self.places:
            changed = next(
                n for n in {**places, **self.places} if places.get(n) != self.places.get(n)
            )
            raise LayoutMismatchError(
                f"{changed!r} is new, gone, or sharded in another way than when the sender was "
                "made; on every rank, make a new Sender, and new Receivers with models changed in "
                "the same way"
            )
        self.places = places
        return {name: shard.tensor for name, shard in shards.items()}


class RegionViews(Mapping[str, Tensor]):
    """Regions of a model's tensors, as views under names of their own.

    A receiver of parts gets them in place of its model, so that each part is written where it
    belongs.

    Args:
        model: a module, a mapping of tensors, or a `Part`.
        pieces: by the name of a view, the name of the model's tensor, and a region of the whole
            tensor, in which the model's own region has it.

    Example:
        >>> model = Part({"weight": torch.zeros(2, 3)}, regions={"weight": ((2, 4), (0, 3))})
        >>> views = RegionViews(model, {"row": ("weight", ((3, 4), (0, 3)))})
        >>> _ = views["row"].fill_(1.0)
        >>> model.model["weight"].tolist()
        [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """

    def __init__(
        self,
        model: Any,
        pieces: Mapping[str, tuple[str, Region]],
    ) -> None:
        self._model = model
        self._pieces = pieces
        self._tensors: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._current()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def views_of(self, weights: Any) -> Mapping[str, Tensor]:
        """The same regions of other weights, which are divided as the model is.

        Args:
            weights: as the model, or what this mapping holds.
        """
        if isinstance(weights, Mapping) and weights.keys() == self._pieces.keys():
            return weights
        if isinstance(self._model, Part) and not isinstance(weights, Part):
            weights = Part(weights, self._model.regions)
        return RegionViews(weights, self._pieces)

    def items(self) -> Any:
        """The views of the tensors that the model has now."""
        return self._current().items()

    def values(self) -> Any:
        """The views of the tensors that the model has now."""
        return self._current().values()

    def _current(self) -> dict[str, Tensor]:
        shards = shards_of(self._model)
        places = {name: shard.tensor.data_ptr() for name, shard in shards.items()}
        if self._views and places == {n: t.data_ptr() for n, t in self._tensors.items()}:
            return self._views
        self._tensors = {name: shard.tensor.detach() for name, shard in shards.items()}
        self._views = {
            view: self._tensors[name][inside(region, shards[name].region)]
            for view, (name, region) in self._pieces.items()
        }
        return self._views
