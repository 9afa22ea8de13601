"""What modules save beside parameters, buffers and extra state: tensors, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import unwrap
from typing import Any

from torch import Tensor, nn

from sync_core.errors import ModelError
from sync_core.models.extra_state import is_extra_state


def check_saved(model: nn.Module) -> None:
    """Raise `ModelError` where a submodule has state that is in no tensor.

    Asked are those that save more than `nn.Module` does, and not the model's `state_dict`, whose
    hooks may gather what is spread over processes.
    """
    for name, module in model.named_modules():
        # Ray wraps the methods of the classes of actors, which may be modules.
        if unwrap(type(module)._save_to_state_dict) is not nn.Module._save_to_state_dict:
            prefix = f"{name}." if name else ""
            # By position, and into a dict with an order and metadata, as torch calls it.
            saved = nn.Module().state_dict(prefix=prefix)
            module._save_to_state_dict(saved, prefix, True)
            check_tensors({k: value for k, value in saved.items() if not is_extra_state(k)})


def check_tensors(state: Mapping[str, Any]) -> None:
    """Raise `ModelError` for what is no tensor in the `state_dict` of a module."""
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"{name!r} is a {type(value).__name__}, which the module's state_dict holds as "
                "those of quantized modules do, and only tensors travel: send the module as it "
                "was before it was quantized, and let each worker quantize a copy; or let a "
                "module of your own save tensors"
            )
