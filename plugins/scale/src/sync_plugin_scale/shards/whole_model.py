"""The whole tensors of a trainer, put together from what its ranks hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from sync_core import Layout
from sync_core.errors import LayoutMismatchError, ModelError
from sync_core.models import Region, RegionSource
from sync_plugin_scale.shards.endpoint import HeldTensor, Holding
from sync_plugin_scale.shards.local import Part, Shard, shards_of
from sync_plugin_scale.shards.plan import intersect, shape_of, shifted, size_of, whole_region

_SHOWN = 8


class WholeModel:
    """The whole tensors that the ranks of a trainer hold together, as workers name them.

    Args:
        holdings: what each rank holds, in the order of the ranks.

    Raises:
        LayoutMismatchError: the ranks do not agree on a tensor.

    Example:
        >>> upper = HeldTensor("weight", torch.float32, ((0, 2), (0, 3)), (4, 3))
        >>> lower = HeldTensor("weight", torch.float32, ((2, 4), (0, 3)), (4, 3))
        >>> trainer = WholeModel([Holding(0, 2, (upper,)), Holding(1, 2, (lower,))])
        >>> str(trainer.layout.specs[0])
        'weight: float32[4, 3]'
        >>> trainer.held("weight")
        [(0, ((0, 2), (0, 3))), (1, ((2, 4), (0, 3)))]
    """

    def __init__(self, holdings: Sequence[Holding]) -> None:
        problems: list[str] = []
        #: For each of the trainer's tensors, the ranks that hold a region of it.
        self._held: dict[str, list[tuple[int, Region]]] = {}
        self._kinds: dict[str, HeldTensor] = {}
        #: The positions of tensors on each rank, by name.
        self.positions: list[dict[str, int]] = []
        self._tied: dict[str, str] = {}
        for rank, holding in enumerate(holdings):
            self.positions.append({t.name: i for i, t in enumerate(holding.tensors)})
            owners = dict(holding.aliases)
            for tensor in holding.tensors:
                self._held.setdefault(tensor.name, []).append((rank, tensor.region))
                problems += self._add(tensor, rank)
            for alias, owner in owners.items():
                self._tied.setdefault(alias, owner)
        # Tied on some ranks; on those where their shards are empty, nothing shows that.
        for alias, owner in self._tied.items():
            if alias not in self._held:
                self._held[alias], self._kinds[alias] = self._held[owner], self._kinds[owner]
                for positions in self.positions:
                    if owner in positions:
                        positions[alias] = positions[owner]
            else:
                self._complete(alias, owner)
        if problems:
            raise LayoutMismatchError(
                "the ranks of the trainer hold different models:\n  "
                + "\n  ".join(problems[:_SHOWN])
            )
        made_of = holdings[0].made_of
        #: Whether workers have the trainer's own tensors, so that no region lies elsewhere.
        self._same = made_of is None
        self._sources = made_of or {
            name: (
                RegionSource(name, whole_region(self.shape(name)), (0,) * len(self.shape(name))),
            )
            for name in self._held
        }
        #: Names, dtypes and whole shapes of the tensors that workers have.
        self.layout = self._layout()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one of the trainer's whole tensors."""
        shape = self._kinds[name].shape
        if shape is not None:
            return shape
        regions = [region for _, region in self._held[name]]
        return tuple(max(stop for _, stop in bounds) for bounds in zip(*regions, strict=True))

    def has_tied(self, name: str, other: str) -> bool:
        """Return whether two of the workers' tensors are one of the trainer's."""
        return self._origins(name) == self._origins(other)

    def _origins(self, name: str) -> object:
        """Return the regions of the trainer's that one of the workers' tensors is made of."""
        return tuple(
            (self._tied.get(s.name, s.name), s.region, s.start) for s in self._sources[name]
        )

    def held(self, name: str) -> list[tuple[int, Region]]:
        """The ranks that hold regions of a worker's tensor, in that tensor's coordinates."""
        if self._same:
            return [(rank, region) for rank, region in self._held[name] if size_of(region)]
        found = []
        for source in self._sources[name]:
            offset = [
                to - start for to, (start, _) in zip(source.start, source.region, strict=True)
            ]
            for rank, region in self._held[source.name]:
                common = intersect(region, source.region)
                if common is not None and size_of(common):
                    found.append((rank, shifted(common, offset)))
        return found

    def origin(self, name: str, region: Region) -> Iterator[tuple[str, Region, Region]]:
        """The trainer's tensors that a region of a worker's tensor comes from.

        Yields the name, the region of that tensor, and the same in the worker's coordinates.
        """
        if self._same:
            yield name, region, region
            return
        for source in self._sources[name]:
            back = [start - to for to, (start, _) in zip(source.start, source.region, strict=True)]
            offset = [-n for n in back]
            common = intersect(shifted(region, back), source.region)
            if common is not None:
                yield source.name, common, shifted(common, offset)

    def _layout(self) -> Layout:
        owners: dict[object, str] = {}
        aliases, kinds = [], []
        for name, sources in self._sources.items():
            owner = owners.setdefault(self._origins(name), name)
            if owner == name:
                kinds.append((name, self._dtype(name, sources), whole_shape(sources)))
            else:
                aliases.append((name, owner))
        return Layout(Layout.of_kinds(kinds).specs, tuple(aliases))

    def _dtype(self, name: str, sources: Sequence[RegionSource]) -> torch.dtype:
        dtypes = {source.name: self._kinds[source.name].dtype for source in sources}
        if len(set(dtypes.values())) > 1:
            raise LayoutMismatchError(f"{name!r} would be made of different dtypes: {dtypes}")
        return next(iter(dtypes.values()))

    def _add(self, tensor: HeldTensor, rank: int) -> list[str]:
        known = self._kinds.setdefault(tensor.name, tensor)
        if known.dtype != tensor.dtype or len(known.region) != len(tensor.region):
            first = self._held[tensor.name][0][0]
            kinds = f"{_kind(known)} on rank {first} and {_kind(tensor)} on rank {rank}"
            return [f"{tensor.name!r} is {kinds}"]
        if known.shape is None:
            self._kinds[tensor.name] = tensor
        elif tensor.shape is not None and tensor.shape != known.shape:
            first = self._held[tensor.name][0][0]
            shapes = f"{list(known.shape)} on rank {first} and {list(tensor.shape)} on rank {rank}"
            return [f"{tensor.name!r} is as a whole {shapes}"]
        return []

    def _complete(self, alias: str, owner: str) -> None:
        """Add the ranks that hold a tied tensor under the name of the other."""
        ranks = {rank for rank, _ in self._held[alias]}
        for rank, region in self._held[owner]:
            if rank not in ranks:
                self._held[alias].append((rank, region))
                self.positions[rank][alias] = self.positions[rank][owner]


def _kind(tensor: HeldTensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of {len(tensor.region)} dimensions"


def whole_shape(sources: Sequence[RegionSource]) -> tuple[int, ...]:
    """The shape of the tensor that regions make up."""
    ends = [
        [start + size for start, size in zip(source.start, shape_of(source.region), strict=True)]
        for source in sources
    ]
    return tuple(max(bounds) for bounds in zip(*ends, strict=True))


def chained(layers: Sequence[Any], layout: Layout) -> Mapping[str, tuple[RegionSource, ...]] | None:
    """The tensors that layers make of regions of others, one layer after the other.

    Args:
        layers: with `region_sources`; see the capability ``regions``.
        layout: of the trainer's whole tensors.

    Returns:
        Each tensor's name, with the regions of the trainer's tensors that it is made of; None
        without layers.
    """
    made_of: dict[str, tuple[RegionSource, ...]] | None = None
    for layer in layers:
        found = layer.region_sources(layout)
        if made_of is None:
            made_of = {name: tuple(sources) for name, sources in found.items()}
        else:
            before = made_of
            made_of = {
                name: tuple(part for source in sources for part in _traced(source, before))
                for name, sources in found.items()
            }
        layout = Layout.of_kinds(
            (name, layout.specs[layout.index[sources[0].name]].dtype, whole_shape(sources))
            for name, sources in found.items()
        )
    return made_of


def _traced(
    source: RegionSource, before: Mapping[str, Sequence[RegionSource]]
) -> Iterator[RegionSource]:
    """A region of a tensor that is itself made of regions, as regions of those."""
    for part in before[source.name]:
        there = tuple(
            (start, start + size)
            for start, size in zip(part.start, shape_of(part.region), strict=True)
        )
        common = intersect(there, source.region)
        if common is not None:
            back = [r[0] - s for r, s in zip(part.region, part.start, strict=True)]
            start = tuple(
                to + c[0] - r[0]
                for to, c, r in zip(source.start, common, source.region, strict=True)
            )
            yield RegionSource(part.name, shifted(common, back), start)


def has_extra_state(model: Any) -> bool:
    """Return whether a model has extra state, which its modules alone can write.

    Raises:
        ModelError: it has, and its tensors are parts of the trainer's.
    """
    return _has_extra_state(model, shards_of(model))


def _has_extra_state(model: Any, shards: Mapping[str, Shard]) -> bool:
    extra = next((name for name in shards if "_extra_state" in name.split(".")), None)
    parts = [name for name, each in shards.items() if each.region != whole_region(each.shape or ())]
    if extra is None:
        return False
    if parts or isinstance(model, Part):
        raise ModelError(
            f"{extra!r} is extra state, which is not written into a model of parts such as "
            f"{(parts or ['Part'])[0]!r}; leave it out in the trainer: Sender(…, "
            'layers=[Rename({"*._extra_state*": None}, strict=False)])'
        )
    return True


def wanted_regions(model: Any, trainer: WholeModel, *, cast: bool) -> dict[str, Region]:
    """Return the regions of whole tensors that a model wants, by name; tied tensors once.

    Args:
        model: a module, a mapping of tensors, or a `Part`.
        trainer: what its weights come from.
        cast: whether floating-point tensors may have other dtypes.

    Raises:
        LayoutMismatchError: the model does not fit the trainer's; the tensors are named.
        ModelError: the model cannot be read, or has parts and extra state.

    Example:
        >>> weight = HeldTensor("weight", torch.float32, ((0, 4), (0, 3)), (4, 3))
        >>> trainer = WholeModel([Holding(0, 1, (weight,))])
        >>> model = Part({"weight": torch.zeros(2, 3)}, regions={"weight": ((2, 4), (0, 3))})
        >>> wanted_regions(model, trainer, cast=False)
        {'weight': ((2, 4), (0, 3))}
    """
    shards = shards_of(model)
    # Raises for extra state in a model of parts.
    _has_extra_state(model, shards)
    theirs = trainer.layout
    problems = [
        f"{name!r} is in the weights, not in the model"
        for name in theirs.names
        if name not in shards
    ]
    wanted: dict[str, Region] = {}
    tied = dict(Layout.of({name: shard.tensor for name, shard in shards.items()}).aliases)
    for name, shard in shards.items():
        owner = tied.get(name)
        problems += _differences(name, shard, owner, trainer, cast=cast)
        if owner is None and size_of(shard.region):
            wanted[name] = shard.region
    if problems:
        shown = problems[:_SHOWN]
        if len(problems) > _SHOWN:
            shown.append(f"… and {len(problems) - _SHOWN} more")
        raise LayoutMismatchError(
            "the weights do not fit the model; nothing was written:\n  " + "\n  ".join(shown)
        )
    return wanted


def _differences(
    name: str, shard: Shard, owner: str | None, trainer: WholeModel, *, cast: bool
) -> Iterator[str]:
    """Say how a tensor of a model, and of ``owner`` if it is tied, differs from the trainer's."""
    theirs = trainer.layout
    if name not in theirs.index:
        yield f"{name!r} is in the model, not in the weights"
        return
    spec = theirs.specs[theirs.index[name]]
    floats = spec.dtype.is_floating_point and shard.tensor.dtype.is_floating_point
    if spec.dtype != shard.tensor.dtype and not (cast and floats):
        advice = '; a layer that casts allows that: Sender(…, layers=["bf16"])' if floats else ""
        kinds = f"{spec.dtype} in the weights and {shard.tensor.dtype} in the model"
        yield f"{name!r} is {kinds}{advice}"
    if shard.shape is not None and shard.shape != spec.shape:
        yield (
            f"{name!r} is {list(spec.shape)} in the weights and {list(shard.shape)} in the "
            "model; a part of a tensor needs its region: Receiver(address, "
            "Part(model, regions={…}))"
        )
    elif owner is not None and not trainer.has_tied(name, owner):
        yield (
            f"{name!r} and {owner!r} are one tensor in the model and two in the weights; "
            "make the model without that tie (tie_word_embeddings=False), or tie those sent"
        )
