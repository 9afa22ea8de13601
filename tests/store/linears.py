"""Models whose values say which version they hold."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn


def model(value: float = 0.0, size: int = 64) -> nn.Linear:
    made = nn.Linear(size, size)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


def fill(given: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in given.parameters():
            parameter.fill_(value)


def values(given: nn.Module) -> set[float]:
    return {value for p in given.parameters() for value in p.detach().flatten().tolist()}


def files(directory: Path) -> set[str]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)) for path in paths}


def tamper(path: Path, how: str) -> None:
    """Change a file as faults and attackers do."""
    data = bytearray(path.read_bytes())
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[:-1])
    elif how == "longer":
        path.write_bytes(bytes(data) + b"x")
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
