"""A checkpoint of a tiny model, with its tokenizer, which verl loads in place of a large one."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import transformers

__all__ = ["save_tiny_model"]


def save_tiny_model(folder: Path) -> None:
    """Write the checkpoint."""
    config = transformers.Qwen3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    transformers.Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="a", eos_token="b"
    ).save_pretrained(folder)
