"""The random state of a process: of torch, numpy and random."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_process(seed: int) -> None:
    """Seed the random state of this process."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (environments and policies may still draw from it)
    random.seed(seed)


def random_state() -> dict[str, Any]:
    """The random state of this process, to continue from later."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,
        "numpy": np.random.get_state(),  # noqa: NPY002
        "random": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Go on from a random state."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["random"])
