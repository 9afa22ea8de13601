"""``Sender(only="trainable")``: leaves out parameters that are not trained, once they were sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from sync_core.errors import ModelError, OptionError
from sync_core.models.extract import Strategy, named_tensors
from sync_core.weights.payload import Update

# The elements of a tensor that are looked at in every send; `check` looks at all.
_SAMPLED = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Reference:
    """A tensor as it was sent: some of its bits, and the sum of all."""

    sampled: Tensor
    total: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Reference:
        return cls(_sample(tensor), _total(tensor))


class TrainableOnly:
    """Selects what a version has to bring: all but frozen parameters that were sent before.

    A parameter that is frozen later is sent once more, and one that is trained again with every
    version from then on.

    Args:
        strategy: how the model is read.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
        >>> only = TrainableOnly("tensordict")
        >>> update = Update.of(dict(model.named_parameters()))
        >>> [len(only.select(update, model).layout.specs) for _ in range(2)]
        [4, 2]
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._sent: dict[str, _Reference] = {}

    @classmethod
    def of(cls, only: object, strategy: Strategy, *, gather: bool) -> Self | None:
        """Return the selection that the argument ``only`` of `Sender` asks for; None for None.

        Raises:
            OptionError: it is something else, or cannot be combined with ``gather``.
        """
        if only is None:
            return None
        if only != "trainable":
            raise OptionError(f"only must be 'trainable' or None, got {only!r}")
        if gather:
            raise OptionError("only='trainable' does not know which gathered tensors are trained")
        return cls(strategy)

    def select(self, update: Update, model: Any) -> Update:
        """Return the part of an update of the whole model that has to travel.

        Raises:
            ModelError: a frozen parameter has changed since it was sent, as a sample shows.
        """
        layout, tensors = update.layout, update.tensors
        frozen = self._frozen(update, model)
        for name, reference in self._sent.items():
            if name in frozen and not _equal(_sample(frozen[name]), reference.sampled):
                raise _changed(name)
        names = [spec.name for spec in layout.specs]
        kept = tuple(
            i for i, name in enumerate(names) if name not in frozen or name not in self._sent
        )
        self._sent = {
            name: self._sent.get(name) or _Reference.of(tensor) for name, tensor in frozen.items()
        }
        return Update(layout.subset(kept), [tensors[i] for i in kept])

    def forget(self) -> None:
        """Take no parameter for sent: other weights than the model's are."""
        self._sent = {}

    def check(self, update: Update, model: Any) -> None:
        """Raise `ModelError` where a frozen parameter has changed since it was sent at all."""
        for name, tensor in self._frozen(update, model).items():
            if name in self._sent and _total(tensor) != self._sent[name].total:
                raise _changed(name)

    def _frozen(self, update: Update, model: Any) -> Mapping[str, Tensor]:
        """The tensors of an update that are parameters under all their names, and not trained."""
        index, specs = update.layout.index, update.layout.specs
        trained = {
            index[name]
            for name, tensor in named_tensors(model, self._strategy).items()
            if not isinstance(tensor, nn.Parameter) or tensor.requires_grad
        }
        return {
            spec.name: tensor
            for i, (spec, tensor) in enumerate(zip(specs, update.tensors, strict=True))
            if i not in trained
        }


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(_INTEGERS[min(8, flat.element_size())]) if flat.numel() else flat


def _sample(tensor: Tensor) -> Tensor:
    """Some of the bits of a tensor, always the same ones."""
    words = _words(tensor)
    return words[:: max(1, words.numel() // _SAMPLED)].clone()


def _total(tensor: Tensor) -> int:
    """The sum of the bits of a tensor, as integers."""
    words = _words(tensor)
    return int(words.sum(dtype=torch.int64)) if words.numel() else 0


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and torch.equal(one, other)


def _changed(name: str) -> ModelError:
    return ModelError(
        f"{name!r} does not require a gradient, and has changed since it was sent, which "
        "only='trainable' would not send; type sender.send(model.state_dict()) to send all, or "
        "leave out only="
    )
