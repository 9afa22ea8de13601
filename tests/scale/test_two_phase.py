"""Versions that all workers of a send commit, or none."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Self

import pytest
import torch

from sync_core import (
    Answer,
    CapacityError,
    LayoutMismatchError,
    OptionError,
    Receiver,
    Sender,
    SendError,
    SendReport,
    SyncError,
    WorkerState,
    WorkerTimeoutError,
)
from sync_plugin_scale import AbortedError, Sharded, TwoPhase
from sync_plugin_scale.resending import AGAIN
from sync_plugin_scale.two_phase import sender as two_phase_sender
from sync_testing.worker_groups import eventually

pytestmark = pytest.mark.timeout(60)


def weights(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"a": torch.full((500,), value), "b": torch.full((300,), value)}


class Fleet:
    """A sender, and receivers in this process, each with a model."""

    def __init__(self, scheme: Any, count: int, **options: Any) -> None:
        self.model = weights()
        self.sender = Sender(scheme, self.model, num_workers=count, **options)
        self.models: dict[int, dict[str, torch.Tensor]] = {}
        self.receivers: dict[int, Receiver] = {}
        #: By version, the workers that have committed it.
        self.committed: defaultdict[int, set[int]] = defaultdict(set)
        self.threads = ThreadPoolExecutor(8)
        for worker_id in range(count):
            self.connect(worker_id)

    def connect(self, worker_id: int, **options: Any) -> None:
        """Make a receiver, in place of the worker's last one."""
        if worker_id in self.receivers:
            self.receivers[worker_id].close()
        self.models[worker_id] = weights()
        self.receivers[worker_id] = Receiver(
            self.sender.address(worker_id),
            self.models[worker_id],
            on_commit=partial(self._note, worker_id),
            **options,
        )

    def remove(self, worker_id: int) -> None:
        """Remove a worker."""
        self.sender.remove_worker(worker_id)
        self.receivers.pop(worker_id).close()
        self.models.pop(worker_id)

    def receive(self, worker_id: int, timeout: float = 20.0) -> Future[int | None]:
        """Let a worker receive, in a thread."""
        return self.threads.submit(self.receivers[worker_id].receive, timeout)

    def send(
        self,
        *receiving: int,
        only: list[int] | None = None,
        give_up: bool = False,
        timeout: float | None = None,
        meanwhile: Callable[[], object] = int,
    ) -> SendReport:
        """Send the next version, which has its number as values, while some workers receive.

        With ``give_up`` it is given up as soon as these workers have staged it. ``meanwhile`` is
        called before they receive.
        """
        self.fill(self.sender.version + 1)
        pending = self.sender.send_async(worker_ids=only, timeout=timeout)
        meanwhile()
        ended = threading.Event()
        calls = [self.threads.submit(self._serve, i, ended) for i in receiving]
        try:
            if give_up:
                transport: Any = self.sender._pipeline.transport
                assert eventually(lambda: transport._round.staged >= set(receiving), 30.0)
            return pending.wait(0.0 if give_up else None)
        except SendError as failure:
            return failure.report
        finally:
            ended.set()
            for call in calls:
                call.result(30)

    def fill(self, value: float) -> None:
        """Give the trainer's model other weights."""
        for tensor in self.model.values():
            tensor.fill_(value)

    def _serve(self, worker_id: int, ended: threading.Event) -> None:
        while not ended.is_set():
            self.receivers[worker_id].receive(0.05)

    def values(self) -> dict[int, set[float]]:
        return {
            worker_id: {float(x) for tensor in model.values() for x in tensor.unique()}
            for worker_id, model in self.models.items()
        }

    def close(self) -> None:
        self.threads.shutdown()
        for receiver in self.receivers.values():
            receiver.close()
        self.sender.close()

    def _note(self, worker_id: int, version: int) -> None:
        self.committed[version].add(worker_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@pytest.fixture(params=["thread", "increments::shm"])
def scheme(request: pytest.FixtureRequest) -> TwoPhase:
    return TwoPhase(request.param)


def test_none_commits_what_one_does_not_stage(scheme: TwoPhase) -> None:
    with Fleet(scheme, 3) as fleet:
        report = fleet.send(0, 1, give_up=True)
        errors = {i: result.error for i, result in report.workers.items()}
        assert report.updated == ()
        assert isinstance(errors[2], WorkerTimeoutError)
        for worker_id in (0, 1):
            assert isinstance(errors[worker_id], AbortedError)
            assert "worker 2 did not stage it in time" in str(errors[worker_id])
        assert fleet.values() == {0: {0.0}, 1: {0.0}, 2: {0.0}}
        # Neither does the late one.
        assert fleet.receivers[2].receive(0.2) is None
        assert fleet.send(0, 1, 2).updated == (0, 1, 2)
        assert fleet.values() == {0: {2.0}, 1: {2.0}, 2: {2.0}}


def test_none_commits_before_all_have_staged(scheme: TwoPhase) -> None:
    with Fleet(scheme, 2) as fleet:
        pending = fleet.sender.send_async()
        first = fleet.receive(0)
        assert fleet.receivers[1].receive(0) is None  # it only looks
        assert not first.done()
        assert fleet.receive(1).result() == 1
        assert first.result() == 1
        assert pending.wait().updated == (0, 1)


def test_a_model_that_does_not_fit_aborts_the_version() -> None:
    with Fleet("two_phase::thread", 2, timeout=10.0) as fleet:
        pending = fleet.sender.send_async()
        call = fleet.receive(1, 0.5)
        with pytest.raises(LayoutMismatchError):
            Receiver(fleet.sender.address(0), {"a": torch.zeros(1)})
        with pytest.raises(SendError, match="LayoutMismatchError") as failure:
            pending.wait()
        assert isinstance(failure.value.report.workers[1].error, AbortedError)
        assert call.result() is None


@pytest.mark.parametrize("remedy", ["drop", "quarantine"])
def test_a_worker_is_left_out_and_the_others_commit(remedy: str) -> None:
    scheme = TwoPhase("thread", failed="leave_out")
    with Fleet(scheme, 3, on_failure=remedy) as fleet:
        report = fleet.send(0, 1, timeout=2.0)
        assert (report.updated, report.failed) == ((0, 1), {})
        assert (report.dropped, report.quarantined)[remedy == "quarantine"] == (2,)
        assert fleet.values() == {0: {1.0}, 1: {1.0}, 2: {0.0}}
        # It is not waited for.
        assert fleet.send(0, 1).updated == (0, 1)
        if remedy == "quarantine":
            assert fleet.receivers[2].receive(5.0) == 2
            assert eventually(lambda: fleet.sender.workers[2].state is WorkerState.CURRENT, 20)


def test_a_worker_in_quarantine_stops_no_version() -> None:
    with Fleet("two_phase::thread", 2, on_failure="quarantine") as fleet:
        assert isinstance(fleet.send(0, give_up=True).workers[0].error, AbortedError)
        assert fleet.send(0).updated == (0,)
        assert fleet.values() == {0: {2.0}, 1: {0.0}}


def test_a_worker_that_is_removed_is_not_waited_for(scheme: TwoPhase) -> None:
    with Fleet(scheme, 2) as fleet:
        pending = fleet.sender.send_async()
        call = fleet.receive(0)
        fleet.sender.remove_worker(1)
        assert call.result() == 1
        with pytest.raises(SendError, match="was removed") as failure:
            pending.wait()
        assert failure.value.report.updated == (0,)


@pytest.mark.parametrize("who", ["a late worker", "another receiver"])
def test_a_send_reaches_who_came_right_before_it(who: str) -> None:
    with Fleet("two_phase::thread", 2) as fleet:
        fleet.send(0, 1)
        for _ in range(20):
            assert fleet.send(0, give_up=True).updated == ()
            # The version that the others have is on its way to this worker.
            worker_id = 0 if who == "another receiver" else fleet.sender.add_worker()
            fleet.connect(worker_id)
            assert fleet.send(worker_id, only=[worker_id], timeout=5.0).updated == (worker_id,)
            if worker_id:
                fleet.sender.remove_worker(worker_id)


def test_a_worker_that_joins_gets_what_all_had_when_the_others_left(scheme: TwoPhase) -> None:
    """The decision about the newest version, which worker 0 tries, then went to all workers."""
    with Fleet(scheme, 2) as fleet:
        fleet.send(0, 1)
        pending = fleet.sender.send_async(worker_ids=[0])
        fleet.sender.remove_worker(1)
        assert fleet.receive(0).result(30) == 2
        assert pending.wait().updated == (0,)
        fleet.connect(fleet.sender.add_worker())
        assert fleet.receivers[2].receive(20.0) == 1


def test_late_workers_get_what_the_others_have_after_a_version_that_none_has(
    scheme: TwoPhase,
) -> None:
    with Fleet(scheme, 3) as fleet:
        fleet.send(0, 1, 2)
        pending = fleet.sender.send_async()
        transport: Any = fleet.sender._pipeline.transport
        for worker_id in (1, 2):
            while worker_id not in transport._round.staged:
                assert fleet.receivers[worker_id].receive(0.05) is None
        assert fleet.receive(0).result(30) == 2
        with pytest.raises(SendError, match="worker 1: did not confirm version 2"):
            pending.wait(0.0)
        assert fleet.send(0, give_up=True).updated == ()
        for worker_id in (1, 2):
            assert fleet.receivers[worker_id].receive(20.0) == 2
        assert fleet.committed == {1: {0, 1, 2}, 2: {0, 1, 2}}


def test_a_worker_that_cannot_be_sent_what_all_have_fails_no_send(scheme: TwoPhase) -> None:
    with Fleet(scheme, 3) as fleet:
        fleet.send(0, 1, 2)
        assert fleet.send(0, give_up=True).updated == ()
        transport: Any = fleet.sender._pipeline.transport
        send, refused = transport._versions.send, threading.Event()

        def send_to_all_but_the_third(payload: Any, worker_ids: Any) -> Any:
            if 2 in worker_ids:
                refused.set()
                raise CapacityError("no memory for one more version")
            return send(payload, worker_ids)

        transport._versions.send = send_to_all_but_the_third
        pending = fleet.sender.send_async(worker_ids=[0, 1])
        fleet.connect(2)  # another receiver, which lacks what all have
        assert refused.wait(30)
        calls = [fleet.receive(worker_id) for worker_id in (0, 1)]
        assert [call.result(30) for call in calls] == [3, 3]
        assert pending.wait().updated == (0, 1)
        transport._versions.send = send
        assert fleet.send(0, 1, 2).updated == (0, 1, 2)


def test_what_is_not_decided_yet_keeps_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that decides may be busy while the next version is sent."""
    monkeypatch.setattr(two_phase_sender, "_PATIENCE", 0.05)
    with Fleet("two_phase::thread", 2) as fleet:
        fleet.send(0, 1)
        transport: Any = fleet.sender._pipeline.transport
        with transport._lock:
            fleet.fill(2.0)
            pending = fleet.sender.send_async()
            for worker_id in (0, 1):
                # It says yes, as this thread.
                assert fleet.receivers[worker_id].receive(0.5) is None
            pending.abandon()
            fleet.fill(3.0)
            pending = fleet.sender.send_async()
        assert [fleet.receive(i).result(30) for i in (0, 1)] == [2, 2]
        with pytest.raises(SendError):
            pending.wait(0.0)
        fleet.connect(0)
        assert fleet.receivers[0].receive(20.0) == 2
        assert fleet.values() == {0: {2.0}, 1: {2.0}}


def test_a_worker_in_the_background_waits_for_the_others(scheme: TwoPhase) -> None:
    with Fleet(scheme, 2) as fleet:
        fleet.connect(0, background=True)
        assert fleet.send(0, give_up=True).updated == ()
        for version in (2, 3):
            assert fleet.send(0, 1).updated == (0, 1)
            assert fleet.values() == {0: {float(version)}, 1: {float(version)}}


class History:
    """Random sends and changes of workers, and the version that each worker must have then."""

    def __init__(self, fleet: Fleet, chance: random.Random) -> None:
        self.fleet, self.chance = fleet, chance
        self.owed, self.owed_to_new = dict.fromkeys(fleet.receivers, 0), 0
        self.aborted: set[int] = set()

    def choose_change(self) -> tuple[str, int]:
        added, removed = ["add"] * (len(self.owed) < 5), ["remove"] * (len(self.owed) > 2)
        kinds = ["replace", "add again", *added, *removed]
        return self.chance.choice(kinds), self.chance.choice(list(self.owed))

    def change(self, kind: str, worker_id: int) -> None:
        if kind == "replace":
            self.fleet.connect(worker_id)
        if kind in ("remove", "add again"):
            self.fleet.remove(worker_id)
            del self.owed[worker_id]
        if kind in ("add", "add again"):
            added = self.fleet.sender.add_worker(worker_id if kind == "add again" else None)
            self.fleet.connect(added)
            self.owed[added] = self.owed_to_new

    def look(self) -> None:
        """Let each worker that lacks its version receive it."""
        for worker_id, version in self.owed.items():
            receiver = self.fleet.receivers[worker_id]
            assert receiver.version == version or receiver.receive(20.0) == version

    def send(self, *, silent: bool) -> None:
        """Send to some workers, one perhaps silent; workers may change before they stage it."""
        ids = set(self.owed)
        some = set(self.chance.sample(sorted(ids), self.chance.randint(1, len(ids))))
        receiving = some - set(self.chance.sample(sorted(some), int(silent)))
        kind, worker_id = self.choose_change()
        hit = kind != "add" and worker_id in some
        changes = self.chance.random() < 0.5 and not (silent and hit)
        if changes and hit:
            receiving.discard(worker_id)
        report = self.fleet.send(
            *receiving,
            only=sorted(some),
            give_up=silent,
            meanwhile=partial(self.change, kind, worker_id) if changes else int,
        )
        if silent or (changes and hit and kind == "replace"):
            # The receiver that another one replaces leaves.
            assert report.updated == ()
            self.aborted.add(report.version)
            return
        assert report.updated == tuple(sorted(receiving))
        self.owed |= dict.fromkeys(self.owed if some == ids else receiving, report.version)
        self.owed_to_new = report.version if some == ids else self.owed_to_new


@pytest.mark.parametrize("inner", ["thread", "increments::shm", "chunked::shm"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))]
)
def test_in_any_history_a_version_is_everywhere_or_nowhere(inner: str, seed: int) -> None:
    with Fleet(TwoPhase(inner), 3) as fleet:
        history = History(fleet, random.Random(f"{inner} {seed}"))
        for _ in range(25):
            act = history.chance.choice(["send"] * 3 + ["silent", "look", "change", "change"])
            if act == "change":
                history.change(*history.choose_change())
            elif act == "look":
                history.look()
            else:
                history.send(silent=act == "silent")
            versions = {i: receiver.version for i, receiver in fleet.receivers.items()}
            assert fleet.values() == {i: {float(version)} for i, version in versions.items()}
        history.look()
        for version in history.aborted:
            assert not fleet.committed[version], (version, fleet.committed)
        fleet.sender.send_async().abandon()
        ids = sorted(fleet.sender.all_worker_ids())
        pending = fleet.sender.send_async(timeout=30.0)
        calls = [fleet.receive(worker_id) for worker_id in ids]
        assert pending.wait().updated == tuple(ids)
        newest = fleet.sender.version
        while not all(fleet.receivers[i].version == newest for i in ids):
            # One whose receiver is new may have got an older version first.
            assert [call.result() for call in calls]
            calls = [fleet.receive(i) for i in ids if fleet.receivers[i].version != newest]


def cut_off(receiver: Receiver) -> None:
    """Lose what a worker says about versions that it has dropped."""
    transport: Any = receiver._connection.transport
    acknowledge = transport._versions.acknowledge

    def lose(answer: Answer) -> None:
        if answer.error is None:
            acknowledge(answer)

    transport._versions.acknowledge = lose


def test_a_worker_that_has_dropped_a_committed_version_gets_it_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Fleet(TwoPhase("thread", wait=0.2), 2) as fleet:
        cut_off(fleet.receivers[0])
        pending = fleet.sender.send_async()
        while "dropped a staged version" not in caplog.text:
            assert fleet.receivers[0].receive(0.3) is None
        assert fleet.receivers[1].receive(20.0) == 1
        assert fleet.receivers[0].receive(20.0) == 1
        with pytest.raises(SendError, match="no longer holds the version") as failure:
            pending.wait()
        assert failure.value.report.updated == (1,)
        assert eventually(lambda: fleet.sender.workers[0].version == 1, 20)


def test_a_worker_that_asks_for_ever_is_answered_once() -> None:
    with Fleet("two_phase::thread", 1) as fleet:
        transport: Any = fleet.receivers[0]._connection.transport
        pending = fleet.sender.send_async()
        for _ in range(2):
            payload = transport.receive(20.0)
            payload.release()
            refusal = Answer.refusal(payload.version, SyncError("dropped"))
            transport.acknowledge(replace(refusal, request=AGAIN))
        assert transport.receive(0.2) is None
        with pytest.raises(SendError, match="dropped"):
            pending.wait()
        assert fleet.send(0).updated == (0,)


def test_a_version_asked_for_again_comes_after_one_that_replaced_it() -> None:
    with Fleet("two_phase::thread", 1) as fleet:
        transport: Any = fleet.receivers[0]._connection.transport
        assert fleet.send(0).updated == (0,)
        fleet.model["a"].fill_(2.0)
        pending = fleet.sender.send_async()
        payload = transport.receive(20.0)
        payload.release()
        refusal = Answer.refusal(payload.version, SyncError("dropped"))
        transport.acknowledge(replace(refusal, request=AGAIN))
        with pytest.raises(SendError, match="dropped"):
            pending.wait()
        assert fleet.send(give_up=True).updated == ()
        assert fleet.receivers[0].receive(20.0) == 2
        assert fleet.models[0]["a"].unique().tolist() == [2.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"failed": "drop"}, "failed must be"),
        ({"wait": 0}, "wait must be"),
        ({"wait": "1"}, "wait"),
    ],
)
def test_wrong_options(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TwoPhase("thread", **options)


def test_it_is_neither_inside_of_shards_nor_around_them() -> None:
    for made in (Sharded("two_phase::shm", 0, 1), TwoPhase(Sharded("shm", 0, 1))):
        with pytest.raises(OptionError, match="alone"):
            made.plugin  # noqa: B018


def test_workers_that_are_called_are_refused() -> None:
    with pytest.raises(OptionError, match="give num_workers"):
        Sender("two_phase::thread", weights(), workers=[object()])
