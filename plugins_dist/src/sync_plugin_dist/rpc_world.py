"""Query the torch RPC world that this process has joined."""

from __future__ import annotations

from collections.abc import Sequence

# torch has no public list of a world's members.
from torch._C._distributed_rpc import _get_current_rpc_agent
from torch.distributed import rpc

from sync_core import OptionError

__all__ = ["check_initialised", "choose_workers", "initialised", "others"]


def initialised() -> bool:
    """Return whether this process has joined a torch RPC world."""
    try:
        rpc.get_worker_info()
    except RuntimeError:
        return False
    return True


def check_initialised() -> None:
    """Raise `OptionError`, with advice, if this process has not joined a world."""
    if not initialised():
        raise OptionError(
            "torch RPC is not initialised in this process; call "
            'torch.distributed.rpc.init_rpc("trainer", rank=0, world_size=…) here and its like in '
            "each worker first, or use scheme='dist', which needs no RPC"
        )


def others() -> list[str]:
    """Return the names of the world's other members, in the order of their ids."""
    infos = sorted(_get_current_rpc_agent().get_worker_infos(), key=lambda info: info.id)
    own = rpc.get_worker_info().id
    return [info.name for info in infos if info.id != own]


def choose_workers(num_workers: int, names: Sequence[str] | None) -> list[str]:
    """Return the names of the world's members that are workers.

    Args:
        num_workers: the number of workers.
        names: the names of the workers; None for all other members, in the order of their ids.

    Raises:
        OptionError: this process has not joined a world.
        ValueError: the names or the number of workers do not match the world.
    """
    check_initialised()
    there = others()
    chosen = there if names is None else list(names)
    known = ", ".join(map(repr, there)) or "none"
    if strangers := [name for name in chosen if name not in there]:
        raise ValueError(f"no RPC worker {strangers[0]!r} besides this process; there are: {known}")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"names={chosen!r} has a name twice; give each worker once")
    if len(chosen) != num_workers:
        advice = "" if names is not None else ", or names=[…] for some of them"
        raise ValueError(
            f"num_workers is {num_workers}, and the RPC workers are {len(chosen)}: "
            f"{', '.join(map(repr, chosen)) or 'none'}; give num_workers={len(chosen)}{advice}"
        )
    return chosen
