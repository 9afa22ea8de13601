"""The matrix of faults: what is found in a run, and the page that says so."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from chaos_kit import Case, Outcome, Runner
from chaos_kit.ledger import Ledger
from chaos_kit.page import page_of
from chaos_kit.plan import Plan, Round
from chaos_kit.resources import Resources
from chaos_kit.torn import make_model, read
from chaos_kit.worker import fill

from sync_core import (
    ApplyError,
    CapacityError,
    Receiver,
    Sender,
    SendReport,
    WorkerError,
    WorkerResult,
    WorkerTimeoutError,
)
from sync_plugin_std.workers import ThreadGroup
from sync_testing.faults import InjectedFaultError
from sync_testing.schemes import SharedGroup, Worker

pytestmark = pytest.mark.timeout(60)


def test_a_version_that_was_changed_on_its_way() -> None:
    with Runner("thread") as runner:
        for mode, hurt in (("blocking", 1), ("zero_copy", 3)):
            plan = Plan.of(Case("thread", "corrupt the version", mode, hurt))
            assert plan.proofs == ["checksum"]
            assert not runner.run(plan).complaints


def test_a_model_of_two_versions_is_torn_at_each_read() -> None:
    worker = Worker(0)
    worker.model = make_model()
    with (
        Sender("thread", make_model(), num_workers=1) as sender,
        Receiver(sender.address(0), worker.model) as worker.receiver,
    ):
        assert read(worker, 60.0, 1).torn == 0
        worker.model["tensor2"][-1] = 1.0
        seen = read(worker, 60.0, 1)
        assert seen.torn == seen.reads


def test_a_version_older_than_the_one_before_is_noticed() -> None:
    worker = Worker(0)
    worker.model = make_model()
    sender = Sender("thread", make_model(), num_workers=1)

    def send() -> None:
        with sender:
            for _ in range(3):
                sender.send()

    def go_back(version: int) -> None:
        fill(worker.model, 10.0 - version)

    with (
        Receiver(sender.address(0), worker.model, on_commit=go_back) as worker.receiver,
        ThreadPoolExecutor() as pool,
    ):
        sent = pool.submit(send)
        # Until the sender closes.
        assert read(worker, 60.0, sys.maxsize).backwards == 2
        sent.result()


@pytest.mark.parametrize("error", [WorkerTimeoutError(0, "silent"), ApplyError(0, "refused")])
def test_what_a_silent_worker_was_offered_it_may_take_up_later(error: WorkerError) -> None:
    ledger, silent = Ledger(), isinstance(error, WorkerTimeoutError)
    ledger.round = Round(1, "no descriptors in workers", (0,))
    report = SendReport(1, 0.1, {0: WorkerResult(None, 0.1, 0, error)})
    ledger.compare(report, None, {0: [0.0]})
    ledger.round = Round(2, "raise in send", (0,))
    ledger.compare_nothing_sent(InjectedFaultError("no"), {0: [1.0]})
    assert (not ledger.complaints) is silent


def test_it_may_take_it_up_when_it_cannot_commit_the_next() -> None:
    ledger = Ledger()
    for version, fault, error in [
        (1, "no descriptors in workers", WorkerTimeoutError(0, "silent")),
        (2, "raise in apply", ApplyError(0, "refused")),
        (3, "raise in apply", ApplyError(0, "refused")),
    ]:
        ledger.round = Round(version, fault, (0,))
        report = SendReport(version, 0.1, {0: WorkerResult(None, 0.1, 0, error)})
        ledger.compare(report, None, {0: [version - 1.0]})
    # It has never been owed the second one.
    (complaint,) = ledger.complaints
    assert complaint.detail == "version 3, raise in apply: worker 0 has [2.0], not old"


def test_a_send_may_lack_the_descriptor_of_a_slot() -> None:
    ledger = Ledger()
    ledger.round = Round(1, "no descriptors in the trainer", (0,))
    ledger.compare(None, CapacityError("no descriptor"), {0: [0.0], 1: [1.0]})
    (complaint,) = ledger.complaints
    assert "worker 1 has [1.0], which was not sent" in complaint.detail


@pytest.mark.parametrize("collective", [False, True])
def test_a_trainer_without_descriptors_connects_no_group_anew(collective: bool) -> None:
    ledger = Ledger(collective=collective)
    ledger.round = Round(1, "no descriptors in the trainer", (0,))
    silent = WorkerResult(None, 0.1, 0, WorkerTimeoutError(1, "silent"))
    report = SendReport(1, 0.1, {0: WorkerResult(1, 0.1, 0, None), 1: silent})
    ledger.compare(report, None, {0: [1.0], 1: [0.0]})
    assert (not ledger.complaints) is collective


def test_garbage_is_no_leak() -> None:
    resources = Resources(SharedGroup(ThreadGroup), ())
    assert not [*resources.check(set())]
    cycle: list[Any] = [open(os.devnull)]  # noqa: SIM115 - nobody closes it
    cycle.append(cycle)
    del cycle
    with pytest.warns(ResourceWarning, match="unclosed file"):
        assert not [*resources.check(set())]


def test_the_page_says_where_when_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["chaos.py", "--jobs", "4", "--journal", "/some/place", "--fresh"]
    monkeypatch.setattr("sys.argv", arguments)
    outcomes = [
        Outcome(day, "shm", ("none",), 1.0, day=day) for day in ("2026-01-02", "2026-01-01")
    ]
    reads = {"shm | copy": {"reads": 2000, "torn": 0, "backwards": 0, "versions": 3, "killed": 0}}
    page = page_of(outcomes, reads)
    assert "Made on 2026-01-01 to 2026-01-02 by `make chaos ARGS='--jobs 4'` on " in page
    assert f"{os.cpu_count()} cores" in page
    assert "| shm | none | 2 | 0 | 0 | 0 | 0 | 0 |" in page
    assert "| shm | copy | 2,000 | 0 | 0 | 3 | 0 |" in page


def test_each_worker_holds_on_to_a_version_of_its_own() -> None:
    faults = [("none", ()), ("raise in apply", (0,)), ("raise in apply", (0, 1)), ("none", ())]
    with Runner("thread") as runner:
        plan = Plan.make("three versions", "thread", "zero_copy", faults)
        assert not runner.run(plan).complaints
