"""Options of `dist`: accepted ones work bit by bit, others are refused."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from sync_core import OptionError, Receiver, Sender, SenderLostError, SendReport
from sync_testing import count_threads, eventually
from sync_testing.schemes import fill, fingerprints, make_policy, models

pytestmark = pytest.mark.timeout(60)

WAYS: dict[str, dict[str, Any]] = {
    "memory": {},
    "gloo": {"shared_memory": False},
    "broadcast": {"topology": "broadcast"},
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options by which weights go to workers in one way or another."""
    return WAYS[request.param]


def dist(model: Any, num_workers: int = 1, **options: Any) -> Sender:
    return Sender("dist", model, num_workers=num_workers, **options)


def exchange(sender: Sender, *receivers: Receiver, weights: Any = None) -> SendReport:
    """Let all of these receive a version, each in its own thread."""
    pending = sender.send_async(weights)
    threads = [threading.Thread(target=receiver.receive, args=(20.0,)) for receiver in receivers]
    for thread in threads:
        thread.start()
    try:
        return pending.wait()
    finally:
        for thread in threads:
            thread.join()


def test_a_deadline_may_be_infinite(way: dict[str, Any]) -> None:
    endless = float("inf")
    with dist(nn.Linear(1, 1), **way, timeout=endless) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(1, 1))
        with receiver:
            assert exchange(sender, receiver).updated == (0,)


def is_filled(model: nn.Module, value: float) -> bool:
    return all(bool((parameter == value).all()) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": "ring"}, r"topology='ring' is not known; type topology='p2p' or 'broadcast'"),
        ({"backend": "mpi"}, r"backend='mpi' is not known; type backend='gloo' or 'nccl'"),
        *(
            (
                {"host": host},
                rf"host={host!r} is not an address to connect to; give the one of this",
            )
            for host in ("", "0.0.0.0", "0", "::", "::0")
        ),
        ({"host": "192.0.2.1"}, r"cannot listen on 192.0.2.1, .*; host= is an address of this"),
        ({"host": "no-such-host.invalid"}, r"cannot listen on no-such-host.invalid, .*; host= is"),
        *(({"port": port}, rf"port={port!r} is not a port") for port in (-1, 1 << 16)),
        ({"host": None}, r"scheme 'dist' takes host: str, not None"),
        *(({"port": p}, rf"scheme 'dist' takes port: int, not {p!r}") for p in ("80", True)),
        *(
            ({"bucket_mb": size}, rf"bucket_mb={size} holds nothing; give a size in MB")
            for size in (0, -1, 1e-9, float("inf"), float("nan"))
        ),
        ({"bucket_mb": "4"}, r"scheme 'dist' takes bucket_mb: float, not '4'"),
        ({"shared_memory": 1}, r"scheme 'dist' takes shared_memory: bool, not 1"),
        ({"rank": 0}, r"has no option 'rank'; its options are: "),
    ],
)
def test_options_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        dist(make_policy(), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu() -> None:
    with pytest.raises(OptionError, match=r"needs a GPU .* type backend='gloo', which goes"):
        dist(make_policy(), backend="nccl")


def test_a_port_that_is_taken() -> None:
    with dist(make_policy()) as sender:
        port = sender.address(0).endpoint.port
        with pytest.raises(OptionError, match=rf"cannot listen on 127.0.0.1, port {port}: .* free"):
            dist(make_policy(), port=port)


def test_a_port_may_be_used_again() -> None:
    with dist(make_policy(1.0)) as sender:
        old = sender.address(0)
        with Receiver(old, make_policy()) as receiver:
            exchange(sender, receiver)
    with pytest.raises(SenderLostError, match=r"no sender answers at 127.0.0.1.* host=<an address"):
        Receiver(old, make_policy())
    with (
        dist(make_policy(2.0), port=old.endpoint.port) as sender,
        pytest.raises(SenderLostError, match=r"does not know its token|closed the connection"),
    ):
        Receiver(old, make_policy())


def test_a_wrong_token_gets_nothing(way: dict[str, Any]) -> None:
    with dist(make_policy(1.0), **way, timeout=2.0) as sender:
        address = sender.address(0)
        sender.send_async()
        target = make_policy()
        with pytest.raises(SenderLostError):
            Receiver(dataclasses.replace(address, token="0" * 32), target).receive()
        assert is_filled(target, 0.0)
        assert Receiver(address, target).receive() == 1
        assert is_filled(target, 1.0)


def test_nothing_listens_without_asking_for_the_token() -> None:
    before = listening()
    with dist(make_policy()) as sender, Receiver(sender.address(0), make_policy()):
        endpoint = sender.address(0).endpoint
        # gloo's own come with a wire; a store would be there already.
        assert listening() - before == {(endpoint.host, endpoint.port)}


def test_a_worker_that_was_removed() -> None:
    with dist(make_policy(), 2) as sender:
        late, served = sender.address(0), Receiver(sender.address(1), make_policy())
        sender.remove_worker(0)
        with pytest.raises(SenderLostError, match="the sender has no worker 0 any more"):
            Receiver(late, make_policy())
        sender.remove_worker(1)
        with pytest.raises(SenderLostError, match="worker 1 was removed from the sender"):
            served.receive()


def lazy(seed: int) -> dict[str, Tensor]:
    """Views whose elements are computed when they are read; plain ones for the seed 0."""
    base = torch.complex(torch.full((40, 3), seed + 0.5), torch.arange(120.0).reshape(40, 3))
    tensors = {"conj": base.conj(), "adjoint": base.mH, "neg": base.conj().imag}
    return tensors if seed else plain(tensors)


def plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.resolve_conj().resolve_neg().clone() for name, tensor in tensors.items()}


def wide(seed: int) -> dict[str, Tensor]:
    """Of every dtype, each larger than a part."""
    return {name: tensor.repeat(9, 9) for name, tensor in models.of_every_dtype(seed).items()}


def stepped(seed: int) -> dict[str, Tensor]:
    """The same with gaps."""
    return {name: tensor[::2, 1:] for name, tensor in wide(seed).items()}


@pytest.mark.parametrize("bucket_mb", [1e-4, 1.0], ids=["smaller", "larger"])
@pytest.mark.parametrize("make", [lazy, wide, stepped, models.of_odd_shapes, models.not_contiguous])
def test_parts_smaller_and_larger_than_tensors(
    make: Callable[[int], dict[str, Tensor]], bucket_mb: float, way: dict[str, Any]
) -> None:
    weights, target = make(1), make(0)
    with (
        dist(weights, bucket_mb=bucket_mb, **way) as sender,
        Receiver(sender.address(0), target) as receiver,
    ):
        assert exchange(sender, receiver).updated == (0,)
    assert fingerprints(target) == fingerprints(plain(weights))


def test_parts_of_one_byte(way: dict[str, Any]) -> None:
    weights, target = {"weight": torch.arange(50.0)}, {"weight": torch.zeros(50)}
    with (
        dist(weights, bucket_mb=1e-6, **way) as sender,
        Receiver(sender.address(0), target) as receiver,
    ):
        assert exchange(sender, receiver).updated == (0,)
    assert torch.equal(target["weight"], weights["weight"])


def test_a_tied_module_in_half_precision(way: dict[str, Any]) -> None:
    source, target = (models.Tied(seed).bfloat16() for seed in (3, 0))
    with (
        dist(source, 1, bucket_mb=1e-5, **way) as sender,
        Receiver(sender.address(0), target) as receiver,
    ):
        exchange(sender, receiver)
    assert target.is_tied()
    assert fingerprints(target) == fingerprints(source)


def test_other_names_for_this_machine(way: dict[str, Any]) -> None:
    hosts = ["localhost"]
    if socket.has_ipv6:
        with closing(socket.socket(socket.AF_INET6)) as probe:
            if probe.connect_ex(("::1", 9)) not in (97, 99):
                hosts.append("::1")
    for host in hosts:
        target = make_policy()
        with (
            dist(make_policy(2.0), host=host, **way) as sender,
            Receiver(sender.address(0), target) as receiver,
        ):
            exchange(sender, receiver)
        assert is_filled(target, 2.0)


def test_it_listens_on_loopback_alone(way: dict[str, Any]) -> None:
    before = listening()
    with (
        dist(make_policy(), 2, **way) as sender,
        Receiver(sender.address(0), make_policy()) as first,
        Receiver(sender.address(1), make_policy()) as second,
    ):
        exchange(sender, first, second)
        ours = listening() - before
        assert {host for host, _ in ours} == {"127.0.0.1"}
        endpoint = sender.address(0).endpoint
        assert endpoint.port in {port for _, port in ours}
    assert eventually(lambda: listening() <= before, 10)


def listening() -> set[tuple[str, int]]:
    """Return where this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN}


def test_receive_without_waiting(way: dict[str, Any]) -> None:
    with (
        dist(make_policy(), **way) as sender,
        Receiver(sender.address(0), make_policy()) as receiver,
    ):
        for _ in range(2):
            begin = time.perf_counter()
            assert [receiver.receive(0) for _ in range(100)] == [None] * 100
            assert time.perf_counter() - begin < 5.0
            exchange(sender, receiver)


@pytest.fixture
def default_group() -> Iterator[Any]:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def test_beside_the_users_process_group_and_another_sender(default_group: Any) -> None:
    source, targets = make_policy(), [make_policy(), make_policy()]
    with (
        dist(source, model_id="actor", shared_memory=False) as first,
        dist(source, model_id="critic", topology="broadcast") as second,
        Receiver(first.address(0), targets[0]) as to_first,
        Receiver(second.address(0), targets[1]) as to_second,
    ):
        for value in (1.0, 2.0, 3.0):
            fill(source, value)
            pending = [first.send_async(), second.send_async()]
            assert (to_second.receive(), to_first.receive()) == (int(value), int(value))
            assert [send.wait().updated for send in pending] == [(0,), (0,)]
            assert all(is_filled(target, value) for target in targets)
            ones = torch.ones(3)
            distributed.all_reduce(ones)
            assert torch.equal(ones, torch.ones(3))
        assert distributed.group.WORLD is default_group
        assert list(distributed.distributed_c10d._world.pg_map) == [default_group]


def test_a_sender_that_is_forgotten_leaves_nothing(way: dict[str, Any]) -> None:
    def use() -> None:
        sender = dist(make_policy(1.0), timeout=2.0, **way)
        with Receiver(sender.address(0), make_policy()) as receiver:
            exchange(sender, receiver)

    def resources() -> tuple[int, int, set[tuple[str, int]]]:
        return psutil.Process().num_fds(), count_threads(), listening()

    use()
    before = resources()
    for _ in range(3):
        use()
    assert eventually(lambda: resources() == before, 10), (before, resources())
