"""Cases: a worker or trainer that raises, dies or stops does not disturb others."""

from __future__ import annotations

import os
import signal
import time
import warnings
from contextlib import ExitStack, suppress
from itertools import count

import pytest
import torch

from sync_core import (
    ApplyError,
    ClosedError,
    Layout,
    PendingSendError,
    Receiver,
    SenderLostError,
    SendError,
    TransportError,
    Update,
    WorkerLostError,
    WorkerTimeoutError,
    registry,
)
from sync_core.errors import PrepareTimeoutError
from sync_core.models import ComputedWeights, Strategy, TensorStream
from sync_testing.expectations import MEMBERS, RECEIVED, REPORT, VALUES
from sync_testing.faults.fault import gated
from sync_testing.interrupts import interrupted
from sync_testing.schemes.models import fill, make_policy
from sync_testing.schemes.pool import SchemeCases, SharedGroup, Start, ended
from sync_testing.schemes.worker import Worker


class _Slow(ComputedWeights):
    """A module that makes its tensors one after the other, each after some seconds."""

    def __init__(self, module: torch.nn.Module, seconds: float) -> None:
        super().__init__(module)
        self._seconds = seconds

    def read(self, strategy: Strategy) -> TensorStream:
        del strategy
        named = self.model.state_dict()
        return TensorStream(Layout.of(named), lambda: map(self._make, named.values()))

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        time.sleep(self._seconds)
        return tensor


# The number of interrupted sends in one case, spread over all moments of a send.
_INTERRUPTS = 40


class FaultCases(SchemeCases):
    """One of two workers or the trainer fails; the others continue."""

    def test_an_apply_that_raises_reaches_the_sender(self, start: Start) -> None:
        workers = start(make_policy(1.0))
        workers.pool.call(1, Worker.misshape)
        with pytest.raises(SendError) as failure:
            workers.send()
        report = failure.value.report
        assert report.updated == (0,), REPORT
        assert isinstance(report.workers[1].error, ApplyError), REPORT
        assert "'0.weight' is float32[4, 3] in the weights and float32[1, 1]" in str(
            failure.value
        ), "the error must name the tensor and both shapes"
        assert workers.values() == [{1.0}, {0.0, 5.0}], VALUES

    def test_a_transport_that_raises_is_named(self, start: Start) -> None:
        workers = start(make_policy(1.0), 1, on_failure="drop")
        workers.send()
        broken = [OSError("no route to the broker")]

        def fail() -> None:
            raise broken.pop()

        update = Update.of(make_policy(2.0).state_dict())
        tensors = gated(update.tensors, update.layout, 0, fail)
        names = [spec.name for spec in update.layout.specs]
        try:
            workers.sender.send_async(dict(zip(names, tensors, strict=True))).abandon()
        except SendError as error:
            failure = error
        else:
            pytest.skip("the scheme reads tensors in a way that this case cannot interrupt")
        assert isinstance(failure.__cause__, OSError), (
            "the error must chain what the transport raised"
        )
        assert isinstance(failure.report.workers[0].error, TransportError), (
            "what send() raises must count as the transport's failure, not the worker's"
        )
        assert registry.find(registry.SCHEMES, self.scheme).describe() in str(failure), (
            "the error must name the plugin and its version"
        )
        # No worker has failed, so none is dropped.
        assert workers.send().updated == (0,), REPORT
        assert workers.values() == [{1.0}], VALUES

    def test_a_slow_trainer_is_no_workers_fault(self, start: Start) -> None:
        workers = start(make_policy(1.0), on_failure="drop")
        workers.send()
        calls = [workers.submit(i) for i in (0, 1)]
        # Tied tensors, which this model has, are made before the version is packed.
        slow = r"up to '0\.bias', 2 of 9|reading the model took"
        with pytest.raises(PrepareTimeoutError, match=slow):
            workers.sender.send(_Slow(make_policy(2.0), 0.2), timeout=0.3)
        assert [s.failures for s in workers.sender.workers.values()] == [0, 0], MEMBERS
        assert workers.sender.send(make_policy(3.0)).updated == (0, 1), REPORT
        ended(calls, "receive()")
        assert workers.values() == [{3.0}, {3.0}], VALUES

    def test_the_last_one_is_dropped_and_that_is_an_error(self, start: Start) -> None:
        workers = start(make_policy(1.0), 1, on_failure="drop")
        workers.pool.call(0, Worker.misshape)
        for _ in range(2):
            with pytest.raises(
                SendError, match=r"type worker_id = sender\.add_worker\(\)"
            ) as failure:
                workers.send()
            assert failure.value.report.dropped == (0,), REPORT

    def test_dropped_when_it_fails(self, start: Start) -> None:
        workers = start(make_policy(1.0), on_failure="drop")
        workers.pool.call(0, Worker.misshape)
        report = workers.send()
        assert (report.dropped, report.updated, report.failed) == ((0,), (1,), {}), REPORT
        assert workers.sender.all_worker_ids() == (1,), MEMBERS
        assert workers.send().updated == (1,), REPORT

    @pytest.mark.usefixtures("asking")
    def test_after_a_send_that_failed_the_next_one_works(self, start: Start) -> None:
        workers = start(make_policy(1.0), 1)
        with pytest.raises(SendError, match="did not confirm version 1 within"):
            workers.sender.send(timeout=0.1)
        assert workers.send().updated == (0,), REPORT

    @pytest.mark.usefixtures("asking", "lasting")
    def test_a_late_refusal_fails_no_other_send(self, start: Start) -> None:
        policy = make_policy(1.0)
        workers = start(policy, 1)
        workers.stage_what_is_given_up()
        fill(policy, 2.0)
        pending = workers.sender.send_async()
        workers.pool.call(0, Worker.refuse_staged)
        assert workers.receive(0) == 2, "a refused version must not keep a worker from the next"
        assert pending.wait().updated == (0,), REPORT
        assert workers.values() == [{2.0}], VALUES

    @pytest.mark.usefixtures("asking", "lasting")
    def test_a_receiver_that_cannot_be_made_fails_the_send_at_once(self, start: Start) -> None:
        workers = start(make_policy(1.0))
        address = workers.sender.address(0)
        pending = workers.sender.send_async()
        assert "do not fit the model" in workers.pool.call(0, Worker.be_refused, address), (
            "a receiver whose model does not fit must say so"
        )
        for version in (1, 2):
            assert workers.receive(1) == version, RECEIVED
            with pytest.raises(SendError, match="LayoutMismatchError") as failure:
                pending.wait()
            assert list(failure.value.report.failed) == [0], REPORT
            assert failure.value.report.seconds < 30, (
                "a worker that has gone must be noticed at once, not at the deadline"
            )
            if version == 1:
                pending = workers.sender.send_async()
        workers.connect(0)
        assert workers.receive(0) == 2, "a worker that comes back must get the newest version"
        assert workers.send().updated == (0, 1), REPORT

    @pytest.mark.usefixtures("asking", "lasting")
    def test_a_receiver_that_was_closed_is_reported_as_closed(self, start: Start) -> None:
        workers = start(make_policy(1.0))
        pending = workers.sender.send_async()
        workers.pool.call(0, Worker.hang_up)
        assert workers.receive(1) == 1, RECEIVED
        with pytest.raises(SendError, match="closed its receiver") as failure:
            pending.wait()
        assert isinstance(failure.value.report.workers[0].error, WorkerLostError), (
            "a worker whose receiver has closed must fail with WorkerLostError"
        )
        assert failure.value.report.seconds < 30, (
            "a worker that has gone must be noticed at once, not at the deadline"
        )

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
    def test_a_forked_copy_of_the_sender_sends_nothing(self, start: Start) -> None:
        workers = start(make_policy(1.0), 1)
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            # The warning about threads that the child lacks.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            try:
                workers.sender.send_async()
            except ClosedError as error:
                os.write(writing, str(error).encode())
            finally:
                workers.sender.close()
                os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        assert b"was forked" in os.read(reading, 4096), (
            "a sender that is used after a fork must say so"
        )
        os.close(reading)

    # An interrupt may come between the opening of a file and its `with`.
    @pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
    @pytest.mark.usefixtures("asking", "parallel", "lasting")
    def test_an_interrupted_send_tears_no_version(self, start: Start) -> None:
        policy = make_policy()
        workers = start(policy, 1, timeout=10.0)
        numbers = count(1)

        def send(moment: int | None = None) -> int:
            """Start a send of weights equal to the version number; return the number of moments."""
            number = next(numbers)
            fill(policy, float(number))
            with interrupted(moment) as moments:
                workers.sender.send_async(version=number)
            with suppress(PendingSendError, SendError):
                workers.sender.wait_async(0)
            return moments.count

        def stage_during(moment: int | None = None) -> int:
            """Let the worker stage a version during a send, and overwrite all free slots."""
            staging = workers.pool.submit(0, Worker.stage)
            moments = send(moment)
            for _ in range(3):
                send()
            assert ended([staging], "stage()") != [None], RECEIVED
            version = workers.pool.call(0, Worker.commit_staged)
            assert workers.values() == [{float(version)}], f"after an interrupt at {moment}"
            return moments

        moments = max(stage_during() for _ in range(2))
        for moment in range(0, moments, max(1, moments // _INTERRUPTS)):
            stage_during(moment)
        assert workers.send().updated == (0,), REPORT

    @pytest.mark.usefixtures("processes", "lasting")
    @pytest.mark.parametrize("child", [False, True], ids=["alone", "with_a_child"])
    def test_killed_between_sends_and_back_again(self, start: Start, child: bool) -> None:
        if child and not self.sees_past_forks:
            pytest.skip("the scheme does not claim to see past forked processes")
        policy = make_policy(1.0)
        workers = start(policy)
        workers.send()
        with ExitStack() as ends:
            if child:
                ends.callback(os.kill, workers.pool.call(0, Worker.fork), signal.SIGKILL)
            workers.pool.signal(0, signal.SIGKILL)
            fill(policy, 2.0)
            with pytest.raises(SendError) as failure:
                workers.send()
        report = failure.value.report
        assert isinstance(report.workers[0].error, WorkerLostError), (
            "a worker whose process was killed must fail with WorkerLostError"
        )
        assert report.updated == (1,), REPORT
        assert report.seconds < 30, (
            "a lost worker must be noticed when it dies, not at the deadline"
        )
        if "restart" not in workers.pool.group_class.capabilities:
            return
        workers.pool.restart(0)
        workers.connect(0)
        assert workers.receive(0) == 2, "a worker that comes back must get the newest version"
        assert workers.values() == [{2.0}, {2.0}], VALUES
        fill(policy, 3.0)
        assert workers.send().updated == (0, 1), REPORT
        assert workers.values() == [{3.0}, {3.0}], VALUES

    @pytest.mark.usefixtures("asking", "processes", "lasting")
    def test_killed_during_a_send(self, start: Start) -> None:
        workers = start(make_policy(1.0))
        pending = workers.sender.send_async()
        call = workers.submit(1)
        pid = workers.pool.signal(0, signal.SIGKILL)
        with pytest.raises(SendError) as failure:
            pending.wait()
        report = failure.value.report
        assert isinstance(report.workers[0].error, WorkerLostError), (
            "a worker whose process was killed must fail with WorkerLostError"
        )
        assert str(pid) in str(report.workers[0].error), (
            "the message of a lost worker must name its process"
        )
        assert report.updated == (1,), REPORT
        assert report.seconds < 30, (
            "a lost worker must be noticed when it dies, not at the deadline"
        )
        assert ended([call], "receive()") == [1], RECEIVED

    @pytest.mark.usefixtures("processes", "alone")
    @pytest.mark.parametrize("receiving", [False, True], ids=["idle", "receiving"])
    def test_stopped_for_a_while(self, start: Start, receiving: bool) -> None:
        policy = make_policy(1.0)
        # A scheme may wait for all workers for a short while.
        workers = start(policy, timeout=3.0)
        if receiving:
            waiting = workers.submit(0, 20.0)
        workers.pool.signal(0, signal.SIGSTOP)
        try:
            for value in range(2, 6):
                fill(policy, float(value))
                pending = workers.sender.send_async()
                assert workers.receive(1) == value - 1, RECEIVED
                report = workers.give_up(pending, 0)
                assert report.updated == (1,), REPORT
                assert isinstance(report.workers[0].error, WorkerTimeoutError), (
                    "a worker that is stopped, and not dead, must fail at the deadline"
                )
        finally:
            workers.pool.signal(0, signal.SIGCONT)
        received = (ended([waiting], "receive(20)")[0] or 0) if receiving else 0
        # A process that is called may have received older versions before the newest.
        while received < 4:
            version = workers.receive(0)
            assert version is not None
            assert version > received, "receive() must not give a version twice, or an older one"
            received = version
        assert workers.values() == [{5.0}, {5.0}], VALUES
        fill(policy, 6.0)
        assert workers.send().updated == (0, 1), REPORT

    @pytest.mark.usefixtures("asking", "processes")
    @pytest.mark.parametrize("child", [False, True], ids=["alone", "with_a_child"])
    def test_the_trainer_is_killed(self, pool: SharedGroup, child: bool) -> None:
        if child and not self.sees_past_forks:
            pytest.skip("the scheme does not claim to see past forked processes")
        pool.make_ready()
        flags = (False, True) if self.can("zero_copy") else (False,)
        addresses = pool.call(0, Worker.train, self.scheme, dict(self.options), flags)
        targets = [{"weight": torch.zeros(1000)} for _ in addresses]
        receivers = [
            Receiver(address, target) for address, target in zip(addresses, targets, strict=True)
        ]
        assert [receiver.receive() for receiver in receivers] == [1] * len(flags), RECEIVED
        with ExitStack() as ends:
            if child:
                # The child holds the trainer's descriptors, and stays alive.
                ends.callback(os.kill, pool.call(0, Worker.fork), signal.SIGKILL)
            pool.signal(0, signal.SIGKILL)
            for receiver in receivers:
                with pytest.raises(SenderLostError):
                    receiver.receive(20.0)
        for target in targets:
            assert (target["weight"] == 5).all(), (
                "the death of the trainer must leave the last version whole"
            )
            target["weight"] += 1
