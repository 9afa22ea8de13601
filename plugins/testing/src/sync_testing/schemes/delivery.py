"""Cases: the newest version reaches its workers in time."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sync_core import SendError, SkipContext, WorkerState, WorkerTimeoutError, hookimpl
from sync_plugin_std import select
from sync_testing.expectations import MEMBERS, NO_NEWS, RECEIVED, REPORT, VALUES
from sync_testing.schemes.models import fill, fingerprints, make_policy
from sync_testing.schemes.pool import PROMPT, SchemeCases, Start, ended
from sync_testing.schemes.worker import Worker
from sync_testing.worker_groups import eventually


class EveryOther:
    """A layer that skips every other push."""

    @hookimpl
    def skip_update(self, context: SkipContext) -> bool:
        """Skip the first push after an update."""
        return context.updated and context.pushes < 2


class DeliveryCases(SchemeCases):
    """Deliveries from a live trainer to live workers."""

    def test_every_worker_gets_every_version(self, start: Start, zero_copy: bool) -> None:
        policy = make_policy(1.0)
        workers = start(policy, zero_copy=zero_copy)
        for version in range(1, 6):
            fill(policy, float(version))
            report = workers.send()
            assert (report.version, report.updated, report.failed) == (version, (0, 1), {}), REPORT
            assert workers.values() == [{float(version)}] * 2, VALUES
            assert report.nbytes > 0, "a delivery must report the bytes that it brings"
            assert all(
                0 < result.seconds <= report.seconds for result in report.workers.values()
            ), "a worker's seconds must lie within those of the send"

    @pytest.mark.usefixtures("asking", "parallel")
    def test_blocking_send_returns_when_everybody_has_committed(self, start: Start) -> None:
        workers = start(make_policy(7.0))
        serving = [workers.pool.submit(i, Worker.serve) for i in (0, 1)]
        assert workers.sender.send().updated == (0, 1), REPORT
        assert workers.sender.send().version == 2, "each send must have the next version"
        workers.sender.close()
        assert ended(serving, "receive() of a closed sender's worker") == [2, 2], RECEIVED
        assert workers.pool.call(0, Worker.values) == {7.0}, VALUES

    def test_some_workers_only(self, start: Start) -> None:
        workers = start(make_policy(1.0), 3)
        report = workers.send(worker_ids=[2, 0])
        assert report.updated == (0, 2), REPORT
        assert workers.receive(1, timeout=0.1) is None, NO_NEWS
        assert workers.values() == [{1.0}, {0.0}, {1.0}], VALUES
        assert workers.send().updated == (0, 1, 2), REPORT
        assert workers.values() == [{1.0}] * 3, VALUES

    @pytest.mark.usefixtures("asking", "alone")
    def test_nothing_is_confirmed_before_it_is_committed(self, start: Start) -> None:
        workers = start(make_policy(1.0))
        pending = workers.sender.send_async()
        workers.receive(1)
        assert not eventually(pending.done, 0.2), (
            "a send must not end before the worker has answered for this version"
        )
        assert list(pending.unanswered) == [0], REPORT
        workers.receive(0)
        assert pending.wait().updated == (0, 1), REPORT

    def test_the_report_tells_how_much_travelled(self, start: Start) -> None:
        workers = start(make_policy(1.0))
        weights = make_policy(2.0).state_dict()
        least = sum(tensor.nbytes for tensor in weights.values())
        report = workers.send(weights)
        assert all(result.nbytes >= least for result in report.workers.values()), (
            "a delivery must report all the bytes that it brings"
        )
        assert [result.version for result in report.workers.values()] == [1, 1], REPORT

    @pytest.mark.usefixtures("asking", "parallel", "lasting")
    def test_a_worker_sees_versions_in_order_and_each_whole(self, start: Start) -> None:
        policy = make_policy()
        workers = start(policy, 1)

        def follow(worker: Worker) -> list[tuple[int, set[float]]]:
            seen: list[tuple[int, set[float]]] = []
            while not seen or seen[-1][0] < 30:
                version = worker.receive(20.0)
                assert version is not None
                seen.append((version, worker.values()))
            return seen

        following = workers.pool.submit(0, follow)
        for value in range(1, 31):
            fill(policy, float(value))
            with suppress(SendError):
                workers.sender.send_async().wait(0.002)
        (seen,) = ended([following], "a worker that receives each version")
        versions = [version for version, _ in seen]
        assert versions == sorted(set(versions)), (
            "receive() must give versions in ascending order, and none twice"
        )
        assert all(values == {float(version)} for version, values in seen), (
            "a worker must never hold parts of two versions"
        )

    @pytest.mark.usefixtures("asking", "parallel", "lasting")
    def test_a_large_version_is_whole_while_others_are_sent(self, start: Start) -> None:
        # Large enough that several others are sent during its delivery.
        def weights() -> dict[str, Tensor]:
            return {"weight": torch.zeros(4_000_000)}

        given, last = weights(), 12
        workers = start(given, 1, make=weights)

        def follow(worker: Worker) -> list[tuple[int, float, float]]:
            seen: list[tuple[int, float, float]] = []
            while not seen or seen[-1][0] < last:
                version = worker.receive(20.0)
                assert version is not None
                least, most = worker.model["weight"].aminmax()
                seen.append((version, float(least), float(most)))
            return seen

        following = workers.pool.submit(0, follow)
        for value in range(1, last + 1):
            given["weight"].fill_(float(value))
            with suppress(SendError):
                workers.sender.send_async().wait(0.002)
        (seen,) = ended([following], "a worker that receives each version")
        assert all(least == version == most for version, least, most in seen), seen

    def test_after_hundreds_of_versions_answers_still_count(self, start: Start) -> None:
        policy = make_policy()
        workers = start(policy, 1)
        # More than a byte can count.
        for version in range(1, 261):
            fill(policy, float(version))
            report = workers.send()
            assert (report.version, report.updated) == (version, (0,)), REPORT
        assert workers.values() == [{260.0}], VALUES

    def test_the_forms_of_weights(self, start: Start) -> None:
        from tensordict import TensorDict

        workers = start(make_policy(), 1)
        forms: list[Callable[[nn.Module], Any]] = [
            lambda module: module,
            TensorDict.from_module,
            lambda module: TensorDict(module.state_dict()),
            nn.Module.state_dict,
            lambda module: copy.deepcopy(module).state_dict(),
        ]
        for value, form in enumerate(forms, start=1):
            workers.send(form(make_policy(float(value))))
            assert workers.values() == [{float(value)}], VALUES

    def test_a_partial_update(self, start: Start) -> None:
        self.need_one_sender()
        workers = start(make_policy(1.0), 1, layers=[select("*")])
        workers.send({"0.bias": torch.full((4,), 6.0)})
        assert workers.values() == [{1.0, 6.0}], VALUES
        whole = workers.send().nbytes
        assert workers.values() == [{1.0}], VALUES
        partial = workers.send({"0.bias": torch.full((4,), 7.0)}).nbytes
        assert partial < whole or self.can("compares"), REPORT
        assert workers.values() == [{1.0, 7.0}], VALUES

    def test_partial_updates_that_are_skipped(self, start: Start) -> None:
        self.need_one_sender()
        policy = make_policy(1.0)
        workers = start(policy, 1, layers=[select("*"), EveryOther()])
        workers.send()
        for value in (2.0, 4.0):
            fill(policy[2], value)
            assert workers.sender.send({"2.bias": policy[2].bias}).skipped == (0,), REPORT
            fill(policy[0], value + 1)
            assert workers.send({"0.bias": policy[0].bias}).updated == (0,), REPORT
        assert (
            workers.pool.call(0, Worker.fingerprints)["2.bias"] == fingerprints(policy)["2.bias"]
        ), VALUES
        assert (
            workers.pool.call(0, Worker.fingerprints)["0.bias"] == fingerprints(policy)["0.bias"]
        ), VALUES

    @pytest.mark.usefixtures("asking")
    def test_partial_updates_after_one_that_was_missed(self, start: Start) -> None:
        self.need_one_sender()
        workers = start(make_policy(1.0), 1, layers=[select("*")])
        workers.send()
        with pytest.raises(SendError):
            workers.sender.send_async({"0.bias": torch.full((4,), 6.0)}).wait(0.0)
        workers.send({"2.bias": torch.full((2,), 7.0)})
        assert workers.sender.workers[0].state is WorkerState.CURRENT, (
            "a worker that has the newest version must be current"
        )
        assert workers.values() == [{1.0, 6.0, 7.0}], VALUES

    @pytest.mark.usefixtures("asking")
    def test_weights_given_by_hand(self, start: Start, zero_copy: bool) -> None:
        policy = make_policy(1.0)
        workers = start(policy, 1, zero_copy=zero_copy)
        workers.send()
        assert workers.pool.call(0, Worker.update_by_hand, 9.0) == 1, RECEIVED
        assert workers.values() == [{9.0}], VALUES
        assert all((parameter == 1).all() for parameter in policy.parameters()), (
            "an update in a worker must leave the trainer's model alone"
        )
        workers.send()
        assert workers.values() == [{1.0}], VALUES

    @pytest.mark.usefixtures("asking", "lasting")
    def test_the_newest_version_is_the_one_that_counts(self, start: Start) -> None:
        policy = make_policy(1.0)
        workers = start(policy, 1)
        for value in (1.0, 2.0, 3.0):
            fill(policy, value)
            with pytest.raises(SendError):
                workers.sender.send_async().wait(0.0)
        assert workers.receive(0) == 3, RECEIVED
        assert workers.values() == [{3.0}], VALUES
        assert workers.receive(0, timeout=0.0) is None, NO_NEWS

    @pytest.mark.usefixtures("asking")
    def test_a_late_answer_counts_for_no_other_send(self, start: Start) -> None:
        workers = start(make_policy(1.0), 1)
        with pytest.raises(SendError, match="did not confirm version 1 within") as failure:
            workers.sender.send(timeout=0.01)
        assert isinstance(failure.value.report.workers[0].error, WorkerTimeoutError), (
            "a worker that does not answer must fail at the deadline"
        )
        workers.receive(0)
        late = workers.sender.send_async()
        assert not late.done(), "a send must not end before its worker has answered"
        workers.receive(0)
        assert late.wait().updated == (0,), REPORT

    @pytest.mark.usefixtures("asking", "lasting")
    def test_an_answer_about_an_older_version_counts_for_no_other(self, start: Start) -> None:
        policy = make_policy(1.0)
        workers = start(policy, 1)
        workers.stage_what_is_given_up()
        fill(policy, 2.0)
        pending = workers.sender.send_async()
        assert workers.pool.call(0, Worker.commit_staged) == 1, RECEIVED
        assert not eventually(pending.done, 0.2), (
            "a send must not end before the worker has answered for this version"
        )
        assert workers.receive(0) == 2, RECEIVED
        assert pending.wait().updated == (0,), REPORT

    @pytest.mark.usefixtures("asking", "lasting")
    def test_what_was_staged_is_what_is_committed(self, start: Start, zero_copy: bool) -> None:
        policy = make_policy(1.0)
        workers = start(policy, 1, zero_copy=zero_copy)
        workers.stage_what_is_given_up()
        # More versions than a scheme might keep.
        for value in range(2, 8):
            fill(policy, float(value))
            with pytest.raises(SendError):
                workers.sender.send_async().wait(0.0)
        assert workers.pool.call(0, Worker.commit_staged) == 1, RECEIVED
        assert workers.values() == [{1.0}], VALUES
        assert workers.receive(0) == 7, RECEIVED
        assert workers.values() == [{7.0}], VALUES

    @pytest.mark.usefixtures("asking")
    def test_an_answer_of_a_receiver_that_was_replaced_counts_for_no_other(
        self, start: Start
    ) -> None:
        workers = start(make_policy(1.0), 1)
        pending = workers.sender.send_async()
        assert workers.pool.call(0, Worker.stage) == 1, RECEIVED
        assert workers.pool.call(0, Worker.commit_after_another, workers.sender.address(0)) == 1, (
            RECEIVED
        )
        assert not eventually(pending.done, 0.2), (
            "a send must not end before the worker has answered for this version"
        )
        assert workers.receive(0) == 1, RECEIVED
        assert pending.wait().updated == (0,), REPORT

    @pytest.mark.usefixtures("asking", "parallel", "alone")
    @pytest.mark.parametrize("silent", [0, 1])
    def test_an_answer_counts_while_another_worker_is_silent(
        self, start: Start, silent: int
    ) -> None:
        workers = start(make_policy(1.0))
        pending = workers.sender.send_async()
        assert workers.pool.call(1 - silent, Worker.stage) == 1, RECEIVED
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(pending.wait)
            try:
                assert not eventually(pending.done, 0.2), (
                    "a send must not end before the worker has answered for this version"
                )
                assert workers.pool.call(1 - silent, Worker.commit_staged) == 1, RECEIVED
                assert pending.deliveries[1 - silent].wait(self.slack), (
                    "a delivery must end when its worker answers, while others are silent"
                )
            finally:
                pending.abandon()
            failure = waiting.exception(30)
        assert isinstance(failure, SendError), REPORT
        assert failure.report.updated == (1 - silent,), REPORT

    @pytest.mark.usefixtures("asking")
    def test_a_sender_waits_no_longer_than_it_was_told(self, start: Start) -> None:
        workers = start(make_policy(1.0), 1, timeout=0.3)
        seconds = []
        for version in (1, 2, 3):
            begin = time.perf_counter()
            with pytest.raises(SendError, match=f"did not confirm version {version} within"):
                workers.sender.send()
            seconds.append(time.perf_counter() - begin)
        assert 0.3 <= min(seconds) < 0.3 + min(PROMPT, self.slack), (
            f"send() must end at its deadline of 0.3 s; the quickest of three took {min(seconds)} s"
        )

    @pytest.mark.usefixtures("asking")
    def test_looking_for_news_answers_at_once(self, start: Start) -> None:
        workers = start(make_policy(), 1)
        assert workers.receive(0, timeout=0.0) is None, NO_NEWS

        def look_often(worker: Worker) -> list[float]:
            looks = []
            for _ in range(25):
                begin = time.perf_counter()
                worker.receive(0.0)
                looks.append(time.perf_counter() - begin)
            return looks

        # The fastest look counts: on a busy machine, others wait for a core.
        assert min(workers.pool.call(0, look_often)) < 0.05, (
            "receive(0) must look once, and wait for nothing"
        )

    @pytest.mark.usefixtures("asking")
    def test_who_is_told_of_versions_need_not_look(self, start: Start) -> None:
        workers = start(make_policy(), 2)
        told = {i for i in (0, 1) if workers.pool.call(i, Worker.attend)}
        for version in (1, 2, 3):
            pending = workers.sender.send_async(make_policy(version))
            looking = [workers.submit(i, 20.0) for i in {0, 1} - told]
            assert pending.wait(self.slack).updated == (0, 1), REPORT
            assert ended(looking, "receive(20)") == [version] * len(looking), RECEIVED
            assert workers.values() == [{float(version)}] * 2, VALUES

    @pytest.mark.usefixtures("asking")
    def test_a_worker_that_steps_gets_versions_between_its_steps(self, start: Start) -> None:
        workers = start(make_policy(), 2)
        idle = [median(workers.pool.call(i, Worker.step_until, 1, 0.1)) for i in (0, 1)]
        told = [workers.pool.call(i, Worker.attend_between_steps) for i in (0, 1)]
        attending = [median(workers.pool.call(i, Worker.step_until, 1, 0.1)) for i in (0, 1)]
        # On a busy machine both take longer.
        assert max(attending) < 0.05 + 4 * max(idle), (
            "receive(0) must look once, and wait for nothing, also after on_arrival()"
        )
        seconds = []
        for version in (1, 2, 3):
            pending = workers.sender.send_async(make_policy(version))
            stepping = [
                workers.pool.submit(i, Worker.step_until, version, self.slack) for i in (0, 1)
            ]
            ended(stepping, "a worker that looks after each step", self.slack + 10.0)
            assert eventually(pending.done, self.slack), (
                "receive(0) must find a version that was sent, also after on_arrival()"
            )
            seconds.append(pending.wait().seconds)
            assert workers.values() == [{float(version)}] * 2, VALUES
        assert min(seconds) < PROMPT, (
            "a worker that looks after each step must find a version at once; the quickest of "
            f"three sends took {min(seconds):.2f} s"
        )
        if not all(told):
            return
        for i in (0, 1):
            workers.pool.call(i, Worker.begin_step)
        pending = workers.sender.send_async(make_policy(4))
        stepping = [workers.pool.submit(i, Worker.end_step, self.slack) for i in (0, 1)]
        ended(stepping, "a worker that receives after its steps", self.slack + 10.0)
        assert eventually(pending.done, self.slack), (
            "receive(0) must find what the callback of on_arrival() has left, later and in another "
            "thread"
        )
        assert pending.wait().updated == (0, 1), REPORT
        assert workers.values() == [{4.0}] * 2, VALUES

    @pytest.mark.usefixtures("asking")
    def test_a_worker_that_has_connected_is_known(self, start: Start) -> None:
        workers = start(make_policy(1.0))
        assert eventually(
            lambda: all(s.state is WorkerState.CURRENT for s in workers.sender.workers.values()),
            self.slack,
        ), f'a receiver that is made must lead to Notice("connected"), got {workers.sender.workers}'
        workers.send()
        workers.pool.call(0, Worker.leave, 7.0)
        workers.connect(0)
        assert eventually(
            lambda: workers.sender.workers[0].state is WorkerState.BEHIND, self.slack
        ), (
            'a receiver that replaces another must lead to Notice("connected"): its model has no '
            f"version yet, got {workers.sender.workers[0]}"
        )
        assert workers.receive(0) == 1, RECEIVED

    @pytest.mark.usefixtures("asking", "lasting")
    def test_an_answer_after_the_deadline_is_known(self, start: Start) -> None:
        workers = start(make_policy(1.0), 1)
        with pytest.raises(SendError):
            workers.sender.send(timeout=0.01)
        assert workers.receive(0) == 1, RECEIVED
        assert eventually(
            lambda: workers.sender.workers[0].state is WorkerState.CURRENT, self.slack
        ), (
            "an answer that comes after the send's deadline must reach Delivery.acknowledge, or "
            f'lead to Notice("acknowledged", version), got {workers.sender.workers[0]}'
        )

    @pytest.mark.usefixtures("asking")
    def test_waiting_for_news_ends_in_time(self, start: Start) -> None:
        workers = start(make_policy(), 1)

        def wait(worker: Worker) -> float:
            begin = time.perf_counter()
            assert worker.receive(0.2) is None, NO_NEWS
            return time.perf_counter() - begin

        seconds = min(workers.pool.call(0, wait) for _ in range(3))
        assert 0.2 <= seconds < 0.2 + min(PROMPT, self.slack), (
            "receive(0.2) must return None when the timeout is over; the quickest of three took "
            f"{seconds} s"
        )
        assert workers.send().updated == (0,), REPORT

    @pytest.mark.usefixtures("asking")
    @pytest.mark.parametrize("rebuild", [Worker.rebuild, Worker.rebuild_while_waiting])
    def test_a_worker_with_another_model_gets_the_newest_version(
        self, start: Start, zero_copy: bool, rebuild: Callable[..., int | None]
    ) -> None:
        policy = make_policy(1.0)
        workers = start(policy, zero_copy=zero_copy)
        workers.send()

        def is_current() -> bool:
            return workers.sender.workers[0].state is WorkerState.CURRENT

        if rebuild is Worker.rebuild:
            workers.pool.call(0, rebuild)
            assert eventually(lambda: not is_current(), self.slack), (
                "a worker with another model must not count as current: its receiver makes a "
                "second transport, which has no version yet"
            )
            received = workers.receive(0)
        else:
            received = workers.pool.call(0, rebuild, self.slack)
        assert received == 1, RECEIVED
        assert workers.values() == [{1.0}, {1.0}], VALUES
        assert eventually(is_current, self.slack), MEMBERS
        fill(policy, 2.0)
        assert workers.send().updated == (0, 1), REPORT
        assert workers.values() == [{2.0}, {2.0}], VALUES
