"""The layer `Float8Blocks`: matrices in eight bits, with a scale for each block."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor
from torch.nn.functional import pad

from sync_core import BindContext, Layout, ModelError, Update, hookimpl
from sync_plugin_std.layers.regrouping import check_matches, compiled

BLOCK = 128
_PROJECTIONS = "*_proj.weight"
_WIRE = torch.float8_e4m3fn
_MAX = torch.finfo(_WIRE).max


class Float8Blocks:
    """Sends matrices as float8 (e4m3), and a scale for each block of 128 x 128 elements.

    The format is that of DeepSeek-V3's checkpoints, which engines load with
    ``weight_block_size: [128, 128]``: beside ``weight`` there is ``weight_scale_inv``, a float32
    matrix with the scale of each block, and ``weight.float()`` times the scale of its block is the
    trainer's value, to within a sixteenth. Scales are exact in bfloat16, so that the layer ``bf16``
    may follow for the other tensors. It stays with the sender. Fuse before it, not after. Also
    named ``fp8``.

    Args:
        names: patterns of the names of matrices; ``*`` stands for anything. None given stands for
            ``"*_proj.weight"``, the projections of attention and of MLPs: engines leave embeddings,
            heads, routers and norms as they are.

    Example:
        >>> from sync_core import Sender
        >>> model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(256, 128, bias=False)})
        >>> with Sender("thread", model, num_workers=1, layers=["fp8"]) as sender:
        ...     [str(spec) for spec in sender.address(0).layout.specs]
        ['up_proj.weight: float8_e4m3fn[128, 256]', 'up_proj.weight_scale_inv: float32[1, 2]']
    """

    def __init__(self, *names: str) -> None:
        self._names = names or (_PROJECTIONS,)
        self._patterns = {name: compiled(name) for name in self._names}
        self._known: tuple[Layout, frozenset[str], Layout] | None = None

    def bind(self, context: BindContext) -> Float8Blocks:
        """Return a layer with its own plan, for one sender."""
        del context
        return Float8Blocks(*self._names)

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        """Quantise the matrices.

        Raises:
            ModelError: a pattern matches nothing, or a tensor that one matches is not a matrix of
                floating-point numbers, or has a value that is not finite.
        """
        update = yield
        tensors, names = update.tensors, update.layout.index
        if self._known is None or self._known[0] is not update.layout:
            chosen = self._choose(update)
        else:
            chosen = self._known[1]
        # Tied matrices are quantised once, and stay tied.
        made = {position: _quantise(tensors[position]) for position in {names[n] for n in chosen}}
        for position, (_, scales) in made.items():
            # Not one value of such a block would arrive.
            if not scales.isfinite().all():
                raise ModelError(
                    f"{update.layout.specs[position].name!r} has values that are not finite, for "
                    "which the layer Float8Blocks has no scale; look for the step that made them"
                )
        sent: dict[str, Tensor] = {}
        for name, position in names.items():
            if name in chosen:
                sent[name], sent[f"{name}_scale_inv"] = made[position]
            else:
                sent[name] = tensors[position]
        if self._known is None or self._known[0] is not update.layout:
            self._known = update.layout, chosen, Layout.of(sent)
        layout = self._known[2]
        update.become(layout, [sent[spec.name] for spec in layout.specs])
        return update

    def _choose(self, update: Update) -> frozenset[str]:
        index = update.layout.index
        chosen = frozenset(
            name for name in index if any(p.fullmatch(name) for p in self._patterns.values())
        )
        if self._known is None or not chosen:
            check_matches(self, self._patterns, update.layout.names)
        for name in sorted(chosen):
            spec = update.layout.specs[index[name]]
            if len(spec.shape) != 2 or not spec.dtype.is_floating_point:
                raise ModelError(
                    f"the layer Float8Blocks quantises matrices of floating-point numbers, and a "
                    f"pattern matches {spec}; name others"
                )
        return chosen


def _quantise(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix in float8, and the scales of its blocks."""
    rows, columns = tensor.shape
    padded = pad(tensor.detach().float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = (blocks.abs().amax(dim=(1, 3)) / _MAX).bfloat16().float()
    scales[scales == 0] = 1.0
    scaled = (blocks / scales[:, None, :, None]).clamp_(-_MAX, _MAX)
    return scaled.view(padded.shape)[:rows, :columns].to(_WIRE), scales
