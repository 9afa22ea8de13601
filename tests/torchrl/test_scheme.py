"""A scheme of sync-core as a `WeightSyncScheme`, with both ends in this process."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.weight_update import WeightSyncScheme

from sync_core import (
    LayoutMismatchError,
    OptionError,
    SendError,
    SyncError,
    UnknownWorkerError,
    Update,
    hookimpl,
)
from sync_plugin_torchrl import Scheme

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:state_dict strategy")]

Connect = Callable[..., Scheme]


@pytest.fixture
def trainer() -> Iterator[Scheme]:
    scheme = Scheme("shm", timeout=20)
    yield scheme
    scheme.shutdown()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Make the worker's end of a scheme, as a collector does, and connect it."""
    made = []

    def connect(trainer: Scheme, model: Any, index: int = 0, **options: Any) -> Scheme:
        worker: Scheme = pickle.loads(pickle.dumps(trainer))
        made.append(worker)
        worker.init_on_receiver(model_id="policy", model=model, worker_idx=index, **options)
        worker.connect()
        return worker

    yield connect
    for worker in made:
        worker.shutdown()


def linear(value: float, outputs: int = 2) -> nn.Linear:
    model = nn.Linear(3, outputs)
    fill(model, value)
    return model


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def values(model: nn.Module) -> set[float]:
    return {value for p in model.parameters() for value in p.detach().flatten().tolist()}


def begin(trainer: Scheme, model: nn.Module, num_workers: int = 1, **options: Any) -> None:
    trainer.init_on_sender(model=model, num_workers=num_workers, **options)
    trainer.connect()


def test_workers_have_the_first_weights_when_they_are_connected(
    trainer: Scheme, connect: Connect
) -> None:
    begin(trainer, linear(7.0), num_workers=2)
    acting = [linear(0.0), linear(0.0)]
    for index, model in enumerate(acting):
        connect(trainer, model, index)
        assert values(model) == {7.0}


def test_a_step_is_not_visible_before_it_is_sent(trainer: Scheme, connect: Connect) -> None:
    trained, acting = linear(1.0), linear(0.0)
    parameters = {parameter.data_ptr() for parameter in trained.parameters()}
    begin(trainer, trained)
    connect(trainer, acting)
    fill(trained, 2.0)
    assert values(acting) == {1.0}
    trainer.send()
    assert values(acting) == {2.0}
    assert {parameter.data_ptr() for parameter in trained.parameters()} == parameters


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.parametrize(
    "given",
    [
        linear,
        lambda value: linear(value).state_dict(),
        lambda value: TensorDict.from_module(linear(value)),
        lambda value: TensorDict.from_module(linear(value)).data.lock_(),
    ],
    ids=["module", "state_dict", "tensordict", "locked"],
)
def test_weights_in_every_form(strategy: Any, given: Any, connect: Connect) -> None:
    trainer = Scheme("shm", strategy=strategy, timeout=20)
    acting = linear(0.0)
    try:
        begin(trainer, linear(1.0))
        connect(trainer, acting)
        trainer.send(given(5.0))
        assert values(acting) == {5.0}
    finally:
        trainer.shutdown()


def test_a_policy_without_its_weights_is_allocated(trainer: Scheme, connect: Connect) -> None:
    with torch.device("meta"):
        norm = nn.BatchNorm1d(2)
        layers = nn.Sequential(nn.Linear(3, 2), norm)
    trained = copy.deepcopy(layers).to_empty(device="cpu")
    fill(trained, 3.0)
    trained.get_buffer("1.running_mean").fill_(4.0)
    begin(trainer, TensorDictModule(trained, ["observation"], ["action"]))
    connect(trainer, TensorDictModule(layers, ["observation"], ["action"]))
    assert values(layers) == {3.0}
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [4.0, 4.0]


class TwoSteps(nn.Module):
    """A model whose forward pass reads its weights twice, with a pause between."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), value))
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self, fails: bool = False) -> tuple[Tensor, Tensor]:
        first = self.weight.detach().clone()
        self.inside.set()
        assert self.go_on.wait(20)
        if fails:
            raise RuntimeError("no action")
        return first, self.weight.detach().clone()


def test_no_commit_falls_into_a_forward_pass(trainer: Scheme, connect: Connect) -> None:
    trained, acting = TwoSteps(1.0), TwoSteps(0.0)
    begin(trainer, trained)
    connect(trainer, acting)
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(acting()))
    thread.start()
    assert acting.inside.wait(20)
    fill(trained, 2.0)
    sending = threading.Thread(target=trainer.send)
    sending.start()
    sending.join(0.2)
    assert sending.is_alive()
    acting.go_on.set()
    for started in (thread, sending):
        started.join(20)
    assert [value.unique().tolist() for value in seen] == [[1.0], [1.0]]
    assert values(acting) == {2.0}


def test_a_forward_pass_that_raises_does_not_keep_weights_out(
    trainer: Scheme, connect: Connect
) -> None:
    trained, acting = TwoSteps(1.0), TwoSteps(0.0)
    begin(trainer, trained)
    connect(trainer, acting)
    acting.go_on.set()
    thread = threading.Thread(target=pytest.raises, args=(RuntimeError, acting, True))
    thread.start()
    thread.join(20)
    fill(trained, 2.0)
    trainer.send()
    assert values(acting) == {2.0}


def test_a_worker_that_acts_without_a_pause_is_updated(trainer: Scheme, connect: Connect) -> None:
    trained, acting = linear(1.0), linear(0.0)
    begin(trainer, trained)
    connect(trainer, acting)
    done = threading.Event()

    def act() -> None:
        observation = torch.ones(3)
        while not done.is_set():
            acting(observation)

    thread = threading.Thread(target=act)
    thread.start()
    try:
        for value in range(2, 12):
            fill(trained, float(value))
            trainer.send()
    finally:
        done.set()
        thread.join(20)
    assert values(acting) == {11.0}


def test_a_copy_of_the_policy_takes_its_place(trainer: Scheme, connect: Connect) -> None:
    trained, first = linear(1.0), linear(0.0)
    begin(trainer, trained)
    worker = connect(trainer, first)
    second = copy.deepcopy(first)
    fill(second, 0.0)
    worker.model = second  # as collectors do whose policy was copied to a device
    assert values(second) == {1.0}
    fill(trained, 2.0)
    trainer.send()
    assert (values(first), values(second)) == ({1.0}, {2.0})


def test_workers_with_other_weights_and_other_models(connect: Connect) -> None:
    sources = {0: linear(1.0), 1: linear(2.0, outputs=5)}
    acting = {0: linear(0.0), 1: linear(0.0, outputs=5)}
    trainer = Scheme("shm", timeout=20)
    try:
        trainer.init_on_sender(
            params_map={index: TensorDict.from_module(model) for index, model in sources.items()}
        )
        trainer.connect()
        for index, model in acting.items():
            connect(trainer, model, index)
        assert [values(model) for model in acting.values()] == [{1.0}, {2.0}]
        trainer.send({1: linear(8.0, outputs=5)})
        assert [values(model) for model in acting.values()] == [{1.0}, {8.0}]
        trainer.send({0: linear(3.0), 1: linear(9.0, outputs=5)}, worker_ids=0)
        assert [values(model) for model in acting.values()] == [{3.0}, {8.0}]
        fill(sources[0], 5.0)
        fill(sources[1], 6.0)
        trainer.send()
        assert [values(model) for model in acting.values()] == [{5.0}, {6.0}]
        with pytest.raises(UnknownWorkerError, match=r"no workers \[2\]; this scheme has \[0, 1\]"):
            trainer.send({2: linear(0.0)})
        with pytest.raises(OptionError, match=r"no weights for the workers \[1\]; give"):
            trainer.send({0: linear(4.0)}, worker_ids=[0, 1])
        assert [values(model) for model in acting.values()] == [{5.0}, {6.0}]
    finally:
        trainer.shutdown()


def test_weights_by_worker_where_all_have_the_same(trainer: Scheme, connect: Connect) -> None:
    begin(trainer, linear(1.0))
    connect(trainer, linear(0.0))
    with pytest.raises(OptionError, match="per_worker_weights=True"):
        trainer.send({0: linear(2.0)})


def test_some_workers(trainer: Scheme, connect: Connect) -> None:
    begin(trainer, linear(1.0), num_workers=2)
    acting = [linear(0.0), linear(0.0)]
    for index, model in enumerate(acting):
        connect(trainer, model, index)
    trainer.send(linear(2.0), worker_ids=[1])
    assert [values(model) for model in acting] == [{1.0}, {2.0}]


def test_a_policy_that_does_not_fit_is_an_error_at_both_ends(
    trainer: Scheme, connect: Connect
) -> None:
    begin(trainer, linear(1.0))
    with pytest.raises(LayoutMismatchError, match="weight"):
        connect(trainer, linear(0.0, outputs=3))
    with pytest.raises(SendError, match="refused to receive"):
        trainer.send()


def test_a_policy_that_has_changed_names_the_way_out(trainer: Scheme, connect: Connect) -> None:
    policy = linear(1.0)
    begin(trainer, policy)
    connect(trainer, linear(0.0))
    policy.weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(LayoutMismatchError, match=r"make a new collector with a new Scheme"):
        trainer.send()


class Breaks:
    """A layer that raises in the worker for one value of the weights."""

    @hookimpl
    def apply_weights(self, update: Update) -> None:
        if (next(iter(update.tensors)) == 13.0).any():
            raise RuntimeError("unlucky")


@pytest.mark.parametrize("sync", [True, False])
def test_a_worker_that_cannot_load_keeps_its_weights_and_the_next_send_works(
    sync: bool, connect: Connect
) -> None:
    trainer = Scheme("shm", sync=sync, timeout=20, layers=[Breaks()])
    acting = linear(0.0)
    try:
        begin(trainer, linear(1.0))
        connect(trainer, acting)
        if not sync:
            trainer.send(linear(13.0))
        with pytest.raises(SendError, match="unlucky"):
            trainer.send(linear(13.0 if sync else 14.0))
        assert values(acting) == {1.0}
        trainer.send(linear(15.0))
        trainer.send(linear(16.0), worker_ids=[])
        assert values(acting) == {15.0}
    finally:
        trainer.shutdown()


def test_a_worker_that_is_gone_is_named(trainer: Scheme, connect: Connect) -> None:
    begin(trainer, linear(1.0), num_workers=2)
    acting = linear(0.0)
    connect(trainer, acting, 0)
    connect(trainer, linear(0.0), 1).shutdown()
    with pytest.raises(SendError, match="worker 1") as caught:
        trainer.send(linear(2.0))
    assert [*caught.value.report.failed] == [1]
    assert values(acting) == {2.0}


def test_weights_given_by_hand_in_the_worker(trainer: Scheme, connect: Connect) -> None:
    acting = linear(0.0)
    begin(trainer, linear(1.0))
    worker = connect(trainer, acting)
    worker.apply_weights(TensorDict.from_module(linear(4.0)))
    assert values(acting) == {4.0}
    worker.receive()


class Unpicklable:
    """A layer that stays with the sender."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    @hookimpl
    def skip_update(self) -> None:
        return None


def test_what_only_the_trainer_needs_does_not_travel(connect: Connect) -> None:
    trainer = Scheme("shm", timeout=20, layers=[Unpicklable()])
    acting = linear(0.0)
    try:
        begin(trainer, linear(1.0))
        connect(trainer, acting)
        assert values(acting) == {1.0}
    finally:
        trainer.shutdown()


class Nested:
    """A collector whose own workers make the policies."""

    worker_idx = 0

    def __init__(self) -> None:
        self.policy_factory = [lambda: linear(0.0)] * 2
        self.passed_on: list[Any] = []

    def get_model(self, model_id: str) -> Any:
        raise ValueError(f"No policy found for model_id {model_id!r}")

    def update_policy_weights_(self, weights: Any, *, model_id: str) -> None:
        self.passed_on.append((model_id, values(weights)))


def test_weights_are_passed_on_to_workers_that_make_their_policies(trainer: Scheme) -> None:
    begin(trainer, linear(1.0))
    worker, nested = Scheme("shm"), Nested()
    worker.__setstate__(trainer.__getstate__())
    try:
        worker.init_on_receiver(model_id="policy", context=nested)
        worker.connect()
        trainer.send(linear(2.0))
    finally:
        worker.shutdown()
    assert nested.passed_on == [("policy", {1.0}), ("policy", {2.0})]


def test_torchrl_finds_it_by_name() -> None:
    scheme = WeightSyncScheme.from_backend("sync_core", scheme="mp", timeout=3)
    assert type(scheme) is Scheme
    assert scheme.strategy_str == "tensordict"


def test_a_scheme_that_was_not_initialised_in_the_trainer(connect: Connect) -> None:
    with pytest.raises(OptionError, match="worker 0 of 'policy' has no address"):
        connect(Scheme("shm"), linear(0.0))


def test_a_trainer_that_never_sends(trainer: Scheme) -> None:
    trainer.init_on_sender(model=linear(1.0), num_workers=1)
    state = trainer.__getstate__() | {"_timeout": 0.1}
    worker = Scheme("shm")
    worker.__setstate__(state)
    worker.init_on_receiver(model_id="policy", model=linear(0.0), worker_idx=0)
    with pytest.raises(SyncError, match=r"got no weights of 'policy' within 0\.1 s"):
        worker.connect()


def test_methods_that_are_called_too_early(trainer: Scheme) -> None:
    early: list[tuple[Callable[[], object], str]] = [
        (trainer.send, "connect"),
        (trainer.receive, "init_on_receiver"),
        (lambda: trainer.apply_weights({}), "init_on_receiver"),
    ]
    for call, what in early:
        with pytest.raises(RuntimeError, match=what):
            call()
    with pytest.raises(OptionError, match="number of workers"):
        trainer.init_on_sender(model=linear(0.0))
    with pytest.raises(NotImplementedError, match=r"sync_core\.Sender"):
        trainer.create_transport()
