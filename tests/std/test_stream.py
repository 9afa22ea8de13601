"""Weights that an iterator makes tensor by tensor, over schemes that pack and send them so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from sync_core import (
    Answer,
    ModelError,
    OptionError,
    Receiver,
    ReceiverTransport,
    Sender,
    SenderLostError,
    SendError,
    SenderTransport,
    TransportContext,
)
from sync_core.wrapping import WrappingReceiver, WrappingScheme
from sync_plugin_scale import Chunked
from sync_plugin_std import Float8Blocks, Split, Stream, Unstack

NAMES = [f"layer{i}" for i in range(6)]
SHAPE = (64, 64)
SPECS = [(name, torch.float32, SHAPE) for name in NAMES]


def value(position: int, version: float) -> Tensor:
    return torch.full(SHAPE, float(version * 10 + position))


def good(version: float) -> Iterator[Tensor]:
    return (value(i, version) for i in range(len(NAMES)))


def model() -> dict[str, Tensor]:
    return {name: torch.zeros(SHAPE) for name in NAMES}


def holds(held: dict[str, Tensor], version: float) -> bool:
    return all(torch.equal(held[name], value(i, version)) for i, name in enumerate(NAMES))


class Worker:
    """A thread that commits what comes until its sender is closed."""

    def __init__(self, sender: Sender, worker_id: int = 0, **options: Any) -> None:
        self.model = model()
        self.receiver = Receiver(sender.address(worker_id), self.model, **options)
        self.versions: list[int] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while (version := self.receiver.receive(timeout=60)) is not None:
                self.versions.append(version)
        except SenderLostError:
            pass

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.receiver.close()


SCHEMES = {
    "thread": "thread",
    "shm": "shm",
    "mp": "mp",
    "file": "file",
    "chunked over thread": Chunked("thread", mb=0.02),
    "chunked over shm": Chunked("shm", mb=0.02),
    "increments over shm": "increments::shm",
    "dist": "dist",
}


@pytest.fixture(params=list(SCHEMES.values()), ids=list(SCHEMES))
def scheme(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_each_tensor_is_packed_before_the_next_is_asked_for() -> None:
    memory = torch.empty(SHAPE)

    def reused() -> Iterator[tuple[str, Tensor]]:
        for i, name in enumerate(NAMES):
            yield name, memory.copy_(value(i, 1))

    with Sender("thread", model(), num_workers=1) as sender:
        worker = Worker(sender)
        sender.send(Stream(SPECS, reused))
        sender.send(Stream(SPECS, reused()), extras={"step": torch.tensor(7)})
        assert holds(worker.model, 1)
        assert worker.receiver.extras["step"].item() == 7
    worker.join()


def raises(version: float) -> Iterator[Tensor]:
    yield value(0, version)
    raise RuntimeError("the adapter was gone")


def gives(position: int, item: Any) -> Callable[[float], Iterator[Any]]:
    def made(version: float) -> Iterator[Any]:
        for i in range(len(NAMES)):
            yield item if i == position else value(i, version)

    return made


def one_too_many(version: float) -> Iterator[Tensor]:
    yield from good(version)
    yield torch.zeros(3)


def raises_at_its_end(version: float) -> Iterator[Tensor]:
    yield from good(version)
    raise RuntimeError("could not unmerge")


BAD: dict[str, tuple[Callable[[float], Iterator[Any]], str]] = {
    "raises": (raises, r"raised at 'layer1', tensor 2 of 6: RuntimeError\('the adapter was gone'"),
    "ends early": (lambda version: iter([value(0, version)]), "ended before 'layer1', tensor 2"),
    "another shape": (gives(4, torch.zeros(3)), r"gave float32\[3\] for 'layer4', tensor 5"),
    "another dtype": (gives(3, torch.zeros(SHAPE).half()), r"gave float16\[64, 64\] for 'layer3'"),
    "another name": (gives(2, ("layer3", torch.zeros(SHAPE))), "gave 'layer3' where it said 'lay"),
    "no tensor": (gives(5, 3), "'layer5' is of the type int"),
    "one too many": (one_too_many, r"more than the 6 tensors .* came float32\[3\]"),
    "raises at its end": (raises_at_its_end, "raised after 'layer5', its last tensor: RuntimeErr"),
}


def test_a_bad_stream_is_committed_nowhere_and_the_next_send_works(scheme: Any) -> None:
    with Sender(scheme, model(), num_workers=2, timeout=30) as sender:
        workers = [Worker(sender, i) for i in range(2)]
        sender.send(Stream(SPECS, good(1)))
        for source, message in BAD.values():
            with pytest.raises(ModelError, match=message):
                sender.send(Stream(SPECS, source(2)))
            for worker in workers:
                assert holds(worker.model, 1)
        report = sender.send(Stream(SPECS, good(3)))
        assert report.updated == (0, 1)
        assert all(holds(worker.model, 3) for worker in workers)
    for worker in workers:
        worker.join()
        assert len(worker.versions) == 2


class Noting(WrappingReceiver):
    """Notes that it was given something, before it answers."""

    def acknowledge(self, answer: Answer) -> None:
        came.set()
        super().acknowledge(answer)


@dataclass(frozen=True)
class Noted(WrappingScheme):
    """Passes everything on."""

    wrapper: ClassVar[str] = "noted"
    keeps: ClassVar[frozenset[str]] = frozenset({"late_join"})

    def create_sender(self, context: TransportContext) -> SenderTransport:
        return self.inner_sender(context)

    def create_receiver(self, context: TransportContext) -> ReceiverTransport:
        return Noting(self.inner_receiver(context))


came = threading.Event()


@pytest.mark.parametrize("inner", ["thread", "shm"])
def test_chunks_leave_while_the_rest_is_made(inner: str) -> None:
    came.clear()

    def waits() -> Iterator[Tensor]:
        for i in range(len(NAMES)):
            if i == len(NAMES) - 1:
                # The last is made once a worker has the first chunk.
                assert came.wait(30)
            yield value(i, 1)

    with Sender(Chunked(Noted(inner), mb=0.02), model(), num_workers=1, timeout=30) as sender:
        worker = Worker(sender)
        sender.send(Stream(SPECS, waits))
        assert holds(worker.model, 1)
    worker.join()


def test_a_late_worker_gets_the_version_before_a_bad_stream() -> None:
    with Sender(Chunked("shm", mb=0.02), model(), num_workers=1, timeout=30) as sender:
        receiver = Receiver(sender.address(0), held := model())
        first = sender.send_async(Stream(SPECS, good(1)))
        with pytest.raises(SendError):
            first.wait(0.0)
        with pytest.raises(ModelError):
            sender.send(Stream(SPECS, gives(5, 3)(2)))
        assert receiver.receive(timeout=30) == 1
        assert holds(held, 1)
        receiver.close()


def test_a_worker_that_comes_after_a_bad_stream_gets_the_version_before_it() -> None:
    with Sender(Chunked("shm", mb=0.02), model(), num_workers=1, timeout=30) as sender:
        first = Worker(sender)
        sender.send(Stream(SPECS, good(1)))
        with pytest.raises(ModelError):
            sender.send(Stream(SPECS, gives(5, 3)(2)))
        again = Receiver(sender.address(0), held := model())
        assert again.receive(timeout=30) == 1
        assert holds(held, 1)
        again.close()
        late = Receiver(sender.address(sender.add_worker()), held := model())
        assert late.receive(timeout=30) == 1
        assert holds(held, 1)
        late.close()
    first.join()


def test_a_late_worker_keeps_the_first_chunk_of_a_version_that_is_still_made() -> None:
    # Of two chunks, the second one is made last.
    asked, made = threading.Event(), threading.Event()

    def slow() -> Iterator[Tensor]:
        for i in range(len(NAMES)):
            if i == 4:
                asked.set()
                assert made.wait(50)
            yield value(i, 2)

    with Sender(Chunked("shm", mb=0.06), model(), num_workers=1, timeout=60) as sender:
        with pytest.raises(SendError):
            sender.send(Stream(SPECS, good(1)), timeout=0.1)
        with ThreadPoolExecutor(1) as pool, Receiver(sender.address(0), model()) as late:
            sending = pool.submit(sender.send, Stream(SPECS, slow))
            assert asked.wait(50)
            # The other of the two transports still has a chunk of version 1.
            assert late.receive(1.0) is None
            made.set()
            assert late.receive(30.0) == 2
            assert sending.result(30).updated == (0,)


@pytest.mark.parametrize("inner", ["thread", "shm"])
def test_a_worker_that_is_replaced_while_a_version_is_made_gets_it(inner: str) -> None:
    workers: list[Worker] = []

    def replaced() -> Iterator[Tensor]:
        for i in range(len(NAMES)):
            if i == 4:
                first.close()  # with chunks that it has not read
                workers.append(Worker(sender))
            yield value(i, 1)

    with Sender(Chunked(inner, mb=0.02), model(), num_workers=1, timeout=30) as sender:
        first = Receiver(sender.address(0), model())
        assert sender.send(Stream(SPECS, replaced)).updated == (0,)
        assert holds(workers[0].model, 1)
    workers[0].join()


def test_a_layer_gets_the_tensors_of_a_stream() -> None:
    with Sender("thread", Stream(SPECS, lambda: good(1)), num_workers=1, layers=["bf16"]) as sender:
        worker = Worker(sender)
        sender.send()
        assert holds(worker.model, 1)
    worker.join()


CUT: dict[str, tuple[Tensor, list[Any]]] = {
    "split": (torch.arange(32.0).view(8, 4), [Split({"qkv": {"q": 4, "k": 2, "v": 2}})]),
    "unstack": (torch.arange(24.0).view(2, 4, 3), [Unstack({"qkv.weight": "#.weight"})]),
    "split into elements": (torch.arange(2.0), [Split({"qkv": {"k": 1, "v": 1}})]),
    "unstack scalars": (torch.arange(3.0), [Unstack({"qkv.weight": "#.weight"})]),
    "cut twice to elements": (
        torch.arange(4.0).view(2, 2),
        [Unstack({"qkv.weight": "qkv.#"}), Split({"qkv": {"k": 1, "v": 1}})],
    ),
    "cut twice": (
        torch.arange(32.0).view(2, 4, 4),
        [Unstack({"qkv.weight": "qkv.#"}), Split({"qkv": {"k": 2, "v": 2}})],
    ),
    "cut and quantise": (
        torch.arange(32.0).view(8, 4),
        [Split({"qkv": {"q": 4, "k": 2, "v": 2}}), Float8Blocks("q.weight")],
    ),
}


@pytest.mark.parametrize(("whole", "layers"), CUT.values(), ids=list(CUT))
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "given later"])
def test_parts_of_what_had_no_values_at_first_are_not_tied(
    whole: Tensor, layers: list[Any], streamed: bool
) -> None:
    kinds = [("qkv.weight", whole.dtype, whole.shape)]
    first = Stream(kinds, lambda: [whole])
    given = {"qkv.weight": torch.zeros(()).expand(whole.shape)}
    loaded: dict[str, Tensor] = {}
    with Sender("thread", first if streamed else given, num_workers=1, layers=layers) as sender:
        assert sender.address(0).layout.aliases == ()

        def load(tensors: Any) -> None:
            loaded.update({name: tensor.clone() for name, tensor in tensors})

        receiver = Receiver(sender.address(0), load=load)
        pending = sender.send_async(None if streamed else {"qkv.weight": whole})
        assert receiver.receive(timeout=30) == 1
        assert pending.wait().updated == (0,)
    exact = [tensor for tensor in loaded.values() if tensor.dtype == torch.float32]
    values = torch.cat([tensor.flatten() for tensor in exact])
    assert len(values.unique()) == len(values)


def test_a_sender_without_workers_reads_the_stream_too() -> None:
    read = []

    def noted() -> Iterator[Tensor]:
        for i in range(len(NAMES)):
            read.append(i)
            yield value(i, 1)

    with Sender("thread", Stream(SPECS, noted), num_workers=0) as sender:
        assert read == []
        sender.send()
        assert read == list(range(6))


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.head.weight = self.embed.weight


def test_a_tied_tensor_travels_once() -> None:
    tied = TiedModel()
    stream = Stream(
        [("embed.weight", torch.float32, (4, 4))],
        lambda: [torch.ones(4, 4)],
        tied={"head.weight": "embed.weight"},
    )
    with Sender("thread", stream, num_workers=1) as sender:
        receiver = Receiver(sender.address(0), tied)
        pending = sender.send_async()
        receiver.receive(timeout=30)
        pending.wait()
        assert tied.head.weight.unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("specs", "tied", "message"),
    [
        ([], {}, "no tensors"),
        ([("a", torch.float32, (1,)), ("a", torch.float32, (1,))], {}, "'a' twice"),
        ([("a", "float32", (1,))], {}, "must be triples"),
        ([("a", torch.float32)], {}, "must be triples"),
        ([(3, torch.float32, (1,))], {}, "need names that are strings"),
        ([("a", torch.float32, (1,))], {"b": "c"}, "must have the second"),
    ],
)
def test_specs_are_checked(specs: Any, tied: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Stream(specs, list, tied=tied)


def test_a_source_must_be_iterable() -> None:
    with pytest.raises(OptionError, match="iterable"):
        Stream(SPECS, 3)  # type: ignore[arg-type]
