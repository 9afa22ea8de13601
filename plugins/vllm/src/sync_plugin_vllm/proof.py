"""Prove that vLLM's layers compute with the weights that were sent.

A layer packs its weight for its kernel, so the kernel may not read the tensor that the model names.
For an input of zeros and one 1.0, a layer returns a column of the weight that its kernel reads,
without rounding. `Proof` keeps some columns of the sent weights, and compares them bit by bit with
the layers' outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from sync_core import Layout, OptionError, SyncError
from sync_plugin_vllm.adapter_model import base_names, read_sample
from sync_plugin_vllm.names import FusedNames, without_lora

#: The number of columns compared per weight, one in each sixteenth, so that each of up to 16
#: tensor-parallel ranks has some. One optimiser step changes numbers in every column.
_COLUMNS = 16
_SHOWN = 8


def check_provable(model: Any, quantization: str | None) -> None:
    """Raise unless `Proof` covers every layer of a model.

    Raises:
        OptionError: a layer is not covered; the message says why.
    """
    reason = ""
    if quantization is not None:
        reason = f"layers that are quantized ({quantization}), as they round"
    elif any(hasattr(layer, "w13_weight") for layer in model.modules()):
        reason = "experts, whose output is not linear in one weight"
    if reason:
        raise OptionError(
            f"verify=True does not cover {reason}, and vLLM's {type(model).__name__} has them; "
            "type VllmTarget(…) without verify"
        )


class Proof:
    """Compares columns of one version's weights with the outputs of layers.

    Args:
        model: vLLM's model.
        rank: this process's rank among those that share each layer, and their number.
        turn: a number that chooses the columns.
        columns: the number of columns to compare per weight.
    """

    def __init__(
        self, model: Any, rank: tuple[int, int], turn: int, columns: int = _COLUMNS
    ) -> None:
        self._model = model
        names = dict(model.named_parameters(remove_duplicate=False))
        self._names = {without_lora(name) for name in names}
        self._rank, self._ranks = rank
        self._turn = turn
        self._count = columns
        self._fused = FusedNames(model)
        #: By vLLM's name of a tensor: its samples, by the names that were sent.
        self._samples: dict[str, dict[str, Tensor]] = {}

    def sample(self, name: str, tensor: Tensor) -> None:
        """Keep some columns of a sent weight, or a whole vector."""
        if tensor.dim() > 1:
            tensor = tensor[..., self._columns(tensor.shape[-1]).to(tensor.device)]
        self.add(name, tensor.clone())

    def add(self, name: str, sample: Tensor) -> None:
        """Add a sample that was taken elsewhere."""
        owner = next((found for found in self._fused.owners(name) if found in self._names), None)
        if owner is not None:
            self._samples.setdefault(owner, {})[name] = sample

    def check(self) -> None:
        """Compare the samples with the outputs of the layers.

        Raises:
            SyncError: layers compute with other weights; the message names them.
        """
        if wrong := self.differing():
            raise SyncError(
                f"vLLM's {type(self._model).__name__} does not compute with what was sent, in "
                f"{wrong}. If the loader of this model scales or transposes weights, which "
                "verify=True does not know, type VllmTarget(…) without verify"
            )

    def differing(self) -> str:
        """Return the names of tensors that differ from their samples, or some of them if many."""
        wrong = []
        first: dict[int, str] = {}
        for path, layer in self._model.named_modules():
            for leaf, parameter in layer.named_parameters(recurse=False):
                own = without_lora(f"{path}.{leaf}")
                name = first.setdefault(id(parameter), own)
                parts = self._samples.get(own) or self._samples.get(name)
                if parts is not None and not self._agrees(layer, leaf, parameter, name, parts):
                    wrong.append(own)
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        return ", ".join(map(repr, wrong[:_SHOWN])) + more

    def _agrees(
        self, layer: Any, leaf: str, parameter: Tensor, name: str, parts: dict[str, Tensor]
    ) -> bool:
        order = self._fused.parts(name)
        sent = [parts[part] for part in order if part in parts] or list(parts.values())
        if sent[0].dim() == 1:
            return _equal(parameter.data, self._expected(layer, sent, parameter.shape[0]))
        if sent[0].dim() != 2 or leaf != "weight":
            return _equal(parameter.data[..., self._columns(parameter.shape[-1])], sent[0])
        if not isinstance(layer, LinearBase | ParallelLMHead):
            rows = self._expected(layer, sent, parameter.shape[0])
            return _equal(parameter.data[: len(rows), self._columns(parameter.shape[1])], rows)
        return self._computes(layer, sent)

    def _computes(self, layer: Any, sent: Sequence[Tensor]) -> bool:
        """Compare columns with the output of a layer."""
        if isinstance(layer, LinearBase):
            size = layer.input_size
            rank_size = getattr(layer, "input_size_per_partition", size)
            outputs = sum(getattr(layer, "output_partition_sizes", [layer.output_size]))
        else:
            rank_size = size = layer.embedding_dim
            outputs = layer.num_embeddings_per_partition
        columns = self._columns(size)
        start = layer.tp_rank * rank_size if rank_size < size else 0
        here = (columns >= start) & (columns < start + rank_size)
        expected = self._expected(layer, sent, outputs)
        if expected.shape[1] != len(columns):
            return False
        if not here.any():
            # Other ranks hold all sampled columns. Skip the call, since an empty input crashes some
            # kernels, such as vLLM's for AMX (SIGFPE).
            return True
        device = self._device
        ones = torch.zeros(int(here.sum()), rank_size, dtype=layer.params_dtype, device=device)
        ones[torch.arange(len(ones), device="cpu"), columns[here] - start] = 1.0
        computed = layer.quant_method.apply(layer, ones, None)
        expected = expected[:, here.to(expected.device)]
        return _equal(computed.T[: len(expected)], expected.to(layer.params_dtype))

    def _expected(self, layer: Any, sent: Sequence[Tensor], rows: int) -> Tensor:
        """Return this rank's rows of the sent weights, in the order of vLLM's fused tensor."""
        if isinstance(layer, VocabParallelEmbedding):
            first = layer.tp_rank * rows
            return sent[0][first : first + rows]
        rank = getattr(layer, "tp_rank", self._rank)
        ranks = getattr(layer, "tp_size", self._ranks)
        sizes = getattr(layer, "output_partition_sizes", [rows])
        if len(sizes) != len(sent):
            sizes = [rows]
            sent = [torch.cat(list(sent))]
        held = []
        for part, size in zip(sent, sizes, strict=True):
            # With more ranks than heads of keys and values, several ranks hold the same head.
            copies = max(1, size * ranks // len(part))
            first = rank // copies * size
            held.append(part[first : first + size])
        return torch.cat(held)

    def _columns(self, size: int) -> Tensor:
        count = min(size, self._count)
        return torch.arange(count, device="cpu") * size // count + self._turn % (size // count)

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self._model.parameters()).device
        return device


def check_base(
    model: Any, rank: tuple[int, int], layout: Layout, samples: Mapping[str, Any]
) -> None:
    """Raise unless layers compute with the base model of a trainer's adapter.

    Args:
        model: vLLM's model.
        rank: see `Proof`.
        layout: the layout of the trainer's PEFT model.
        samples: the `sync_plugin_vllm.adapter_model.base_samples` of its base model.
    """
    proof = Proof(model, rank, turn=0, columns=1)
    dimensions = {
        own: len(layout.specs[layout.index[name]].shape)
        for name, own in base_names(layout.names).items()
    }
    for name, (dtype, data) in samples.items():
        sample = read_sample(dtype, data)
        proof.add(name, sample if dimensions[name] == 1 else sample[:, None])
    if wrong := proof.differing():
        raise SyncError(
            f"the engine's base model is not the one of the trainer's adapter, in {wrong}; "
            "start the engine with the checkpoint that the trainer began with"
        )


def _equal(computed: Tensor, sent: Tensor) -> bool:
    """Return whether the numbers are equal after rounding the sent ones as the loader does."""
    if computed.shape != sent.shape:
        return False
    sent = sent.to(computed.device)
    if computed.dtype not in (sent.dtype, torch.float32):
        sent = sent.to(computed.dtype)
    return bool(((computed == sent) | (computed.isnan() & sent.isnan())).all())
