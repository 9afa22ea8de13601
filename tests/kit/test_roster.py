"""Planted mistakes in the roster, each of which the random orders of its test find."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from tests.core.test_roster import run

from sync_core.transports import Roster

#: For each mistake, a part of a line and its replacement.
MISTAKES = {
    "to all, where some have been addressed": ("deliveries.keys() >= self._workers.keys()", "True"),
    "never to all": ("deliveries.keys() >= self._workers.keys()", "False"),
    "to all by the number of workers": (
        "deliveries.keys() >= self._workers.keys()",
        "len(deliveries) >= len(self._workers)",
    ),
    "to all only where exactly these are addressed": (
        "deliveries.keys() >= self._workers.keys()",
        "deliveries.keys() == self._workers.keys()",
    ),
    "a removed worker is waited for": (
        "delivery.fail(WorkerError(worker_id, reason))",
        "pass",
    ),
    "a lost worker is waited for": ("if worker.lost is not None:", "if False:"),
    "a version is kept after the close": ("if not self._closed and deliveries", "if deliveries"),
    "the version before is still owed": (
        "worker.owed, worker.delivery = publication, delivery",
        "worker.delivery = delivery",
    ),
    "the delivery before is still awaited": (
        "worker.owed, worker.delivery = publication, delivery",
        "worker.owed = publication",
    ),
    "a withdrawn version is given to new workers": (
        "if self._owed_to_new is publication:",
        "if False:",
    ),
    "a withdrawn version is still owed": ("if worker.owed is publication:", "if False:"),
    "every version is withdrawn": ("if worker.owed is publication:", "if True:"),
    "workers are owed nothing again": ("owed = before or {}", "owed: dict = {}"),
    "a new worker is owed what the one before was": (
        "worker_id if worker.delivery else None",
        "worker_id",
    ),
    "a version that was not offered is awaited": ("if before is None else None", ""),
    "a withdrawn version is not awaited": (
        "worker.delivery if before is None else None",
        "None",
    ),
    "a version is wanted again": ("owed.version <= after", "owed.version < after"),
    "only the next version is wanted": (
        "owed.version <= after",
        "owed.version != after + 1 and after",
    ),
    "what new workers want is not kept": ("if besides is None or rest:", "if False:"),
    "what new workers want is kept for no worker": ("if besides is None or rest:", "if True:"),
    "a worker that has answered is awaited": (" and not worker.delivery.ended", ""),
    "a worker that has not answered is not awaited": (" and not worker.delivery.ended", " and 0"),
    "a receiver that has connected is not reported": (
        'self._notify(worker_id, Notice("connected"))',
        "pass",
    ),
    "a receiver does not replace the one before": (
        "worker.reader, worker.lost = reader, None",
        "worker.reader = worker.reader or reader; worker.lost = None",
    ),
    "a worker that is back counts as lost": (
        "worker.reader, worker.lost = reader, None",
        "worker.reader = reader",
    ),
    "a receiver that was replaced is still served": (
        'if worker.reader != reader:\n                return "another',
        'if False:\n                return "another',
    ),
    "a receiver of a removed worker is still served": (
        "if worker is None or worker.reader is None:",
        "if worker is None:",
    ),
    "an answer of any receiver counts": (
        "worker is not None and reader in (None, worker.reader)",
        "True",
    ),
    "an answer about any version counts": ("worker.delivery.version == answer.version", "True"),
    "an answer about a newer version counts": (
        "worker.delivery.version == answer.version",
        "worker.delivery.version <= answer.version",
    ),
    "what is owed after an answer is not said": ("owed.version <= answer.version", "True"),
    "what was answered is owed": ("owed.version <= answer.version", "False"),
    "a late commit is not reported": ("elif answer.error is None:", "elif False:"),
    "a failure is reported as a commit": ("elif answer.error is None:", "else:"),
    "the result of a call does not count": (
        "reader in (None, worker.reader)",
        "reader == worker.reader",
    ),
    "a delivery that has failed is waited for": ("worker.delivery.fail(error)", "pass"),
    "a failure ends the delivery of another version": (
        "worker.delivery.version == version:",
        "True:",
    ),
    "a loss without a version is not reported": (
        'self._notify(worker_id, Notice("lost", reason=error.message))',
        "pass",
    ),
    "any failure without a delivery is reported as a loss": (
        "elif isinstance(error, WorkerLostError):",
        "else:",
    ),
    "a receiver that does not connect is forgotten": (
        "_owed_to_new, reader=reader",
        "_owed_to_new",
    ),
    "a loss is reported twice": (" or worker.lost is not None:", ":"),
    "a loss is not remembered": ("worker.lost = reason", "pass"),
    "a loss is not reported": ('self._notify(worker_id, Notice("lost", reason=reason))', "pass"),
    "an unanswered delivery outlives the loss of its worker": (
        "worker.delivery.fail(WorkerLostError(worker_id, reason))",
        "pass",
    ),
    "a worker that may be back counts as lost": ("self._workers[worker_id].lost = None", "pass"),
    "a remark is forgotten": ("worker.delivery.remark = remark", "pass"),
    "a new worker is owed nothing": ("_Worker(self._owed_to_new, reader", "_Worker(reader"),
    "a removed worker stays": (
        "self._workers.pop(worker_id, None)",
        "self._workers.get(worker_id)",
    ),
    "an unanswered delivery outlives the removal of its worker": (
        "worker.delivery.fail(WorkerError(worker_id, self.REMOVED))",
        "pass",
    ),
    "an unanswered delivery outlives the sender": (
        "worker.delivery.fail(WorkerError(worker_id, self.CLOSED))",
        "pass",
    ),
    "workers stay after the end": (
        "workers, self._workers = self._workers, {}",
        "workers = self._workers",
    ),
    "a version stays after the end": (
        "self._owed_to_new = None\n            for worker_id, worker in workers",
        "for worker_id, worker in workers",
    ),
}
_CASES = 50_000


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str) -> None:
    with pytest.raises(AssertionError, match="in the order of seed"):
        run(_with(*MISTAKES[mistake]), _CASES)


@pytest.mark.timeout(400)  # 20 s where nothing else runs
def test_every_order_of_a_hundred_thousand_keeps_the_promises() -> None:
    run(Roster, 100_000)


def _with(line: str, mistake: str) -> Callable[..., Roster]:
    module = inspect.getmodule(Roster)
    assert module is not None
    source = inspect.getsource(module)
    assert source.count(line) == 1, f"{source.count(line)} lines are {line!r}"
    changed = ModuleType("changed_roster")
    changed.__package__ = module.__package__
    # Dataclasses look for their module.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "changed_roster", changed)
        exec(compile(source.replace(line, mistake), "changed_roster", "exec"), changed.__dict__)
    made: Callable[..., Roster] = changed.Roster
    return made
