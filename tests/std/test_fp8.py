"""The layer Float8Blocks: values to within a sixteenth, in the format that engines load."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sync_core import ApplyContext, BindContext, ModelError, Receiver, Sender, Update, hookimpl
from sync_plugin_std import Float8Blocks
from sync_testing import LayerConformance, Loopback


def restored(weight: Tensor, scales: Tensor) -> Tensor:
    rows, columns = weight.shape
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight.float() * spread[:rows, :columns]


def sent(source: dict[str, Tensor], layers: list[object]) -> dict[str, Tensor]:
    held: dict[str, Tensor] = {}
    with Sender(Loopback(), source, num_workers=1, layers=layers) as sender:
        receiver = Receiver(
            sender.address(0), load=lambda weights: held.update((n, t.clone()) for n, t in weights)
        )
        for _ in range(2):
            pending = sender.send_async()
            receiver.receive(0)
            pending.wait(0)
    return held


# Of one block and of several, with and without a rest.
SIZES = st.sampled_from([1, 2, 127, 128, 129, 300])


@settings(deadline=None, max_examples=25)
@given(
    rows=SIZES,
    columns=SIZES,
    magnitude=st.sampled_from([0.0, 1e-6, 1.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bf16_follows=st.booleans(),
)
def test_values_are_within_a_sixteenth(
    rows: int, columns: int, magnitude: float, dtype: torch.dtype, bf16_follows: bool
) -> None:
    matrix = (torch.randn(rows, columns) * magnitude).to(dtype)
    layers: list[object] = [Float8Blocks("a.weight"), *(["bf16"] if bf16_follows else [])]
    held = sent({"a.weight": matrix, "a.bias": torch.ones(3)}, layers)
    assert held["a.weight"].dtype == torch.float8_e4m3fn
    scales = held["a.weight_scale_inv"].float()
    assert scales.shape == (-(-rows // 128), -(-columns // 128))
    error = (restored(held["a.weight"], scales) - matrix.float()).abs()
    # Below 2 ** -6 of a scale, float8 has a fixed distance between values.
    smallest = restored(torch.full((rows, columns), 2.0**-10), scales)
    assert (error <= torch.maximum(matrix.float().abs() / 16, smallest) * 1.01).all()


def test_a_worker_holds_the_format_and_tied_matrices_stay_tied() -> None:
    source = nn.ModuleDict({n: nn.Linear(130, 200, bias=False) for n in ("a_proj", "b_proj")})
    source["b_proj"].weight = source["a_proj"].weight
    target = {
        "a_proj.weight": torch.zeros(200, 130, dtype=torch.float8_e4m3fn),
        "a_proj.weight_scale_inv": torch.zeros(2, 2),
    }
    target |= {name.replace("a_", "b_"): tensor for name, tensor in target.items()}
    layer = Float8Blocks("*_proj.weight")
    with Sender("shm", source, num_workers=1, layers=[layer]) as sender:
        assert len(sender.address(0).layout.aliases) == 2
        receiver = Receiver(sender.address(0), target)
        pending = sender.send_async()
        receiver.receive(20)
        assert pending.wait().nbytes < 200 * 130 * 1.2
    restored_weight = restored(target["b_proj.weight"], target["b_proj.weight_scale_inv"])
    torch.testing.assert_close(
        restored_weight, source.state_dict()["a_proj.weight"], rtol=1 / 15, atol=1e-5
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("x*",), r"\('x\*',\), matches one of 2 names"),
        (("*",), r"a pattern matches a.bias: .*\[3\]"),
    ],
)
def test_what_is_not_a_matrix_is_refused(names: tuple[str, ...], message: str) -> None:
    source = {"a.weight": torch.ones(3, 3), "a.bias": torch.ones(3)}
    with pytest.raises(ModelError, match=message):
        Sender(Loopback(), source, num_workers=1, layers=[Float8Blocks(*names)])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_an_error(value: float) -> None:
    source = {"a.weight": torch.ones(130, 130), "b.weight": torch.ones(3, 3)}
    with Sender(Loopback(), source, num_workers=1, layers=[Float8Blocks("*")]) as sender:
        source["a.weight"][129, 1] = value
        with pytest.raises(ModelError, match=r"'a.weight' has values that are not finite"):
            sender.send_async()
        source["a.weight"][129, 1] = 1.0
        sender.send_async()


def test_projections_are_what_is_meant_without_patterns() -> None:
    source = {"up_proj.weight": torch.ones(3, 3), "embed.weight": torch.ones(3, 3)}
    held = sent(source, ["fp8"])
    assert {name: tensor.dtype for name, tensor in held.items()} == {
        "up_proj.weight": torch.float8_e4m3fn,
        "up_proj.weight_scale_inv": torch.float32,
        "embed.weight": torch.float32,
    }


class Restored(Float8Blocks):
    """The layer as the conformance suite can take it: workers make floats of what comes."""

    def __init__(self) -> None:
        super().__init__("*")

    def bind(self, context: BindContext) -> Restored:
        del context
        return Restored()

    def _choose(self, update: Update) -> frozenset[str]:
        return frozenset(
            name
            for name, position in update.layout.index.items()
            if (spec := update.layout.specs[position]).dtype.is_floating_point
            and spec.dtype.itemsize > 1
            and len(spec.shape) == 2
            and spec.nbytes
        )

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update, context: ApplyContext) -> Generator[None, bool, bool]:
        assert context.layout is not None
        held = dict(update.items())
        named = {}
        for name, tensor in held.items():
            if f"{name}_scale_inv" in held:
                dtype = context.layout.specs[context.layout.index[name]].dtype
                named[name] = restored(tensor, held[f"{name}_scale_inv"]).to(dtype)
            elif not name.endswith("_scale_inv"):
                named[name] = tensor
        for name, owner in context.layout.aliases:
            named[name] = named[owner]
        update.rename(named)
        return (yield)


class TestFloat8Blocks(LayerConformance):
    layer = Restored()
    tolerance = 1 / 14
