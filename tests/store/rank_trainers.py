"""Trainers of several ranks, in threads or as processes.

Each rank holds rows of ``weight``; all hold ``bias``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sync_core import Receiver, Sender, SendReport
from sync_core.models import Region
from sync_plugin_scale import Part, Sharded
from sync_plugin_store.objects import Directory

ROWS, COLUMNS = 64, 32


def rows_of(rank: int, size: int) -> Region:
    step = -(-ROWS // size)
    return ((min(rank * step, ROWS), min((rank + 1) * step, ROWS)), (0, COLUMNS))


def weights(version: float) -> dict[str, Tensor]:
    """The whole model at a version."""
    weight = torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS) + 10_000 * version
    return {"weight": weight, "bias": torch.full((5,), float(version))}


def shard(version: float, rank: int, size: int) -> dict[str, Tensor]:
    """The part of it that a rank holds."""
    whole = weights(version)
    (first, last), _ = rows_of(rank, size)
    return {"weight": whole["weight"][first:last].clone(), "bias": whole["bias"]}


def blank() -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}


def part(region: Region) -> Part:
    shape = [stop - start for start, stop in region]
    return Part({"weight": torch.zeros(shape), "bias": torch.zeros(5)}, {"weight": region})


def check(model: Any, values: float, region: Region | None = None) -> None:
    """Compare a model, or a region of it, with the whole model at a version."""
    expected = weights(values)
    if region is not None:
        expected["weight"] = expected["weight"][tuple(slice(*bounds) for bounds in region)]
    for name, tensor in expected.items():
        assert torch.equal(model[name], tensor), name


def check_read(address: Any, version: int, values: float) -> None:
    """Let a new reader read a version, and compare it."""
    model = blank()
    with Receiver(address, model) as reader:
        assert reader.receive(20.0) == version
    check(model, values)


def published(outcomes: Sequence[SendReport | BaseException], version: int) -> None:
    """Assert that each rank has published a version."""
    for outcome in outcomes:
        assert isinstance(outcome, SendReport), outcome
        assert outcome.version == version


def parts(directory: Path) -> list[Path]:
    """The records of parts of versions."""
    return [p for p in (directory / "run" / "parts").iterdir() if p.name.count("-") == 2]


def rank_sender(directory: Path, rank: int, size: int, **options: Any) -> Sender:
    """The sender of one rank."""
    (first, last), columns = rows_of(rank, size)
    regions = {"weight": ((first, last, ROWS), (*columns, COLUMNS))}
    given = {"url": str(directory / "run"), "key": str(directory / "key.pem"), "timeout": 30.0}
    return Sender(
        Sharded("store", rank, size, regions=regions),
        shard(0, rank, size),
        **{**given, **options},
    )


def transport_of(sender: Sender) -> Any:
    """The transport of a rank."""
    return sender._pipeline.opened


def leave_part(sender: Sender, rank: int, size: int, values: float) -> None:
    """Write the next version's part of a rank, and no more, as a rank that is killed then."""
    transport = transport_of(sender)
    write = transport._write_part

    def write_and_leave(*arguments: Any) -> None:
        write(*arguments)
        raise InterruptedError

    transport._write_part, transport._withdraw = write_and_leave, lambda version: None
    with suppress(InterruptedError):
        sender.send(shard(values, rank, size))
    del transport._write_part, transport._withdraw


class Trainer:
    """The senders of all ranks, in threads.

    Args:
        senders: in the order of the ranks.
    """

    def __init__(self, senders: list[Sender]) -> None:
        self.senders = senders
        self.size = len(senders)

    def send(self, values: float, **arguments: Any) -> list[SendReport | BaseException]:
        """Send a version from all ranks at once; return the reports, or what was raised."""
        return self.send_from(range(self.size), values, **arguments)

    def send_from(
        self, ranks: Any, values: float, **arguments: Any
    ) -> list[SendReport | BaseException]:
        """Send a version from some of the ranks."""

        def send(rank: int) -> SendReport | BaseException:
            try:
                return self.senders[rank].send(shard(values, rank, self.size), **arguments)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(send, ranks))


@contextmanager
def senders_of(
    directory: Path, held: Sequence[dict[str, Tensor]], regions: Any = (), **options: Any
) -> Iterator[list[Sender]]:
    """Make the senders of ranks that hold any tensors."""
    given = {"url": str(directory / "run"), "key": str(directory / "key.pem"), "timeout": 30.0}
    with ExitStack() as ends:
        yield [
            ends.enter_context(
                Sender(
                    Sharded("store", rank, len(held), regions=regions[rank] if regions else None),
                    tensors,
                    **{**given, **options},
                )
            )
            for rank, tensors in enumerate(held)
        ]


def send_all(senders: Sequence[Sender]) -> list[SendReport | BaseException]:
    """Send from all ranks at once; return the reports, or what was raised."""
    with ThreadPoolExecutor(len(senders)) as pool:
        pending = [pool.submit(sender.send) for sender in senders]
        return [each.exception(60.0) or each.result() for each in pending]


@contextmanager
def trainer(directory: Path, size: int = 2, **options: Any) -> Iterator[Trainer]:
    """Make the senders of all ranks."""
    with ExitStack() as ends:
        yield Trainer(
            [
                ends.enter_context(rank_sender(directory, rank, size, **options))
                for rank in range(size)
            ]
        )


def run_rank(directory: Path, rank: int, size: int, dies_at: str, timeout: float) -> None:
    """Send two versions from a rank in a process, and write down the results.

    Args:
        directory: with the run.
        rank: the rank.
        size: the number of ranks.
        dies_at: the objects of the second version that it does not write; "" for none.
        timeout: after the first version.
    """
    put, sending = Directory.put, 0

    def dying(self: Directory, name: str, data: bytes | memoryview) -> None:
        if dies_at and sending == 2 and name.startswith(dies_at):
            os._exit(9)
        put(self, name, data)

    Directory.put = dying  # type: ignore[method-assign]
    # The processes need not start at the same time.
    with (
        (directory / f"{rank}.log").open("w", buffering=1) as log,
        rank_sender(directory, rank, size, timeout=90.0) as sender,
    ):
        for sending in (1, 2):
            try:
                report = sender.send(shard(sending, rank, size))
            except Exception as error:
                log.write(f"version {sending}: {type(error).__name__}: {error}\n")
            else:
                log.write(f"version {report.version} is published\n")
            transport_of(sender)._timeout = timeout
