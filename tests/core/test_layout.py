"""Layouts: what travels, where it lies, and the safetensors header that says so."""

from __future__ import annotations

import pickle
import string
from itertools import pairwise

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sync_core import Layout, ModelError, Payload, Update
from sync_core.errors import PayloadError
from sync_core.transports import Block

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


def of_dtype(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, seen as a dtype; booleans are 0 or 1."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count * dtype.itemsize,))
    return raw.to(torch.uint8).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def round_trip(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    update = Update.of(named)
    data = Payload(1, update.layout, update.tensors).to_bytes()
    received = Payload.from_bytes(data, version=1)
    return dict(Update(received.layout, received.tensors).items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_for_bit(dtype: torch.dtype) -> None:
    sent = {
        "matrix": of_dtype(dtype, 3, 5),
        "scalar": of_dtype(dtype),
        "empty": of_dtype(dtype, 0, 2),
    }
    received = round_trip(sent)
    for name, tensor in sent.items():
        assert received[name].dtype == dtype
        assert received[name].shape == tensor.shape
        assert bits(received[name]) == bits(tensor)


def test_conjugate_views_arrive_resolved() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert torch.equal(round_trip({"z": values})["z"], values.resolve_conj())


def test_tied_tensors_travel_once() -> None:
    shared = nn.Parameter(torch.randn(8, 8))
    layout = Layout.of({"encoder": shared, "decoder": shared, "view": shared.detach()})
    assert [spec.name for spec in layout.specs] == ["encoder"]
    assert dict(layout.aliases) == {"decoder": "encoder", "view": "encoder"}
    assert set(round_trip({"encoder": shared, "decoder": shared})) == {"encoder", "decoder"}


def test_tensors_that_share_storage_but_differ_are_not_tied() -> None:
    base = torch.arange(6.0)
    layout = Layout.of({"whole": base, "half": base[:3], "square": base.view(2, 3)})
    assert not layout.aliases


def test_every_tensor_and_the_body_are_aligned() -> None:
    layout = Layout.of(
        {"a": torch.ones(3), "b": torch.ones(5, dtype=torch.int8), "c": torch.ones(1)}
    )
    assert len(layout.header) % 64 == 0
    assert [spec.offset for spec in layout.specs] == [0, 64, 128]


def test_a_payload_is_a_safetensors_file(tmp_path: pytest.TempPathFactory) -> None:
    named = {
        "weight": torch.randn(3, 5),
        "bias": torch.randn(5).bfloat16(),
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "phase": torch.randn(3, dtype=torch.complex64),
        "none": torch.empty(0, 4),
    }
    update = Update.of(named)
    data = Payload(1, update.layout, update.tensors).to_bytes()
    loaded = safetensors.torch.load(data)
    for name, tensor in named.items():
        assert torch.equal(loaded[name], tensor)


def test_a_safetensors_file_is_a_payload() -> None:
    named = {"a": torch.randn(3), "b": torch.randn(7).half(), "c": torch.ones(1, dtype=torch.int64)}
    received = Payload.from_bytes(safetensors.torch.save(named), version=1)
    loaded = dict(Update(received.layout, received.tensors).items())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in named.items())


def test_digest_depends_on_names_dtypes_shapes_and_ties() -> None:
    one = torch.ones(2)
    layouts = [
        Layout.of({"a": one}),
        Layout.of({"b": one}),
        Layout.of({"a": one.half()}),
        Layout.of({"a": one.view(1, 2)}),
        Layout.of({"a": one, "b": one}),
        Layout.of({"a": one, "b": one.clone()}),
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)
    assert Layout.of({"a": torch.zeros(2)}) == layouts[0]


def test_layouts_pickle() -> None:
    layout = Layout.of({"a": torch.ones(2, dtype=torch.complex128), "b": torch.ones(3)})
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_with_tensors_keeps_names_and_ties() -> None:
    tied = torch.ones(2)
    layout = Layout.of({"a": tied, "b": torch.ones(3), "c": tied})
    halved = layout.with_tensors([torch.ones(2).half(), torch.ones(3).half()])
    assert [str(spec) for spec in halved.specs] == ["a: float16[2]", "b: float16[3]"]
    assert halved.aliases == layout.aliases
    assert layout.with_tensors([torch.zeros(2), torch.zeros(3)]) is layout
    assert layout.with_tensors([torch.ones(2).half(), torch.ones(3).half()]) is halved


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({0: torch.ones(1)}, "names that are strings, not 0"),
        ({"a": 3}, "'a' is of the type int"),
        ({"a": torch.ones(2).to_sparse()}, "'a' is sparse"),
        ({"a": torch.ones(2, device="meta")}, "meta"),
        ({"a": nn.UninitializedParameter()}, "'a' has no shape yet"),
        ({"__metadata__": torch.ones(1)}, "reserved"),
        ({"__filler__.0": torch.ones(1)}, "reserved"),
    ],
)
def test_what_cannot_travel_is_named(named: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Layout.of(named)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_a_nested_tensor_cannot_travel() -> None:
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.raises(ModelError, match=r"'a' is .* nested"):
        Layout.of({"a": nested})


names = st.text(string.ascii_letters + "._", min_size=1, max_size=12).filter(
    lambda name: not name.startswith("__")
)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.builds(lambda dtype, shape: of_dtype(dtype, *shape), st.sampled_from(DTYPES), shapes)


@given(st.dictionaries(names, tensors, max_size=8))
def test_whatever_is_sent_arrives(named: dict[str, torch.Tensor]) -> None:
    received = round_trip(named)
    assert set(received) == set(named)
    for name, tensor in named.items():
        assert (received[name].dtype, received[name].shape) == (tensor.dtype, tensor.shape)
        assert received[name].stride() == torch.empty(tensor.shape).stride()
        assert bits(received[name]) == bits(tensor)


def test_a_header_that_promises_too_much_is_refused_before_it_is_read() -> None:
    block = Block.of_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(PayloadError, match="not a payload"):
        block.read_layout()


def test_a_payload_larger_than_its_block_is_refused() -> None:
    layout = Layout.of({"a": torch.ones(1000)})
    with pytest.raises(PayloadError, match="needs"):
        Block.allocate(100).views(layout)


def test_an_unexpected_digest_is_refused() -> None:
    update = Update.of({"a": torch.ones(2)})
    block = Block.allocate(update.layout.nbytes)
    Payload(1, update.layout, update.tensors).pack(block)
    other = Layout.of({"b": torch.ones(2)}).digest
    with pytest.raises(PayloadError, match="expected the layout"):
        Payload.unpack(Block(block.memory), 1, digest=other)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=8), st.lists(st.integers(0, 2000)))
def test_a_payload_may_arrive_in_stretches(sizes: list[int], cuts: list[int]) -> None:
    update = Update.of({f"t{i}": torch.rand(size) for i, size in enumerate(sizes)})
    layout, size = update.layout, update.layout.nbytes
    memory = torch.frombuffer(
        bytearray(Payload(1, layout, update.tensors).to_bytes()), dtype=torch.uint8
    )
    cuts = [len(layout.header) + cut // 16 * 16 for cut in cuts]
    edges = sorted({0, *(cut for cut in cuts if cut < size), size})
    stretches = [memory[begin:end] for begin, end in pairwise(edges)]
    spans = [(spec.offset, spec.offset + spec.nbytes) for spec in layout.specs]
    inner = [edge - len(layout.header) for edge in edges]
    block = Block(*stretches)
    if any(begin < edge < end for begin, end in spans for edge in inner):
        with pytest.raises(PayloadError, match="lies in two stretches"):
            block.views(layout)
        return
    received = Payload.unpack(block, 1, digest=layout.digest)
    assert all(map(torch.equal, received.tensors, update.tensors))


def test_a_known_header_is_not_read_again() -> None:
    update = Update.of({"a": torch.ones(2)})
    block = Block.of_bytes(Payload(1, update.layout, update.tensors).to_bytes())
    assert block.read_layout(known=update.layout) is update.layout
    assert block.read_layout(known=Layout.of({"b": torch.ones(2)})) == update.layout
