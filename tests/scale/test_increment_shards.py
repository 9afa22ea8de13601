"""Increments of sharded senders: each rank makes those of its part, for each group of workers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from sync_core import OptionError, Receiver, Sender, SendReport
from sync_plugin_scale import Increments, Part, Sharded, join_addresses
from sync_plugin_std.schemes.thread import ThreadScheme

pytestmark = pytest.mark.timeout(100)

ROWS, RANKS = 12, 3
STEP = ROWS // RANKS


class Far(ThreadScheme):
    """As if its workers were elsewhere."""

    capabilities = ThreadScheme.capabilities | {"cross_process"}


def make_whole() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "wide": torch.randn(ROWS, 300).to(torch.bfloat16),
        "bias": torch.randn(ROWS),
    }


def part(whole: dict[str, Tensor], first: int, last: int) -> Part:
    """Some rows, as views of the whole."""
    return Part(
        {name: tensor[first:last] for name, tensor in whole.items()},
        {
            name: [(first, last, ROWS), *((0, n, n) for n in tensor.shape[1:])]
            for name, tensor in whole.items()
        },
    )


@contextmanager
def trainer(whole: dict[str, Tensor], workers: int, **options: Any) -> Iterator[list[Sender]]:
    with ExitStack() as opened:
        yield [
            opened.enter_context(
                Sender(
                    Sharded(Increments(Far()), rank, RANKS),
                    part(whole, rank * STEP, (rank + 1) * STEP),
                    num_workers=workers,
                    timeout=30.0,
                    **options,
                )
            )
            for rank in range(RANKS)
        ]


def connect(senders: Sequence[Sender], worker_id: int, rows: tuple[int, int]) -> Any:
    """A worker that holds some rows of zeros, and those rows."""
    copy = {name: torch.zeros_like(tensor) for name, tensor in make_whole().items()}
    model = part(copy, *rows)
    address = join_addresses([sender.address(worker_id) for sender in senders])
    return Receiver(address, model), model.model, rows


def send(senders: Sequence[Sender], workers: Sequence[Any]) -> list[SendReport]:
    pending = [sender.send_async() for sender in senders]
    for receiver, _, _ in workers:
        assert receiver.receive(20.0) is not None
    return [each.wait() for each in pending]


def check(whole: dict[str, Tensor], workers: Sequence[Any]) -> None:
    for _, copy, (first, last) in workers:
        for name, tensor in copy.items():
            theirs = whole[name][first:last]
            assert torch.equal(tensor.view(torch.uint8), theirs.view(torch.uint8)), name


def test_each_rank_sends_the_changes_of_its_part() -> None:
    whole = make_whole()
    with trainer(whole, workers=3) as senders:
        # Two want the same; the third spans two ranks, and takes rows of each.
        rows = [(0, ROWS), (0, ROWS), (2, 7)]
        workers = [connect(senders, i, rows[i]) for i in range(3)]
        first = send(senders, workers)
        check(whole, workers)
        whole["wide"][1, 5] += 1
        whole["wide"][5, 299] = float("nan")
        whole["bias"][6] = -0.0
        second = send(senders, workers)
        check(whole, workers)
    assert {result.base for report in first for result in report.workers.values()} == {0}
    assert [report.workers[0].base for report in second] == [1, 1, 1]
    assert [report.workers[2].base for report in second[:2]] == [1, 1]
    assert all(b.nbytes < a.nbytes / 3 for a, b in zip(first, second, strict=True))


def test_random_changes_and_workers_that_come_back() -> None:
    numbers, whole = random.Random(3), make_whole()
    for _ in range(2):
        with trainer(whole, workers=2) as senders:
            workers = [connect(senders, i, (0, ROWS)) for i in range(2)]
            for _ in range(8):
                for tensor in whole.values():
                    flat = tensor.view(-1)
                    for _ in range(numbers.choice([0, 1, 5, len(flat)])):
                        flat[numbers.randrange(len(flat))] = numbers.random()
                if numbers.random() < 0.4:
                    # Another process takes the place, and wants other rows.
                    first = numbers.randrange(ROWS - 1)
                    workers[1][0].close()
                    workers[1] = connect(senders, 1, (first, numbers.randrange(first + 1, ROWS)))
                send(senders, workers)
                check(whole, workers)


def test_a_scheme_of_which_increments_are_of_no_use() -> None:
    with pytest.raises(OptionError, match=r"scheme 'thread' .* does not leave this process"):
        Sender(Sharded("increments::thread", 0, 1), make_whole(), num_workers=1)
