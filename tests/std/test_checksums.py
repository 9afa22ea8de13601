"""The layers `checksum` and `readback`: one flipped bit is found, wherever it flips, and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sync_core import (
    Answer,
    CorruptionError,
    Layout,
    Payload,
    ReadbackError,
    Receiver,
    ReceiverTransport,
    Sender,
    SendError,
    SenderTransport,
    TransportContext,
    WorkerError,
    hookimpl,
)
from sync_core.transports import checksum
from sync_plugin_std import select
from sync_plugin_std.calls import PointToPointTransport
from sync_plugin_std.layers.checksums import buckets
from sync_plugin_std.local import Publisher

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.uint64,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
]

READBACK = ["readback", "checksum"]
PROOFS = [["checksum"], READBACK, ["checksum", "readback"]]

Wire = Callable[[bytearray], None]


class Wires:
    """A scheme whose bytes go through a function on their way, in one process."""

    capabilities: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.wire: Wire = lambda _data: None
        self.receivers: dict[int, WireReceiver] = {}

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        if context.side == "sender":
            return WireSender(self, context.worker_ids)
        return self.receivers.setdefault(context.worker_id, WireReceiver())


class WireSender(PointToPointTransport):
    def __init__(self, scheme: Wires, worker_ids: Sequence[int]) -> None:
        self.scheme = scheme
        super().__init__(worker_ids)

    def address(self, worker_id: int) -> None:
        return None

    def send_to(self, worker_id: int, payload: Payload) -> Answer | None:
        data = bytearray(payload.to_bytes())
        self.scheme.wire(data)
        receiver = self.scheme.receivers[worker_id]
        receiver.payload = Payload.from_bytes(data, payload.version)
        receiver.commit()
        return receiver.answer


class WireReceiver(ReceiverTransport):
    payload: Payload | None = None
    answer: Answer | None = None
    commit: Callable[[], object]

    def receive(self, timeout: float) -> Payload | None:
        payload, self.payload = self.payload, None
        return payload

    def acknowledge(self, answer: Answer) -> None:
        self.answer = answer

    def close(self) -> None: ...


def connect(scheme: Wires, sender: Sender, model: Any, worker_id: int = 0) -> Receiver:
    """A receiver that commits in the sender's thread, and keeps its errors to itself."""
    receiver = Receiver(sender.address(worker_id), model)

    def commit() -> None:
        with suppress(WorkerError):  # the sender learns it
            receiver.receive(0)

    scheme.receivers[worker_id].commit = commit
    return receiver


def flip(name: str) -> Wire:
    """Flip a bit of the first byte of a tensor."""

    def wire(data: bytearray) -> None:
        layout = Layout.from_header(bytes(data[: 8 + int.from_bytes(data[:8], "little")]))
        data[len(layout.header) + layout.specs[layout.index[name]].offset] ^= 1

    return wire


class FlippingCopies(TorchDispatchMode):
    """Memory that goes bad under a copy: every `_foreach_copy_` leaves a wrong bit behind."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._foreach_copy_.default:
            args[0][0].view(-1).view(torch.uint8)[:1].bitwise_xor_(1)
        return result


def only_error(info: pytest.ExceptionInfo[SendError]) -> WorkerError:
    ((_, result),) = info.value.report.failed.items()
    assert isinstance(result.error, WorkerError)
    return result.error


def flipping_copies() -> TorchDispatchMode:
    return FlippingCopies()  # type: ignore[no-untyped-call]


def bits(tensor: Tensor) -> list[int]:
    values: list[int] = tensor.reshape(-1).view(torch.uint8).tolist()
    return values


def of_every_dtype(fill: int) -> dict[str, Tensor]:
    named = {}
    for dtype in DTYPES:
        raw = torch.full((6 * dtype.itemsize,), fill, dtype=torch.uint8)
        named[str(dtype)] = (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(2, 3)
    return named | {"empty": torch.zeros(0, 3), "scalar": torch.tensor(float(fill))}


@pytest.mark.parametrize("proof", PROOFS)
def test_all_dtypes_arrive_bit_for_bit_nan_and_all(proof: Any) -> None:
    # Bytes of ones are NaN in every floating-point dtype, or what comes nearest to it.
    scheme, model, copy = Wires(), of_every_dtype(255), of_every_dtype(0)
    with Sender(scheme, model, num_workers=1, layers=proof) as sender:
        connect(scheme, sender, copy)
        assert sender.send().updated == (0,)
    for name, tensor in model.items():
        assert bits(tensor) == bits(copy[name]), name


def three_buckets() -> dict[str, Tensor]:
    return {"first": torch.ones(3), "second": torch.ones(1 << 20), "third": torch.ones(5)}


@pytest.mark.parametrize("proof", PROOFS)
def test_one_bit_that_flips_on_the_wire_is_found_and_named(proof: Any) -> None:
    scheme, model, copy = Wires(), three_buckets(), three_buckets()
    with Sender(scheme, model, num_workers=1, layers=proof) as sender:
        receiver = connect(scheme, sender, copy)
        assert sender.send().updated == (0,)
        model["first"].fill_(2)
        scheme.wire = flip("second")
        with pytest.raises(SendError) as info:
            sender.send()
        error = only_error(info)
        assert isinstance(error, CorruptionError)
        assert "bucket 2 of 3 ('second'): expected" in str(error)
        assert "'first'" not in str(error)
        assert receiver.version == 1
        assert copy["first"].tolist() == [1, 1, 1]
        scheme.wire = lambda _data: None
        assert sender.send().updated == (0,)
        assert receiver.version == 3
        assert copy["first"].tolist() == [2, 2, 2]


def test_a_bit_that_flips_in_the_checksums_is_found_too() -> None:
    scheme, model = Wires(), three_buckets()
    with Sender(scheme, model, num_workers=1, layers=["checksum"]) as sender:
        connect(scheme, sender, three_buckets())
        scheme.wire = flip("__sync__.extra.checksum.sums")
        with pytest.raises(SendError, match="bucket 1 of 3"):
            sender.send()


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("scheme", ["thread", "shm", "mp"])
def test_a_bit_that_flips_in_a_slot(scheme: str, zero_copy: bool) -> None:
    model, copy = nn.Linear(3, 2), nn.Linear(3, 2)
    with Sender(scheme, model, num_workers=1, zero_copy=zero_copy, layers=["checksum"]) as sender:
        receiver = Receiver(sender.address(0), copy)
        pending = sender.send_async()
        receiver.receive()
        assert pending.wait().updated == (0,)
        before = copy.weight.tolist()
        with torch.no_grad():
            model.weight.add_(1)
        pending = sender.send_async()
        publisher: Publisher = cast("Any", sender._pipeline.transport)._publisher
        (slot,) = [slot for slot in publisher.slots if slot.version == 2]
        header = int.from_bytes(bytes(slot.block.memory[:8].tolist()), "little")
        slot.block.memory[8 + header] ^= 1
        with pytest.raises(CorruptionError, match="'weight', 'bias'"):
            receiver.receive()
        with pytest.raises(SendError) as info:
            pending.wait()
        assert isinstance(only_error(info), CorruptionError)
        assert copy.weight.tolist() == before
        pending = sender.send_async()
        assert receiver.receive() == 3
        assert pending.wait().updated == (0,)
        assert torch.equal(copy.weight, model.weight)


def test_a_model_that_holds_other_bits_than_were_written_is_known_bad() -> None:
    model, copy = nn.Linear(3, 2), nn.Linear(3, 2)
    with Sender("thread", model, num_workers=1, layers=READBACK) as sender:
        receiver = Receiver(sender.address(0), copy)
        pending = sender.send_async()
        with flipping_copies(), pytest.raises(ReadbackError, match=r"written in 'weight'; it is"):
            receiver.receive()
        with pytest.raises(SendError, match="its model is known bad") as info:
            pending.wait()
        assert isinstance(only_error(info), ReadbackError)
        assert info.value.report.updated == ()
        assert receiver.version == 0
        pending = sender.send_async()
        assert receiver.receive() == 2
        assert pending.wait().updated == (0,)
        assert torch.equal(copy.weight, model.weight)


def test_a_module_that_changes_what_it_loads_is_read_back() -> None:
    class Rounds(nn.Linear):
        def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
            super()._load_from_state_dict(*args, **kwargs)
            with torch.no_grad():
                self.bias.add_(1)

    model = nn.Linear(3, 2)
    with Sender("thread", model, num_workers=1, strategy="state_dict", layers=READBACK) as sender:
        receiver = Receiver(sender.address(0), Rounds(3, 2))
        pending = sender.send_async()
        with pytest.raises(ReadbackError, match="'bias'"):
            receiver.receive()
        with pytest.raises(SendError):
            pending.wait()


def test_a_model_that_shares_no_memory_where_the_sender_s_does() -> None:
    shared = torch.ones(2)
    model = {"a": shared, "b": shared}
    copy = {"a": torch.zeros(2), "b": torch.zeros(2)}
    scheme = Wires()
    with Sender(scheme, model, num_workers=1, layers=READBACK) as sender:
        connect(scheme, sender, copy)
        assert sender.send().updated == (0,)
    assert copy["b"].tolist() == [1, 1]


@pytest.mark.parametrize("proof", PROOFS)
@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("layers", [[], ["bf16"]])
def test_layers_and_zero_copy(layers: list[str], zero_copy: bool, proof: Any) -> None:
    linear, copied = nn.Linear(3, 2), nn.Linear(3, 2)
    model = nn.Sequential(linear, nn.BatchNorm1d(2))
    copy = nn.Sequential(copied, nn.BatchNorm1d(2))
    with Sender(
        "thread", model, num_workers=1, layers=[*layers, *proof], zero_copy=zero_copy
    ) as sender:
        receiver = Receiver(sender.address(0), copy)
        for version in (1, 2, 3):
            with torch.no_grad():
                linear.weight.add_(1)
            pending = sender.send_async()
            assert receiver.receive() == version
            assert pending.wait().updated == (0,)
            assert torch.allclose(linear.weight, copied.weight, atol=0.05)
        receiver.close()


def test_a_failed_readback_leaves_no_model_in_memory_that_is_lent_to_nobody() -> None:
    model, copy = nn.Linear(3, 2), nn.Linear(3, 2)
    copy.register_buffer("steps", torch.zeros(1))
    model.register_buffer("steps", torch.zeros(1))
    with Sender("thread", model, num_workers=1, zero_copy=True, layers=READBACK) as sender:
        receiver = Receiver(sender.address(0), copy)
        pending = sender.send_async()
        # A buffer is copied, and not pointed at what arrived.
        with flipping_copies(), pytest.raises(ReadbackError, match="'steps'"):
            receiver.receive()
        with pytest.raises(SendError):
            pending.wait()
        publisher: Publisher = cast("Any", sender._pipeline.transport)._publisher
        assert not any(slot.readers for slot in publisher.slots)
        memory = [slot.block.memory.untyped_storage().data_ptr() for slot in publisher.slots]
        assert copy.weight.untyped_storage().data_ptr() not in memory


@pytest.mark.parametrize("proof", PROOFS)
def test_partial_updates_and_several_models(proof: Any) -> None:
    models = {"actor": nn.Linear(3, 2), "critic": nn.Linear(3, 1)}
    copies = {"actor": nn.Linear(3, 2), "critic": nn.Linear(3, 1)}
    with Sender("thread", models, num_workers=1, layers=[select("*"), *proof]) as sender:
        receiver = Receiver(sender.address(0), copies)
        pending = sender.send_async()
        receiver.receive()
        assert pending.wait().updated == (0,)
        assert torch.equal(models["critic"].weight, copies["critic"].weight)
        pending = sender.send_async({"critic.bias": torch.full((1,), 7.0)})
        assert receiver.receive() == 2
        assert pending.wait().updated == (0,)
        assert copies["critic"].bias.item() == 7


def test_extra_state_is_the_module_s_own_affair() -> None:
    class Counts(nn.Linear):
        def get_extra_state(self) -> Tensor:
            return torch.ones(2)

        def set_extra_state(self, state: Any) -> None:
            assert state.tolist() == [1, 1]

    with Sender("thread", Counts(2, 2), num_workers=1, layers=READBACK) as sender:
        receiver = Receiver(sender.address(0), Counts(2, 2))
        pending = sender.send_async()
        receiver.receive()
        assert pending.wait().updated == (0,)


def test_nothing_is_verified_where_nothing_travels() -> None:
    model = nn.Linear(2, 2)
    with Sender("none", model, num_workers=1, layers=READBACK) as sender:
        receiver = Receiver(sender.address(0), model)
        assert sender.send().updated == (0,)
        with torch.no_grad():
            model.weight.add_(1)
        assert receiver.receive() == 1


def test_what_comes_without_checksums_is_refused() -> None:
    scheme, model = Wires(), {"w": torch.ones(2)}
    with Sender(scheme, model, num_workers=1, layers=["checksum"]) as sender:
        receiver = connect(scheme, sender, {"w": torch.zeros(2)})
        layout = Layout.of(model)
        scheme.receivers[0].payload = Payload(1, layout, (model["w"],))
        with pytest.raises(CorruptionError, match="came without its checksums"):
            receiver.receive(0)


def test_there_are_never_so_many_buckets_that_a_digest_fits_no_message() -> None:
    # A layout of 100 GB, of which no byte is allocated.
    meta = Layout.of({f"{i}": torch.ones(1) for i in range(20_000)})
    specs = tuple(
        replace(s, shape=(1_250_000,), offset=i * 5_000_000) for i, s in enumerate(meta.specs)
    )
    assert len(buckets(Layout(specs))) < 2 * 1024 + 1


def test_strides_do_not_matter() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert checksum([tensor.t()]) == checksum([tensor.t().contiguous()])
    assert checksum([torch.ones(2, dtype=torch.complex64).conj()])
