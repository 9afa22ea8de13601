"""Conformance of layers: `LayerConformance`."""

from __future__ import annotations

import gc
import inspect
import pickle
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from sync_core import Receiver, Sender, SendError, SendReport, SkipContext, SyncError, registry
from sync_core.hooks import implemented
from sync_plugin_std import select
from sync_testing.cases import Conformance
from sync_testing.expectations import VALUES
from sync_testing.loopback import Loopback, offered
from sync_testing.negated import Negated
from sync_testing.schemes.models import (
    Tied,
    fingerprints,
    frozen,
    make_policy,
    nested,
    parametrised,
    recurrent,
    stateful,
)
from sync_testing.worker_groups import count_threads


def eighths(seed: int) -> Tensor:
    """Return small multiples of 1/8, which every 16-bit floating-point dtype represents exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-64, 65, (12,), generator=generator) / 8


def matrix(value: int, dtype: torch.dtype) -> Tensor:
    """Return a small matrix of one value, of any dtype."""
    return torch.full((5, 3), float(value)).to(dtype)


class Vector(nn.Module):
    """A model with one parameter and one buffer."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(values)
        self.register_buffer("n", values.sign().to(torch.int64))


def named(model: Any) -> Mapping[str, Tensor]:
    """Return the tensors of a model by name."""
    tensors: Mapping[str, Tensor] = model.state_dict() if isinstance(model, nn.Module) else model
    return tensors


# A layer that skips more pushes than this in a row never updates its workers.
_MOST_SKIPPED = 64


class LayerLink:
    """A sender and its workers, all in this thread.

    Args:
        sender: the sender.
        targets: the models of its workers.
        settles: the number of updates with the same weights until a worker has them.
    """

    def __init__(self, sender: Sender, targets: list[Any], settles: int = 1) -> None:
        self.sender = sender
        self.settles = settles
        self.target = targets[0]
        self.receivers = [Receiver(sender.address(i), t) for i, t in enumerate(targets)]

    def send(self, weights: Any = None, worker_ids: list[int] | None = None) -> int:
        """Send until the target workers have the weights; return the version."""
        for _ in range(self.settles):
            version = self._send(weights, worker_ids)
        return version

    def _send(self, weights: Any, worker_ids: list[int] | None) -> int:
        """Push until every target worker was updated once; return the version."""
        wanted = set(self.sender.all_worker_ids() if worker_ids is None else worker_ids)
        for _ in range(_MOST_SKIPPED):
            wanted -= set(self._push(weights, sorted(wanted)).updated)
            if not wanted:
                return self.sender.version
        raise AssertionError(f"{_MOST_SKIPPED} pushes in a row were held back")

    def push_unseen(self, weights: Any) -> None:
        """Send until a version is not skipped, and let no worker receive it."""
        for _ in range(_MOST_SKIPPED):
            self.sender.send_async(weights).wait(0.0)
        raise AssertionError(f"{_MOST_SKIPPED} pushes in a row were held back")

    def join(self, target: Any) -> None:
        """Add a worker."""
        worker_id = self.sender.add_worker()
        self.receivers.append(Receiver(self.sender.address(worker_id), target))

    def come_back(self, target: Any) -> None:
        """Close the receiver of worker 0, and make another."""
        self.receivers[0].close()
        address = pickle.loads(pickle.dumps(self.sender.address(0)))
        self.receivers[0] = Receiver(address, target)

    def _push(self, weights: Any, worker_ids: list[int]) -> SendReport:
        pending = self.sender.send_async(weights, worker_ids)
        for worker_id in worker_ids:
            # The sender reports the receiver's error.
            with suppress(SyncError):
                self.receivers[worker_id].receive(0)
        return pending.wait(0.0)


class LayerCases(Conformance):
    """Base class of the cases; see `LayerConformance` for the attributes."""

    layer: ClassVar[Any]
    tolerance: ClassVar[float] = 0.0
    settles: ClassVar[int] = 1

    def make_source(self, seed: int) -> Any:
        """Make the trainer's model, with different values for each seed."""
        return Vector(eighths(seed))

    def make_target(self) -> Any:
        """Make a worker's model."""
        return Vector(torch.zeros(12))

    def expected(self, source: Any) -> Mapping[str, Tensor]:
        """Return the expected tensors of a worker by name, after a send of ``source``."""
        return named(source)

    @pytest.fixture
    def senders(self) -> Iterator[ExitStack]:
        """Return an `ExitStack` that is closed at the end of the case."""
        with ExitStack() as stack:
            yield stack

    def link(
        self, senders: ExitStack, source: Any, *targets: Any, layers: Any = None, **options: Any
    ) -> LayerLink:
        """Return a sender with the layer, and a worker for each target."""
        sender = Sender(
            Loopback(), source, num_workers=len(targets), layers=layers or [self.layer], **options
        )
        return LayerLink(senders.enter_context(sender), list(targets), self.settles)

    def check_target(self, target: Any, source: Any) -> None:
        """Check that a worker has the expected weights after a send of ``source``."""
        self.check(named(target), self.expected(source))

    def check(self, got: Any, sent: Any) -> None:
        """Check names, dtypes and shapes, and the values up to the tolerance."""
        assert _kinds(got) == _kinds(sent), "the layer must restore every name, dtype and shape"
        for name, tensor in sent.items():
            mine, theirs = got[name].detach(), tensor.detach()
            if not theirs.is_floating_point() or theirs.dtype.itemsize == 1 or not self.tolerance:
                assert fingerprints({name: mine}) == fingerprints({name: theirs}), (
                    f"{name} must arrive as it was sent; set tolerance for a lossy layer"
                )
                continue
            allowed = self.tolerance * float(theirs.abs().max()) if theirs.numel() else 0.0
            problem = (
                f"{name} must arrive as it was sent, but for a tolerance of {self.tolerance:g} of "
                "its largest value"
            )
            torch.testing.assert_close(
                mine.double(),
                theirs.double(),
                rtol=0.0,
                atol=allowed,
                equal_nan=True,
                msg=partial("{}\n{}".format, problem),
            )


def _kinds(named: Any) -> dict[str, str]:
    """Return names, dtypes and shapes."""
    return {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in named.items()}


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OTHERS = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
SHAPES = ((), (0,), (3, 0, 2), (1,), (7,), (13, 17), (2, 3, 4, 5))


class LayerValueCases(LayerCases):
    """Dtypes, shapes, modules, forms of an update, and other layers."""

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_floating_point_comes_back(self, senders: ExitStack, dtype: torch.dtype) -> None:
        link = self.link(senders, {"w": eighths(1).to(dtype)}, {"w": torch.zeros(12, dtype=dtype)})
        for seed in (1, 2, 3):
            link.send({"w": eighths(seed).to(dtype)})
            self.check(link.target, {"w": eighths(seed).to(dtype)})

    @pytest.mark.parametrize("dtype", OTHERS, ids=str)
    def test_other_dtypes_come_back_exactly(self, senders: ExitStack, dtype: torch.dtype) -> None:
        link = self.link(senders, {"w": matrix(1, dtype)}, {"w": matrix(0, dtype)})
        for value in (1, 0, 1):
            link.send({"w": matrix(value, dtype)})
            assert fingerprints(link.target) == fingerprints({"w": matrix(value, dtype)}), VALUES

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_shapes_come_back(self, senders: ExitStack, shape: tuple[int, ...]) -> None:
        source, target = {"w": torch.full(shape, 2.0)}, {"w": torch.zeros(shape)}
        self.link(senders, source, target).send()
        self.check(target, source)

    @pytest.mark.parametrize(
        "make", [nested, parametrised, recurrent, frozen, Tied, stateful, make_policy]
    )
    def test_every_kind_of_module(self, senders: ExitStack, make: Any) -> None:
        source, target = make(1), make(0)
        self.link(senders, source, target).send()
        self.check(target.state_dict(), source.state_dict())

    def test_tensors_in_another_order_of_memory(self, senders: ExitStack) -> None:
        base = eighths(1).view(3, 4)
        source = {"t": base.t(), "s": base[:, ::2], "e": torch.ones(1).expand(5)}
        target = {name: torch.zeros(tensor.shape) for name, tensor in source.items()}
        self.link(senders, source, target).send()
        self.check(target, source)

    def test_tied_tensors_stay_tied(self, senders: ExitStack) -> None:
        target = Tied(0)
        self.link(senders, Tied(3), target).send()
        assert target.is_tied(), "tied tensors must stay tied"

    def test_a_default_device_concerns_no_layer(self, senders: ExitStack) -> None:
        sources, target = [self.make_source(seed) for seed in range(3)], self.make_target()
        # Tensors on this device have no values, so using one raises an error, as for a GPU.
        with torch.device("meta"):
            link = self.link(senders, sources[0], target)
            for source in sources[1:]:
                link.send(source)
        self.check_target(target, sources[2])

    def test_many_tensors(self, senders: ExitStack) -> None:
        source = {f"blocks.{i}.weight": torch.full((i % 3,), float(i)) for i in range(500)}
        target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
        self.link(senders, source, target).send()
        self.check(target, source)

    def test_several_models(self, senders: ExitStack) -> None:
        source = {"actor": make_policy(1.0), "critic": nested(1)}
        target = {"actor": make_policy(), "critic": nested(0)}
        self.link(senders, source, target).send()
        for name, model in source.items():
            self.check(target[name].state_dict(), model.state_dict())

    def test_a_partial_update(self, senders: ExitStack) -> None:
        source, target = make_policy(1.0), make_policy()
        link = self.link(senders, source, target, layers=[select("*"), self.layer])
        link.send()
        link.send({"0.bias": torch.full((4,), 6.0)})
        expected = source.state_dict() | {"0.bias": torch.full((4,), 6.0)}
        self.check(target.state_dict(), expected)

    def test_strategy_state_dict(self, senders: ExitStack) -> None:
        source, target = nested(1), nested(0)
        self.link(senders, source, target, strategy="state_dict").send()
        self.check(target.state_dict(), source.state_dict())

    @pytest.mark.parametrize("place", ["outside", "inside"])
    def test_with_another_layer(self, senders: ExitStack, place: str) -> None:
        layers = [self.layer, Negated()] if place == "outside" else [Negated(), self.layer]
        link = self.link(senders, self.make_source(0), self.make_target(), layers=layers)
        for seed in (1, 2):
            source = self.make_source(seed)
            link.send(source)
            self.check_target(link.target, source)

    def test_what_has_arrived_is_not_written_to(self, senders: ExitStack) -> None:
        link = self.link(senders, self.make_source(0), self.make_target())
        for _ in range(_MOST_SKIPPED):
            pending = link.sender.send_async(self.make_source(1))
            arrived = offered(link.sender.address(0))
            if arrived is not None:
                break
        else:
            raise AssertionError(f"{_MOST_SKIPPED} pushes in a row were held back")
        before = arrived.to_bytes()
        link.receivers[0].receive(0)
        pending.wait(0.0)
        assert arrived.to_bytes() == before, (
            "apply_weights must not write to the tensors of an update: over shm, mp and dist that "
            "ends the worker by SIGSEGV; give new ones to update.replace()"
        )

    def test_after_an_update_that_did_not_fit(self, senders: ExitStack) -> None:
        target = make_policy()
        link = self.link(senders, make_policy(1.0), target)
        link.send()
        fitting = target[0].weight
        target[0].weight = nn.Parameter(torch.zeros(1, 1))
        before = fingerprints(target)
        with pytest.raises(SendError, match="do not fit"):
            link.send(make_policy(2.0))
        assert fingerprints(target) == before, (
            "a version that does not fit must leave the model as it was"
        )
        target[0].weight = fitting
        link.send(make_policy(3.0))
        self.check(target.state_dict(), make_policy(3.0).state_dict())


class HistoryCases(LayerCases):
    """Workers that join, miss versions, reconnect, or were changed; skipped pushes."""

    def test_many_versions_in_a_row(self, senders: ExitStack) -> None:
        link = self.link(senders, self.make_source(0), self.make_target())
        versions = []
        for seed in range(1, 21):
            source = self.make_source(seed)
            versions.append(link.send(source))
            self.check_target(link.target, source)
        assert versions == sorted(set(versions)), (
            "versions must arrive in ascending order, and none twice"
        )

    def test_a_worker_that_missed_versions(self, senders: ExitStack) -> None:
        link = self.link(senders, self.make_source(0), self.make_target())
        link.send(self.make_source(1))
        for seed in (2, 3):
            with pytest.raises(SendError):
                link.push_unseen(self.make_source(seed))
        source = self.make_source(4)
        link.send(source)
        self.check_target(link.target, source)

    def test_workers_that_get_different_versions(self, senders: ExitStack) -> None:
        targets = [self.make_target(), self.make_target()]
        sources = [self.make_source(seed) for seed in range(5)]
        link = self.link(senders, sources[0], *targets)
        link.send(sources[1])
        link.send(sources[2], [0])
        self.check_target(targets[0], sources[2])
        self.check_target(targets[1], sources[1])
        link.send(sources[3], [1])
        self.check_target(targets[0], sources[2])
        self.check_target(targets[1], sources[3])
        link.send(sources[4])
        for target in targets:
            self.check_target(target, sources[4])

    def test_a_worker_that_joins_late(self, senders: ExitStack) -> None:
        sources = [self.make_source(seed) for seed in range(5)]
        link = self.link(senders, sources[0], self.make_target())
        for source in sources[1:4]:
            link.send(source)
        target = self.make_target()
        link.join(target)
        if link.receivers[-1].receive(0) is not None:
            self.check_target(target, sources[3])
        link.send(sources[4])
        self.check_target(target, sources[4])

    def test_a_worker_that_comes_back_with_another_model(self, senders: ExitStack) -> None:
        link = self.link(senders, self.make_source(0), self.make_target())
        for seed in (1, 2):
            link.send(self.make_source(seed))
        target, source = self.make_target(), self.make_source(3)
        link.come_back(target)
        link.send(source)
        self.check_target(target, source)

    def test_a_worker_whose_model_was_changed(self, senders: ExitStack) -> None:
        first, source = self.make_source(0), self.make_source(1)
        link = self.link(senders, first, self.make_target())
        link.send(source)
        before = self.expected(first)
        sent = next(n for n, t in self.expected(source).items() if not torch.equal(t, before[n]))
        named(link.target)[sent].fill_(100.0)
        link.send(source)
        self.check_target(link.target, source)

    def test_weights_given_by_hand_pass_no_layer(self, senders: ExitStack) -> None:
        link = self.link(senders, self.make_source(0), self.make_target())
        link.send(self.make_source(1))
        by_hand = {name: t.clone() for name, t in self.expected(self.make_source(2)).items()}
        link.receivers[0].update_weights(by_hand)
        assert fingerprints(named(link.target)) == fingerprints(by_hand), VALUES
        source = self.make_source(3)
        link.send(source)
        self.check_target(link.target, source)

    def test_the_first_push_to_a_worker_goes_out(self, senders: ExitStack) -> None:
        link = self.link(senders, self.make_source(0), self.make_target())
        pending = link.sender.send_async()
        link.receivers[0].receive(0)
        assert pending.wait().updated == (0,), "a worker without weights must get some"

    def test_what_it_says_of_skipping(self) -> None:
        plugin = registry.find(registry.LAYERS, self.layer)
        if "skip_update" not in implemented(plugin.object):
            pytest.skip("the layer holds no push back")
        for pushes in (1, 2, 3, 100):
            for updated in (False, True):
                context = SkipContext(
                    model_id="policy", worker_id=0, version=5, pushes=pushes, updated=updated
                )
                assert plugin.object.skip_update(context=context) in (True, False, None), (
                    "skip_update must return True, False or None"
                )


class LayerCombinationCases(LayerCases):
    """Layers change only the weights in transit."""

    def test_the_trainers_tensors_are_not_touched(self, senders: ExitStack) -> None:
        model = self.make_source(3)
        tensors = list(_leaves(model))
        before = [(t.data_ptr(), t._version, t.requires_grad) for t in tensors]
        prints = fingerprints(named(model))
        self.link(senders, model, self.make_target()).send()
        assert fingerprints(named(model)) == prints, (
            "the layer must not change the trainer's tensors: use update.replace"
        )
        assert [(t.data_ptr(), t._version, t.requires_grad) for t in tensors] == before, (
            "the layer must not move the trainer's tensors or write to them"
        )
        assert all(tensor.grad_fn is None for tensor in tensors), (
            "the layer must not record gradients: use tensor.detach()"
        )

    def test_a_step_after_send_async_changes_nothing_that_arrives(self, senders: ExitStack) -> None:
        model, target = self.make_source(1), self.make_target()
        link = self.link(senders, model, target)
        link.send()
        expected = {name: t.detach().clone() for name, t in self.expected(model).items()}
        pending = link.sender.send_async()
        with torch.no_grad():
            for tensor in _leaves(model):
                if tensor.is_floating_point():
                    tensor.fill_(9.0)
        received = link.receivers[0].receive()
        pending.wait()
        if received is not None:
            self.check(named(target), expected)

    def test_two_senders_do_not_mix(self, senders: ExitStack) -> None:
        targets = [self.make_target(), self.make_target()]
        links = [self.link(senders, self.make_source(i), targets[i]) for i in (0, 1)]
        for seed in (1, 2, 3):
            sources = [self.make_source(10 * i + seed) for i in (0, 1)]
            for link, source in zip(links, sources, strict=True):
                link.send(source)
            for target, source in zip(targets, sources, strict=True):
                self.check_target(target, source)

    def test_addresses_that_name_it_pickle(self, senders: ExitStack) -> None:
        target, source = self.make_target(), self.make_source(1)
        link = self.link(senders, self.make_source(0), target)
        pickle.loads(pickle.dumps(link.sender.address(0)))
        link.come_back(target)
        link.send(source)
        self.check_target(target, source)

    def test_it_keeps_no_thread(self) -> None:
        threads = count_threads()
        with ExitStack() as senders:
            self.link(senders, self.make_source(0), self.make_target()).send()
        gc.collect()
        assert count_threads() == threads, (
            "threads of the layer must end with the sender and the receiver"
        )

    def test_it_says_what_it_does(self) -> None:
        made = registry.find(registry.LAYERS, self.layer).object
        assert inspect.getdoc(made if inspect.ismodule(made) else type(made)), "it has no docstring"


def _leaves(model: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model themselves; `named` returns detached ones."""
    if isinstance(model, nn.Module):
        yield from model.parameters()
        yield from model.buffers()
    else:
        yield from model.values()


class LayerConformance(LayerValueCases, HistoryCases, LayerCombinationCases):
    """Conformance tests of a layer for any model: inherit, and set `layer`.

    Workers are receivers in this process with the scheme `Loopback`, so a case takes milliseconds.
    If the layer skips pushes, the case sends until one is not skipped.

    Attributes:
        layer: the name of an installed layer, or an object.
        tolerance: the largest difference of a received floating-point weight, relative to the
            largest weight of its tensor; 0 for a lossless layer.
        settles: the number of updates with the same weights until a worker has them, within the
            tolerance; more than 1 for a layer that sends changes in parts.

    Example:
        >>> class TestBFloat16(LayerConformance):
        ...     layer = "bf16"
        ...     tolerance = 2**-8
    """


class LayerPairConformance(HistoryCases, LayerCombinationCases):
    """Conformance tests of a layer between different models: inherit, and define the models.

    For layers whose workers have other names or shapes than the trainer, or that accept only
    certain models. Override `make_source`, `make_target` and `expected`.

    Attributes:
        layer: the name of an installed layer, or an object.
        tolerance: as in `LayerConformance`.
        settles: as in `LayerConformance`.

    Example:
        >>> from sync_plugin_std import rename, select
        >>> class TestRename(LayerPairConformance):
        ...     layer = rename({"w": "weight"})
        ...
        ...     def make_source(self, seed):
        ...         return {"w": torch.full((3,), float(seed))}
        ...
        ...     def make_target(self):
        ...         return {"weight": torch.zeros(3)}
        ...
        ...     def expected(self, source):
        ...         return {"weight": source["w"]}
    """

    def test_with_a_layer_after_it(self, senders: ExitStack) -> None:
        layers = [self.layer, Negated()]
        link = self.link(senders, self.make_source(0), self.make_target(), layers=layers)
        for seed in (1, 2):
            source = self.make_source(seed)
            link.send(source)
            self.check_target(link.target, source)
