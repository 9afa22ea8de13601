"""Histories of real runs, held against the protocol as a model: docs/spec/protocol.pml.

Random orders of calls are run on a scheme and recorded. For each history, Spin searches the model
for an order of its steps in which the history can have come about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from tests.kit.test_specification import MODELS, needs_spin, search

from sync_plugin_std.history import Event
from sync_plugin_std.workers import choose_group
from sync_testing.schemes import OrderCases, SharedGroup, borrow_pool
from sync_testing.schemes.orders import Fleet
from sync_testing.schemes.worker import Worker

pytestmark = [needs_spin, pytest.mark.timeout(300)]

ALL = {0, 1}


class Traced(Fleet):
    """A fleet that does no more than the model has: every send is for all, and none is refused."""

    histories: ClassVar[list[Sequence[Event]]]
    thorough = False
    send = begin_send = end_what_is_staged = None  # type: ignore[assignment]
    add = remove = interrupt = break_down = kill = None  # type: ignore[assignment]

    @rule()
    @precondition(Fleet.idle)
    def send_to_all(self) -> None:
        if all(map(self.attends, ALL)):
            self.send_to(ALL)

    @rule()
    @precondition(Fleet.idle)
    def begin_send_to_all(self) -> None:
        self.start_send(ALL, None)

    @rule(worker_id=st.sampled_from(sorted(ALL)))
    def commit_late(self, worker_id: int) -> None:
        if worker_id in self.staged:
            self.staged.discard(worker_id)
            self.ask(worker_id, Worker.commit_staged)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.histories.append(self.recorder.events())


def fleet(pool: SharedGroup, **attributes: Any) -> type[Traced]:
    """Return the class of fleets of a scheme, which keeps their histories."""
    cases = type("Cases", (OrderCases,), attributes)()
    return type("Fleet", (Traced,), {"cases": cases, "pool": pool, "histories": []})


def trace(history: Iterable[Event]) -> list[tuple[str, int, int]]:
    """Return the events of a history that the model has: kinds, workers and versions."""
    events = []
    for event in history:
        worker = event.get("worker", 0)
        match event["event"]:
            case "send":
                events.append(("sent", 0, event["version"]))
            case "report":
                events.append(("reported", 0, event["version"]))
            case "receiver":
                events.append(("joined", worker, 0))
            case "commit":
                events.append(("committed", worker, event["version"]))
            case "state":
                kind = "counts" if event["to"] == "current" else "lacks_it"
                events.append((kind, worker, event["wanted"]))
    return events


def explained(folder: Path, history: Iterable[Event]) -> bool:
    """Return whether the model has an order of steps in which a history can have come about."""
    events = trace(history)
    # Each receiver but the first of a worker needs one that has left.
    joined = [worker for kind, worker, _ in events if kind == "joined"]
    written = ""
    for i, (kind, worker, version) in enumerate(events):
        written += f"history[{i}].kind = {kind}; "
        written += f"history[{i}].worker = {worker}; history[{i}].version = {version};\n"
    model = (MODELS / "protocol.pml").read_text()
    model = model.replace("init { atomic {", f"init {{ d_step {{ {written} }} atomic {{")
    versions = sum(kind == "sent" for kind, _, _ in events)
    bounds = {"VERSIONS": versions, "FAULTS": len(joined), "LENGTH": len(events)}
    violated, _ = search(folder, "#define TRACE\n" + model, **bounds)
    assert violated in ("", "rejected")
    return violated == "rejected"


@pytest.fixture(scope="module")
def pool() -> Iterator[SharedGroup]:
    with borrow_pool(choose_group(["thread"], "thread")) as pool:
        yield pool


@pytest.mark.parametrize("scheme", ["thread", "shm", "dist"])
def test_what_a_scheme_does_is_what_the_model_does(
    pool: SharedGroup, tmp_path: Path, scheme: str
) -> None:
    tried = fleet(pool, scheme=scheme)
    run_state_machine_as_test(
        tried,
        settings=settings(
            max_examples=6,
            stateful_step_count=15,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert len(tried.histories) >= 6
    assert all(explained(tmp_path, history) for history in tried.histories)


#: Of mutants, orders of calls that show the mistake.
PLANTED: dict[str, list[tuple[Any, ...]]] = {
    "ConfirmsAtOnce": [("begin_send_to_all",), ("give_up",)],
    "ConfirmsBeforeApplying": [("begin_send_to_all",), ("stage", 0), ("give_up",)],
    "ConfirmsAnotherVersion": [
        *[("begin_send_to_all",), ("stage", 0), ("give_up",)],
        *[("begin_send_to_all",), ("commit_late", 0), ("give_up",)],
    ],
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_a_mutant_does_is_not(
    mutants: Any, pool: SharedGroup, tmp_path: Path, name: str
) -> None:
    mutant = getattr(mutants, name)
    assert explained(tmp_path, history_of(fleet(pool, scheme="thread"), PLANTED[name]))
    broken = fleet(pool, scheme=mutant(), options=mutant.options)
    assert not explained(tmp_path, history_of(broken, PLANTED[name]))


def history_of(tried: type[Traced], steps: Iterable[tuple[Any, ...]]) -> Sequence[Event]:
    """Return the history of some steps, whatever promise they break."""
    one = tried()
    with one.ends:
        one.begin()
        for method, *arguments in steps:
            getattr(one, method)(*arguments)
        return one.recorder.events()
