"""Layers that are broken in one way each; `caught_by` is the case that is to notice."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any, ClassVar

import torch
from torch import Tensor

from sync_core import SkipContext, Update, hookimpl
from sync_testing import LayerConformance, Negated

#: What mutants leak on purpose, for the test to release.
released = threading.Event()


class Mutant:
    """Changes tensors on their way out, and back."""

    caught_by: ClassVar[str]

    def out(self, tensor: Tensor) -> Tensor:
        return tensor

    def back(self, tensor: Tensor) -> Tensor:
        return tensor

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        update = yield
        update.replace([self.out(tensor.detach()) for tensor in update.tensors])
        return update

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update, model: Any, context: Any) -> Generator[None, Any, Any]:
        update.replace([self.back(tensor) for tensor in update.tensors])
        return (yield)


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32


class DoesNotUndoItself(Mutant):
    caught_by = "test_floating_point_comes_back"

    def out(self, tensor: Tensor) -> Tensor:
        return -tensor if _is_float(tensor) else tensor


class KeepsTheDtypeOfTheWay(Mutant):
    caught_by = "test_floating_point_comes_back"

    def out(self, tensor: Tensor) -> Tensor:
        return tensor.half() if _is_float(tensor) else tensor


class LosesMoreThanItSays(Mutant):
    caught_by = "test_floating_point_comes_back"

    def out(self, tensor: Tensor) -> Tensor:
        return tensor.round() if _is_float(tensor) else tensor


class RoundsIntegers(Mutant):
    caught_by = "test_other_dtypes_come_back_exactly"

    def out(self, tensor: Tensor) -> Tensor:
        return tensor.to(torch.int32) if tensor.dtype == torch.int64 else tensor


class FlattensScalars(Mutant):
    caught_by = "test_shapes_come_back"

    def out(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(-1) if tensor.dim() == 0 else tensor


class DividesByTheLargest(Mutant):
    """There is none in a tensor without elements."""

    caught_by = "test_shapes_come_back"

    def out(self, tensor: Tensor) -> Tensor:
        tensor.abs().max()
        return tensor


class ChangesTheTrainer(Mutant):
    caught_by = "test_the_trainers_tensors_are_not_touched"

    def out(self, tensor: Tensor) -> Tensor:
        return tensor.neg_() if _is_float(tensor) else tensor

    def back(self, tensor: Tensor) -> Tensor:
        return -tensor if _is_float(tensor) else tensor


class WritesToWhatHasArrived(Mutant):
    """Memory that shm maps read-only."""

    caught_by = "test_what_has_arrived_is_not_written_to"

    def out(self, tensor: Tensor) -> Tensor:
        return -tensor if _is_float(tensor) else tensor

    def back(self, tensor: Tensor) -> Tensor:
        return tensor.neg_() if _is_float(tensor) else tensor


class Unties(Mutant):
    caught_by = "test_tied_tensors_stay_tied"

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        update = yield
        update.rename({name: tensor.detach().clone() for name, tensor in update.items()})
        return update


class SendsDifferences(Mutant):
    """From what went out last, as if every worker had that."""

    caught_by = "test_a_worker_that_missed_versions"

    def __init__(self) -> None:
        self.sent: Any = 0
        self.had: Any = 0

    def __reduce__(self) -> Any:
        return SendsDifferences, ()

    def out(self, tensor: Tensor) -> Tensor:
        difference: Tensor = tensor - self.sent
        self.sent = tensor.clone()
        return difference

    def back(self, tensor: Tensor) -> Tensor:
        self.had = tensor + self.had
        return torch.as_tensor(self.had)


class BelievesThatModelsKeepTheirWeights(Mutant):
    """Sends nothing new where nothing was changed."""

    caught_by = "test_a_worker_whose_model_was_changed"
    last: ClassVar[dict[str, Any]] = {}

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update, model: Any, context: Any) -> Generator[None, Any, Any]:
        values = {name: tensor.clone() for name, tensor in update.items()}
        before = self.last.get("w") if model is self.last.get("model") else None
        if before is not None and "w" in values and torch.equal(before, values["w"]):
            update.replace([model[spec.name].clone() for spec in update.layout.specs])
        self.last.update(model=model, w=values.get("w"))
        return (yield)


class MixesSenders(Mutant):
    """Remembers what a version was, and not whose."""

    caught_by = "test_two_senders_do_not_mix"
    known: ClassVar[dict[int, Tensor]] = {}

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update, model: Any, context: Any) -> Generator[None, Any, Any]:
        known = self.known.setdefault(context.version, update.tensors[0].clone())
        update.replace([known, *update.tensors[1:]])
        return (yield)


class UndoesItselfTooLate(Mutant):
    caught_by = "test_with_another_layer"

    def out(self, tensor: Tensor) -> Tensor:
        return -tensor if _is_float(tensor) else tensor

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update, model: Any, context: Any) -> Generator[None, Any, Any]:
        applied = yield
        update.replace([self.out(tensor) for tensor in update.tensors])
        return applied


class NeedsTheWholeModel(Mutant):
    caught_by = "test_a_partial_update"

    def __init__(self) -> None:
        self.count = 0

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        update = yield
        self.count = max(self.count, len(update.tensors))
        if len(update.tensors) < self.count:
            raise ValueError("some tensors are missing")
        return update


class ForgetsLateWorkers(Mutant):
    caught_by = "test_a_worker_that_joins_late"

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update, model: Any, context: Any) -> Generator[None, Any, Any]:
        if context.worker_id:
            update.replace([torch.zeros_like(tensor) for tensor in update.tensors])
        return (yield)


class DoesNotPickle(Mutant):
    caught_by = "test_addresses_that_name_it_pickle"

    def __init__(self) -> None:
        self.lock = threading.Lock()


class HoldsBackTheFirst(Mutant):
    caught_by = "test_the_first_push_to_a_worker_goes_out"

    @hookimpl
    def skip_update(self, context: SkipContext) -> bool:
        return context.version == 0


class SkipsForGood(Mutant):
    caught_by = "test_many_versions_in_a_row"

    @hookimpl
    def skip_update(self, context: SkipContext) -> bool:
        return context.updated


class SaysNothingOfSkipping(Mutant):
    caught_by = "test_what_it_says_of_skipping"

    @hookimpl
    def skip_update(self, context: SkipContext) -> Any:
        return "perhaps" if context.pushes == 100 else None


class LeaksAThread(Mutant):
    caught_by = "test_it_keeps_no_thread"
    started: ClassVar[list[threading.Thread]] = []

    def out(self, tensor: Tensor) -> Tensor:
        self.started.append(threading.Thread(target=released.wait, daemon=True))
        self.started[-1].start()
        return tensor


class IsNotExplained(Mutant):
    caught_by = "test_it_says_what_it_does"


IsNotExplained.__doc__ = Mutant.__doc__ = None

MUTANTS = Mutant.__subclasses__()


class TestBaseline(LayerConformance):
    layer = Negated()


globals().update(
    {
        f"Test{mutant.__name__}": type(
            f"Test{mutant.__name__}",
            (LayerConformance,),
            {"layer": mutant(), "__module__": __name__},
        )
        for mutant in MUTANTS
    }
)
CAUGHT_BY = {f"Test{mutant.__name__}": mutant.caught_by for mutant in MUTANTS} | {
    "TestBaseline": ""
}
