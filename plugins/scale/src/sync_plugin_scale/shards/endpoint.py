"""The parts of the ranks of a trainer and their endpoints, as addresses carry them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sync_core.errors import AddressError
from sync_core.models import Region, RegionSource

# As many as tensors of torch can have.
_MAX_DIMENSIONS = 64
# No index is as large.
_BEYOND = 1 << 63


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor of which a rank holds a region.

    Args:
        name: its name.
        dtype: the dtype in which it travels.
        region: the region.
        shape: the shape of the whole tensor; None where this rank knows its region only.
    """

    name: str
    dtype: torch.dtype
    region: Region
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Holding:
    """The tensors that one rank holds.

    Args:
        rank: the rank.
        size: the number of ranks.
        tensors: what it holds.
        aliases: the names of tied tensors, each with the name of the tensor that is held.
        made_of: the tensors that workers have instead, by name, and the regions that each is made
            of; None where workers have the trainer's tensors.
        verified: whether checksums travel with the parts.
    """

    rank: int
    size: int
    tensors: tuple[HeldTensor, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    made_of: Mapping[str, tuple[RegionSource, ...]] | None = None
    verified: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        made_of = self.made_of
        return {
            "rank": self.rank,
            "size": self.size,
            "tensors": [
                [tensor.name, _name(tensor.dtype), _lists(tensor.region), _lists(tensor.shape)]
                for tensor in self.tensors
            ],
            "aliases": _lists(self.aliases),
            "made_of": made_of
            and {
                name: [[s.name, _lists(s.region), _lists(s.start)] for s in sources]
                for name, sources in made_of.items()
            },
            "verified": self.verified,
        }

    @classmethod
    def from_json(cls, value: Any) -> Holding:
        """Return what `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        rank, size, tensors, aliases, made_of, verified = _entries(
            value, "rank", "size", "tensors", "aliases", "made_of", "verified"
        )
        if not (0 <= _integer(rank) < _integer(size) and type(verified) is bool):
            raise ValueError
        sources = None
        if made_of is not None:
            sources = {
                _text(name): tuple(_list(each, _source)) for name, each in _mapping(made_of).items()
            }
        pairs = tuple(_list(aliases, lambda pair: _items(pair, _text, _text)))
        return cls(rank, size, tuple(_list(tensors, _held)), pairs, sources, verified)


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """The endpoint of one rank.

    Args:
        inner: that of the inner scheme's transport.
        holding: what the rank holds.
        token: the worker's, of the rank's address; empty in an address of the rank's own.
        sender_token: that of the rank's sender; empty there, too.
        options: the options of the rank's sender; None there.
    """

    inner: Any
    holding: Holding
    token: str = field(default="", repr=False)
    sender_token: str = field(default="", repr=False)
    options: Mapping[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class ShardEndpoint:
    """The endpoints of one rank of a trainer, or of all of them, joined.

    Args:
        ranks: in the order of the ranks.
    """

    ranks: tuple[RankEndpoint, ...]

    @property
    def complete(self) -> bool:
        """Return whether it has all ranks of the trainer."""
        return len(self.ranks) == self.ranks[0].holding.size

    def to_json(self, inner: Callable[[Any], Any]) -> list[Any]:
        """Return it as plain values; ``inner`` writes endpoints of the inner scheme."""
        return [
            {
                "inner": inner(rank.inner),
                "holding": rank.holding.to_json(),
                "token": rank.token,
                "sender_token": rank.sender_token,
                "options": rank.options,
            }
            for rank in self.ranks
        ]

    @classmethod
    def from_json(cls, value: Any, inner: Callable[[Any], Any]) -> ShardEndpoint:
        """Return the endpoint that `to_json` wrote; ``inner`` reads those of the inner scheme.

        Raises:
            AddressError: it is something else; without the value, which may be a secret.
        """
        try:
            ranks = []
            for each in _list(value):
                address, holding, token, of_sender, options = _entries(
                    each, "inner", "holding", "token", "sender_token", "options"
                )
                options = None if options is None else _mapping(options)
                held = Holding.from_json(holding)
                tokens = _token(token), _token(of_sender)
                ranks.append(RankEndpoint(inner(address), held, *tokens, options))
            numbers = [rank.holding.rank for rank in ranks]
            sizes = {rank.holding.size for rank in ranks}
            if len(sizes) != 1 or (len(ranks) > 1 and numbers != list(range(sizes.pop()))):
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise AddressError(
                "the endpoint of an address of a sharded trainer must be a list of what its ranks "
                "hold; type join_addresses([…]).to_json()"
            ) from None
        return cls(tuple(ranks))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _lists(value: Any) -> Any:
    return [_lists(each) for each in value] if isinstance(value, tuple | list) else value


def _entries(value: Any, *names: str) -> list[Any]:
    if _mapping(value).keys() != set(names):
        raise ValueError
    return [value[name] for name in names]


def _mapping(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError
    return value


def _list(value: Any, read: Callable[[Any], Any] = lambda each: each) -> list[Any]:
    if type(value) is not list:
        raise ValueError
    return [read(each) for each in value]


def _items(value: Any, *read: Callable[[Any], Any]) -> tuple[Any, ...]:
    return tuple(each(item) for each, item in zip(read, _list(value), strict=True))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError
    return value


def _token(value: Any) -> str:
    text = _text(value)
    if text and (len(text) != 32 or set(text) - set("0123456789abcdef")):
        raise ValueError
    return text


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _BEYOND:
        raise ValueError
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    found = tuple(_list(value, _integer))
    if len(found) > _MAX_DIMENSIONS:
        raise ValueError
    return found


def _region(value: Any) -> Region:
    found: Region = tuple(_list(value, lambda pair: _items(pair, _integer, _integer)))
    if len(found) > _MAX_DIMENSIONS or any(start > stop for start, stop in found):
        raise ValueError
    return found


def _dtype(value: Any) -> torch.dtype:
    found = getattr(torch, _text(value), None)
    if not isinstance(found, torch.dtype):
        raise ValueError  # noqa: TRY004 - all that is wrong here is reported as one error
    return found


def _held(value: Any) -> HeldTensor:
    name, dtype, region, shape = _items(
        value, _text, _dtype, _region, lambda each: None if each is None else _sizes(each)
    )
    ends = shape if shape is not None else [stop for _, stop in region]
    if len(ends) != len(region) or any(r[1] > end for r, end in zip(region, ends, strict=True)):
        raise ValueError(f"{name!r:.100} has no {region!r:.100}, as its shape is {ends!r:.100}")
    return HeldTensor(name, dtype, region, shape)


def _source(value: Any) -> RegionSource:
    name, region, start = _items(value, _text, _region, _sizes)
    if len(start) != len(region):
        raise ValueError
    return RegionSource(name, region, start)
