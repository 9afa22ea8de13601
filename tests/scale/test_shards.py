"""Sharded senders and their joined receivers, in one process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from sync_core import (
    Address,
    LayoutMismatchError,
    ModelError,
    OptionError,
    Receiver,
    Sender,
    SenderLostError,
    SendError,
    SyncError,
    hookimpl,
)
from sync_core.errors import AddressError, NotAPluginError
from sync_plugin_scale import Chunked, Part, Sharded, join_addresses
from sync_plugin_scale.shards.reports import merge_reports
from sync_plugin_std import Fuse, Rename, Restart, Split, Transpose
from sync_plugin_std.workers import ThreadGroup

pytestmark = pytest.mark.timeout(60)


def rows(whole: Tensor, rank: int, count: int) -> tuple[Tensor, Any]:
    """A copy of the rows that one of some ranks has, and their region."""
    step = -(-len(whole) // count)
    first, last = min(rank * step, len(whole)), min((rank + 1) * step, len(whole))
    bounds = [(first, last, len(whole)), *((0, n, n) for n in whole.shape[1:])]
    return whole[first:last].clone(), bounds


def sharded(scheme: Any, whole: dict[str, Tensor], rank: int, count: int) -> dict[str, Any]:
    """The arguments of a sender that has some rows of each tensor."""
    cut = {name: rows(tensor, rank, count) for name, tensor in whole.items()}
    regions = {name: region for name, (_, region) in cut.items()}
    return {
        "scheme": Sharded(scheme, rank, count, regions),
        "model": {name: tensor for name, (tensor, _) in cut.items()},
    }


@contextmanager
def trainer(
    whole: dict[str, Tensor], count: int, num_workers: int = 1, scheme: Any = "thread", **more: Any
) -> Iterator[list[Sender]]:
    with ExitStack() as opened:
        yield [
            opened.enter_context(
                Sender(num_workers=num_workers, **sharded(scheme, whole, rank, count), **more)
            )
            for rank in range(count)
        ]


def address_of(senders: Sequence[Sender], worker_id: int = 0) -> Address:
    addresses = [sender.address(worker_id) for sender in senders]
    joined = join_addresses(addresses)
    copy: Address = pickle.loads(pickle.dumps(joined))  # as it travels
    return copy


def weights(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def send_all(senders: Sequence[Sender], receivers: Sequence[Receiver], **kwargs: Any) -> list[Any]:
    pending = [sender.send_async(**kwargs) for sender in senders]
    versions = [receiver.receive() for receiver in receivers]
    for each in pending:
        each.wait()
    return versions


def test_versions_are_those_of_the_trainer() -> None:
    whole = weights(w=(5, 2))
    with trainer(whole, 2) as senders, Receiver(address_of(senders), like(whole)) as receiver:
        assert send_all(senders, [receiver], version=100) == [100]
        assert send_all(senders, [receiver]) == [101]
        with pytest.raises(ValueError, match="version is 101, and version 101 was sent already"):
            senders[0].send(version=101)


def test_workers_that_want_the_same_share_what_is_packed() -> None:
    whole = weights(w=(6, 4), b=(4,))
    with trainer(whole, 2, num_workers=3) as senders:
        models = [like(whole) for _ in range(3)]
        receivers = [Receiver(address_of(senders, i), models[i]) for i in range(3)]
        pending = [sender.send_async() for sender in senders]
        packed = [len(sender._pipeline.transport._layouts) for sender in senders]  # type: ignore[union-attr]
        assert [receiver.receive() for receiver in receivers] == [1, 1, 1]
        assert packed == [1, 1]
        assert all(each.wait().updated == (0, 1, 2) for each in pending)
        for model in models:
            assert all(torch.equal(model[name], whole[name]) for name in whole)


def test_a_worker_takes_each_element_once_from_replicas() -> None:
    whole = {"w": torch.randn(4, 8), "v": torch.randn(4, 8)}
    with ExitStack() as opened:
        senders = [
            opened.enter_context(Sender(Sharded("thread", rank, 2), whole, num_workers=1))
            for rank in range(2)
        ]
        model = like(whole)
        receiver = opened.enter_context(Receiver(address_of(senders), model))
        pending = [sender.send_async() for sender in senders]
        receiver.receive()
        nbytes = [each.wait().nbytes for each in pending]
        assert torch.equal(model["w"], whole["w"])
        assert torch.equal(model["v"], whole["v"])
        # One tensor of 128 bytes from each, a version of 8, and a header.
        assert nbytes[0] == nbytes[1] < 128 + 8 + 512


@pytest.mark.parametrize("count", [1, 3])
def test_layers_rename_fuse_cut_and_cast(count: int) -> None:
    whole = weights(**{"m.q.w": (4, 3), "m.k.w": (2, 3), "m.v.w": (2, 3), "m.gate_up.w": (6, 3)})
    layers = [
        Fuse({"qkv": ("q", "k", "v")}),
        Split({"gate_up": {"gate": 2, "up": 4}}),
        Rename({"m.*": "model.*"}),
        "bf16",
    ]
    with trainer(whole, count, layers=layers) as senders:
        model = {
            "model.qkv.w": torch.zeros(3, 3),
            "model.gate.w": torch.zeros(2, 3),
            "model.up.w": torch.zeros(4, 3, dtype=torch.bfloat16),
        }
        # Rows 3 to 6: the last of q, all of k.
        regions = {"model.qkv.w": ((3, 6), (0, 3))}
        with Receiver(address_of(senders), Part(model, regions)) as receiver:
            send_all(senders, [receiver])
    qkv = torch.cat([whole["m.q.w"], whole["m.k.w"], whole["m.v.w"]]).bfloat16()
    gate, up = whole["m.gate_up.w"].bfloat16().split([2, 4])
    assert torch.equal(model["model.qkv.w"], qkv[3:6].float())
    assert torch.equal(model["model.gate.w"], gate.float())
    assert torch.equal(model["model.up.w"], up)


def test_a_tensor_cannot_be_transposed_and_layers_need_whole_shapes() -> None:
    part = {"w": torch.zeros(2, 3)}
    layer = Transpose("w")
    with pytest.raises(ModelError, match="'w' is transposed, which is not possible for parts"):
        Sender(Sharded("thread", 0, 1), part, num_workers=1, layers=[layer])
    regions = {"w": ((0, 2), (0, 3))}
    scheme = Sharded("thread", 0, 1, regions)
    with pytest.raises(OptionError, match="give its regions as"):
        Sender(scheme, part, num_workers=1, layers=[Rename({"*": "*"})])


class Doubling:
    """A layer that makes two tensors of each."""

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Any:
        update = yield
        update.rename({**dict(update.items()), **{f"{n}.2": t.clone() for n, t in update.items()}})
        return update


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"zero_copy": True}, "scheme 'sharded::thread' cannot zero_copy"),
        ({"layers": ["select"]}, "make a sender of the tensors that change: Sender(scheme, {name"),
        ({"workers": [1]}, "type num_workers=… instead of workers="),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(arguments: Any, message: str) -> None:
    scheme = Sharded("thread", 0, 1, {"w": ((0, 2),)})
    model: Any = {"w": torch.zeros(2)}
    if "only" in arguments:
        scheme, model = Sharded("thread", 0, 1), nn.Linear(2, 1)
    with pytest.raises(OptionError) as caught:
        Sender(scheme, model, num_workers=1, **arguments)
    assert message in str(caught.value)


def test_a_rank_does_not_start_workers_again() -> None:
    message = "type on_failure='quarantine', and start the worker again"
    with ThreadGroup(Worker, 1) as group, pytest.raises(OptionError, match=message):
        Sender(Sharded("thread", 0, 1), nn.Linear(1, 1), num_workers=1, on_failure=Restart(group))


class Worker:
    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id


def test_extras_travel_beside_parts() -> None:
    whole = weights(w=(5, 2), b=(3,))
    with trainer(whole, 2, layers=["checksum"]) as senders:
        model = like(whole)
        with Receiver(address_of(senders), model) as receiver:
            for step in (1, 2):
                assert send_all(senders, [receiver], extras={"step": torch.tensor(step)}) == [step]
                assert receiver.extras["step"].item() == step
            assert send_all(senders, [receiver]) == [3]
            assert receiver.extras == {}
        assert torch.equal(model["w"], whole["w"])


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (lambda: Sharded("thread", 2, 2), "rank is 2; of 2 ranks, give 0 to 1"),
        (lambda: Sharded("thread", cast("Any", "0"), 2), "rank is '0', which is not an integer"),
        (lambda: Sharded("thread", 0, 0), "size is 0; give 1 or more"),
        (
            lambda: Sender("sharded::thread", nn.Linear(1, 1), num_workers=1),
            "needs arguments; type Sharded('thread', rank, size)",
        ),
        (
            lambda: Sender(Chunked(Sharded("thread", 0, 1)), nn.Linear(1, 1), num_workers=1),
            "Sharded reads the model of its rank, so it has to be the outermost scheme",
        ),
        (
            lambda: Sender(Sharded("none", 0, 1), nn.Linear(1, 1), num_workers=1),
            "moves nothing, so that sharded:: is of no use",
        ),
    ],
)
def test_schemes_that_cannot_be_are_refused(typed: Callable[[], object], message: str) -> None:
    with pytest.raises((OptionError, NotAPluginError)) as caught:
        typed()
    assert message in str(caught.value)


def test_regions_and_layers_are_checked() -> None:
    model = {"w": torch.zeros(2, 3)}
    wrong: list[tuple[Any, str]] = [
        ({"w": ((0, 2), (0, 4))}, "has the shape [2, 4], and its tensor [2, 3]"),
        ({"w": ((0, 2, 1), (0, 3, 3))}, "is not one of a tensor"),
        ({"w": ((0,), (0, 3))}, "give (start, stop)"),
        ({"x": ((0, 2), (0, 3))}, "regions names 'x', which the model does not have"),
    ]
    for regions, message in wrong:
        with pytest.raises(ModelError) as caught:
            Sender(Sharded("thread", 0, 2, regions), model, num_workers=1)
        assert message in str(caught.value)
    reshaping: list[tuple[list[Any], str]] = [
        ([Doubling()], "layer 'Doubling' .*changes names or shapes, and has made w"),
        (["bf16", "zstd"], "layer 'zstd' .*changes names or shapes.*leave it out of layers="),
    ]
    for layers, message in reshaping:
        with pytest.raises(ModelError, match=message):
            Sender(Sharded("thread", 0, 2), model, num_workers=1, layers=layers)


def test_one_scheme_may_serve_several_senders() -> None:
    scheme = Sharded("thread", 0, 1)
    models = [weights(w=(2, 3)), weights(v=(4,))]
    with ExitStack() as opened:
        for model in models:
            sender = opened.enter_context(Sender(scheme, model, num_workers=1))
            copy = like(model)
            with Receiver(sender.address(0), copy) as receiver:
                assert send_all([sender], [receiver]) == [1]
            assert all(torch.equal(copy[name], model[name]) for name in model)


@pytest.mark.parametrize("inner", ["thread", "shm", "chunked::shm"])
def test_a_worker_that_loads_by_itself_gets_whole_tensors_by_json(inner: str) -> None:
    whole = weights(w=(5, 2), b=(3,), one=(1, 4)) | {"none": torch.zeros(0, 2)}
    loaded: dict[str, Tensor] = {}

    def load(named: Any) -> None:
        loaded.update({name: tensor.clone() for name, tensor in named})

    layers = [Rename({"w": "weight"}, strict=False)]
    with trainer(whole, 2, scheme=inner, layers=layers) as senders:
        text = join_addresses([sender.address(0) for sender in senders]).to_json()
        address = Address.from_json(text)
        assert address == join_addresses([sender.address(0) for sender in senders])
        assert all(sender.address(0).token in text for sender in senders)
        with Receiver(address, load=load, background=True) as receiver:
            for version in (1, 2):
                assert send_all(senders, [receiver]) == [version]
    whole["weight"] = whole.pop("w")
    assert loaded.keys() == whole.keys()
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)


def test_addresses_that_do_not_join_are_named() -> None:
    whole = weights(w=(4, 2))
    with trainer(whole, 2, num_workers=2) as senders, trainer(whole, 3) as others:
        one, two = (sender.address(0) for sender in senders)
        for given, message in [
            ([], "needs the addresses of all ranks, got none"),
            ([one], "there is none of rank 1"),
            ([one, two, two], "a rank is there twice"),
            ([one, senders[1].address(1)], "differ in worker_id: 0 and 1"),
            ([one, others[1].address(0)], "of trainers with [2, 3] ranks"),
            ([join_addresses([one, two])], "is not the address of a rank"),
        ]:
            with pytest.raises(AddressError) as caught:
                join_addresses(given)
            assert message in str(caught.value)
        with pytest.raises(AddressError, match="the address of rank 0 of 2; join it"):
            Receiver(one, like({"w": whole["w"][:2]}))


@pytest.mark.parametrize(
    ("model", "regions", "message"),
    [
        ({"w": torch.zeros(4, 2)}, {"w": ((2, 6), (0, 2))}, "no rank holds [4:6, 0:2] of it"),
        ({"w": torch.zeros(3, 2)}, None, "'w' is [4, 2] in the weights and [3, 2] in the model"),
        ({"w": torch.zeros(4, 2).half()}, None, "a layer that casts allows that"),
        ({"v": torch.zeros(4, 2)}, None, "'w' is in the weights, not in the model"),
        (
            {"w": torch.zeros(4)},
            {"w": ((0, 4),)},
            "has 2 dimensions on rank 0, and 1 where it is wanted",
        ),
    ],
)
def test_models_that_do_not_fit_are_refused(model: Any, regions: Any, message: str) -> None:
    with trainer(weights(w=(4, 2)), 2) as senders:
        with pytest.raises(LayoutMismatchError) as caught:
            Receiver(address_of(senders), Part(model, regions or {}))
        assert message in str(caught.value)


def test_trainers_that_do_not_fit_each_other_are_refused() -> None:
    for second, message in [
        (torch.zeros(2, 2).half(), "'w' is float32 of 2 dimensions on rank 0 and float16 of 2"),
        (torch.zeros(2, 3), "'w' is as a whole [2, 2] on rank 0 and [2, 3] on rank 1"),
    ]:
        senders = [
            Sender(Sharded("thread", rank, 2), {"w": tensor}, num_workers=1)
            for rank, tensor in enumerate([torch.zeros(2, 2), second])
        ]
        with pytest.raises(LayoutMismatchError) as caught:
            address_of(senders)
        assert message in str(caught.value)


def test_a_rank_that_is_behind_is_named_and_nothing_is_written() -> None:
    whole = weights(w=(4, 2))
    with trainer(whole, 3, timeout=1.0) as senders:
        model = like(whole)
        with Receiver(address_of(senders), model) as receiver:
            pending = [senders[rank].send_async() for rank in (0, 2)]
            with pytest.raises(SyncError, match="from 2 of 3 ranks, and not from rank 1 within"):
                receiver.receive(timeout=1.0)
            assert not model["w"].any()
            for each in pending:
                with pytest.raises(SendError, match=r"(?s)apply version 1;.*not from rank 1"):
                    each.wait()
            assert send_all(senders, [receiver], version=2) == [2]
            assert torch.equal(model["w"], whole["w"])


def test_a_send_that_one_rank_cannot_begin_is_not_joined_with_its_next() -> None:
    """Ranks count versions alone: the next one of that rank would have the same number."""
    whole = weights(weight=(4, 2))
    with trainer(whole, 2, layers=["fp16"], timeout=30.0) as (first, second):
        model = {"weight": torch.zeros(4, 2)}
        with Receiver(address_of([first, second]), model) as receiver:
            pending = [sender.send_async() for sender in (first, second)]
            assert receiver.receive() == 1
            assert [each.wait().updated for each in pending] == [(0,), (0,)]
            before = model["weight"].clone()
            first.model["weight"][0] = 1e30
            with pytest.raises(ModelError, match="to which it is cast"):
                first.send_async()
            half = second.send_async()
            first.model["weight"].fill_(3.0)
            later = first.send_async()
            assert receiver.receive(0.5) is None
            assert torch.equal(model["weight"], before)
            half.abandon()
            second.model["weight"].fill_(3.0)
            whole_again = second.send_async()
            assert receiver.receive() == 3
            assert [later.wait().updated, whole_again.wait().updated] == [(0,), (0,)]
            assert model["weight"].unique().tolist() == [3.0]


def test_another_worker_in_the_same_place_may_want_other_regions() -> None:
    whole = weights(w=(4, 2))
    with trainer(whole, 2, timeout=5.0) as senders:
        first = Receiver(address_of(senders), like(whole))
        assert send_all(senders, [first]) == [1]
        first.close()
        model = {"w": torch.zeros(2, 2)}
        receiver = Receiver(address_of(senders), Part(model, {"w": ((1, 3), (0, 2))}))
        assert send_all(senders, [receiver]) == [2]
        assert torch.equal(model["w"], whole["w"][1:3])


def test_the_same_worker_comes_back_and_gets_the_version_at_once() -> None:
    whole = weights(w=(4, 2))
    with trainer(whole, 2, timeout=5.0) as senders:
        with Receiver(address_of(senders), like(whole)) as first:
            assert send_all(senders, [first]) == [1]
        model = like(whole)
        with Receiver(address_of(senders), model) as receiver:
            assert receiver.receive() == 1
            assert torch.equal(model["w"], whole["w"])


def test_workers_can_be_added_and_removed() -> None:
    whole = weights(w=(4, 2))
    with trainer(whole, 2) as senders:
        first = Receiver(address_of(senders), like(whole))
        for sender in senders:
            assert sender.add_worker() == 1
        model = like(whole)
        second = Receiver(address_of(senders, 1), model)
        assert send_all(senders, [first, second]) == [1, 1]
        assert torch.equal(model["w"], whole["w"])
        for sender in senders:
            sender.remove_worker(0)
        assert send_all(senders, [second]) == [2]


def test_a_model_whose_tensors_are_replaced_is_written_where_it_is_now() -> None:
    whole = weights(weight=(2, 4), bias=(2,))
    with trainer(whole, 2) as senders:
        model = nn.Linear(4, 2)
        with Receiver(address_of(senders), model) as receiver:
            send_all(senders, [receiver])
            model.weight = nn.Parameter(torch.zeros(2, 4))
            send_all(senders, [receiver])
            assert torch.equal(model.weight, whole["weight"])


def _receive_twice(receiver: Receiver) -> None:
    receiver.receive()
    receiver.receive()


def _hold_a_rank(pipe: Any, scheme: str, whole: dict[str, Tensor], options: Any) -> None:
    """Send version 1, then begin with version 2 and say so."""
    with Sender(num_workers=1, **sharded(scheme, whole, 3, 4), **options) as sender:
        pipe.send(sender.address(0))
        sender.send()
        pipe.recv()
        pipe.send("sending")
        sender.send()
        pipe.recv()


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        pytest.param("shm", {}, marks=pytest.mark.long),
        ("dist", {"shared_memory": False}),
    ],
)
def test_a_rank_that_is_killed_while_it_sends_is_named(scheme: str, options: Any) -> None:
    whole = {"w": torch.full((8, 500_000), 1.0)}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "sync_core", "sync_plugin_std", "sync_plugin_dist"])
    here, there = context.Pipe()
    with trainer(whole, 4, scheme=scheme, timeout=20.0, **options) as senders:
        senders.pop().close()
        process = context.Process(
            target=_hold_a_rank, args=(there, scheme, whole, {"timeout": 20.0, **options})
        )
        process.start()
        try:
            addresses = [*(sender.address(0) for sender in senders), here.recv()]
            model = like(whole)
            receiver = Receiver(join_addresses(addresses), model)
            assert send_all(senders, [receiver]) == [1]
            for sender in senders:
                with torch.no_grad():
                    sender._source.model["w"].fill_(2.0)
            pending = [sender.send_async() for sender in senders]
            here.send("go on")
            assert here.recv() == "sending"
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(SenderLostError, match="rank 3 of 4"):
                _receive_twice(receiver)
            # Either none of version 2, or all of it: the last rank sends what it had.
            if receiver.version == 1:
                assert (model["w"] == 1.0).all()
                for each in pending:
                    with pytest.raises(SendError, match="rank 3 of 4"):
                        each.wait()
            else:
                assert (model["w"][:6] == 2.0).all()
        finally:
            process.kill()
            process.join()


def _receive_until_killed(pipe: Any, address: Address) -> None:
    with Receiver(address, {"w": torch.zeros(4, 2)}) as receiver:
        receiver.receive()
        pipe.send(receiver.version)
        threading.Event().wait()


def test_a_worker_that_is_killed_is_named_by_every_rank_and_the_others_are_updated() -> None:
    whole = weights(w=(4, 2))
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    with trainer(whole, 2, num_workers=2, scheme="shm", timeout=20.0) as senders:
        model = like(whole)
        receiver = Receiver(address_of(senders, 0), model)
        process = context.Process(
            target=_receive_until_killed, args=(there, address_of(senders, 1))
        )
        process.start()
        try:
            assert send_all(senders, [receiver]) == [1]
            assert here.recv() == 1
            process.kill()
            process.join()
            pending = [sender.send_async() for sender in senders]
            assert receiver.receive() == 2
            for each in pending:
                with pytest.raises(SendError, match="worker 1: ") as caught:
                    each.wait()
                assert caught.value.report.updated == (0,)
        finally:
            process.kill()
            process.join()


def test_reports_of_all_ranks_are_one() -> None:
    whole = weights(w=(4, 2))
    with trainer(whole, 2, num_workers=2, timeout=2.0) as senders:
        receivers = [Receiver(address_of(senders, i), like(whole)) for i in range(2)]
        pending = [sender.send_async() for sender in senders]
        assert [receiver.receive() for receiver in receivers] == [1, 1]
        reports = [each.wait() for each in pending]
        report = merge_reports(reports)
        assert (report.version, report.updated, report.failed) == (1, (0, 1), {})
        assert report.nbytes == sum(each.nbytes for each in reports)
        assert report.scheme == "sharded::thread"
        receivers[1].close()
        pending = [sender.send_async() for sender in senders]
        receivers[0].receive()
        failed = []
        for each in pending:
            with pytest.raises(SendError) as caught:
                each.wait()
            failed.append(caught.value.report)
        report = merge_reports(failed)
        assert report.updated == (0,)
        assert "rank 0: closed its receiver" in str(report.failed[1].error)
        with pytest.raises(ValueError, match="rank 0 sent version 1, and rank 1 version 2"):
            merge_reports([reports[0], failed[1]])
