"""Which version reaches whom, and when: all workers or some, the newest, in time."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from sync_core import SendError, WorkerTimeoutError
from sync_core.testing.schemes.base import SchemeCases, Start
from sync_core.testing.schemes.models import fill, make_policy
from sync_core.testing.schemes.worker import Worker


class DeliveryCases(SchemeCases):
    """Versions on their way from a trainer that lives to workers that live."""

    def test_every_worker_gets_every_version(self, start: Start, zero_copy: bool) -> None:
        policy = make_policy(1.0)
        workers = start(policy, zero_copy=zero_copy)
        for version in range(1, 6):
            fill(policy, float(version))
            report = workers.send()
            assert (report.version, report.updated, report.failed) == (version, (0, 1), {})
            assert workers.values() == [{float(version)}] * 2
            assert report.nbytes > 0
            assert all(0 < result.seconds <= report.seconds for result in report.workers.values())

    @pytest.mark.usefixtures("parallel")
    def test_blocking_send_returns_when_everybody_has_committed(self, start: Start) -> None:
        workers = start(make_policy(7.0))
        serving = [workers.pool.submit(i, Worker.serve) for i in (0, 1)]
        assert workers.sender.send().updated == (0, 1)
        assert workers.sender.send().version == 2
        workers.sender.close()
        assert [call.result(30) for call in serving] == [2, 2]
        assert workers.pool.call(0, Worker.values) == {7.0}

    def test_a_step_after_send_async_changes_nothing_that_arrives(
        self, start: Start, zero_copy: bool
    ) -> None:
        policy = make_policy(1.0)
        workers = start(policy, zero_copy=zero_copy)
        pending = workers.sender.send_async()
        fill(policy, 9.0)
        calls = [workers.submit(worker_id) for worker_id in (0, 1)]
        assert pending.wait().updated == (0, 1)
        assert [call.result(30) for call in calls] == [1, 1]
        assert workers.values() == [{1.0}, {1.0}]

    def test_the_trainers_module_is_never_altered(self, start: Start) -> None:
        policy = make_policy(1.0)
        tensors = (*policy.parameters(), *policy.buffers())
        pointers = [tensor.data_ptr() for tensor in tensors]
        workers = start(policy)
        workers.send()
        workers.pool.call(0, Worker.leave, 3.0)
        assert not any(parameter.is_shared() for parameter in policy.parameters())
        assert [tensor.data_ptr() for tensor in tensors] == pointers
        assert all((parameter == 1).all() for parameter in policy.parameters())

    def test_some_workers_only(self, start: Start) -> None:
        workers = start(make_policy(1.0), 3)
        report = workers.send(worker_ids=[2, 0])
        assert report.updated == (0, 2)
        assert workers.receive(1, timeout=0.1) is None
        assert workers.values() == [{1.0}, {0.0}, {1.0}]
        assert workers.send().updated == (0, 1, 2)
        assert workers.values() == [{1.0}] * 3

    def test_the_forms_of_weights(self, start: Start) -> None:
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
            assert workers.values() == [{float(value)}]

    def test_a_partial_update(self, start: Start) -> None:
        workers = start(make_policy(), 1, partial=True)
        workers.send({"0.bias": torch.full((4,), 6.0)})
        assert workers.values() == [{0.0, 6.0}]

    def test_weights_given_by_hand(self, start: Start, zero_copy: bool) -> None:
        policy = make_policy(1.0)
        workers = start(policy, 1, zero_copy=zero_copy)
        workers.send()
        assert workers.pool.call(0, Worker.update_by_hand, 9.0) == 1
        assert workers.values() == [{9.0}]
        assert all((parameter == 1).all() for parameter in policy.parameters())
        workers.send()
        assert workers.values() == [{1.0}]

    def test_the_newest_version_is_the_one_that_counts(self, start: Start) -> None:
        policy = make_policy(1.0)
        workers = start(policy, 1)
        for value in (1.0, 2.0, 3.0):
            fill(policy, value)
            with pytest.raises(SendError):
                workers.sender.send_async().wait(0.0)
        assert workers.receive(0) == 3
        assert workers.values() == [{3.0}]
        assert workers.receive(0, timeout=0.0) is None

    def test_a_late_answer_counts_for_no_other_send(self, start: Start) -> None:
        workers = start(make_policy(1.0), 1)
        with pytest.raises(SendError, match="did not confirm version 1 within") as failure:
            workers.sender.send(timeout=0.01)
        assert isinstance(failure.value.report.workers[0].error, WorkerTimeoutError)
        workers.receive(0)
        late = workers.sender.send_async()
        assert not late.done()
        workers.receive(0)
        assert late.wait().updated == (0,)

    def test_looking_for_news_answers_at_once(self, start: Start) -> None:
        workers = start(make_policy(), 1)
        assert workers.receive(0, timeout=0.0) is None

        def look_often(worker: Worker) -> float:
            begin = time.perf_counter()
            for _ in range(200):
                worker.receive(0.0)
            return time.perf_counter() - begin

        assert workers.pool.call(0, look_often) < 1.0

    def test_waiting_for_news_ends_in_time(self, start: Start) -> None:
        workers = start(make_policy(), 1)

        def wait(worker: Worker) -> float:
            begin = time.perf_counter()
            assert worker.receive(0.2) is None
            return time.perf_counter() - begin

        assert 0.2 <= workers.pool.call(0, wait) < 1.5
        assert workers.send().updated == (0,)
