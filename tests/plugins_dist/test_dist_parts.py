"""`parts.pack` writes what `Payload.pack` writes, from the beginning to the end."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sync_core import Layout, Payload
from sync_core.transports import Block
from sync_plugin_dist.chunks import cut, pack

DTYPES = (
    torch.bool,
    torch.int8,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any kind, also those whose elements lie in memory otherwise than they are sent."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 12), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    size = (*shape, 2)
    bits = torch.randint(0, 2, (*size, dtype.itemsize), dtype=torch.uint8, generator=generator)
    if dtype is not torch.bool:
        bits *= 57
    tensor = bits.view(dtype).view(size)
    view = draw(st.sampled_from(["whole", "strided", "transposed", "conj", "neg", "expanded"]))
    if view == "strided":
        return tensor[..., 1]
    if view == "transposed":
        return tensor.transpose(0, -1)
    if view == "conj":
        return tensor.conj()
    if view == "neg" and dtype.is_complex:
        return tensor.conj().imag
    if view == "expanded":
        return tensor[..., :1].expand(*shape, 3)
    return tensor


@settings(max_examples=100, deadline=None)
@example({"": torch.ones(2, dtype=torch.bfloat16)[1:].as_strided((1,), (2,))}, 1)
@given(
    st.dictionaries(st.text(max_size=3), tensors(), min_size=1, max_size=8),
    st.one_of(st.integers(1, 80), st.integers(81, 5000)),
)
def test_pack(named: dict[str, Tensor], part_nbytes: int) -> None:
    layout = Layout.of(named)
    payload = Payload(1, layout, [named[spec.name] for spec in layout.specs])
    wanted = _blank(payload)
    payload.pack(wanted)
    side_by_side = Payload.unpack(wanted, 1)
    assert len(side_by_side.bodies) == 1
    for given_payload in (payload, side_by_side):
        block = _blank(payload)
        before = 0
        for done in pack(given_payload, block, part_nbytes):
            assert before <= done
            before = done
            assert torch.equal(block.memory[:done], wanted.memory[:done])
        assert before == payload.nbytes
        assert torch.equal(block.memory, wanted.memory)
        parts = cut(block, payload.nbytes, part_nbytes)
        assert sum(map(len, parts)) == payload.nbytes
        assert {len(part) for part in parts[:-1]} <= {part_nbytes}


def _blank(payload: Payload) -> Block:
    """A block whose bytes tell whether they were written to."""
    block = Block.allocate(payload.nbytes + 100)
    block.memory.fill_(0xA5)
    return block
