"""Every standard scheme that moves weights: values, versions, ids, failures, lifetime."""

from __future__ import annotations

import copy
import dataclasses
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from sync_core import (
    Address,
    AddressError,
    ApplyError,
    CapacityError,
    ClosedError,
    LayoutMismatchError,
    ModelError,
    OptionError,
    PendingSendError,
    Receiver,
    Sender,
    SenderLostError,
    SendError,
    SendReport,
    UnknownWorkerError,
    WorkerGroup,
    WorkerLostError,
    WorkerTimeoutError,
)
from sync_plugin_std import with_pipe
from sync_plugin_std.process_group import ProcessGroup
from sync_plugin_std.thread_group import ThreadGroup

pytestmark = pytest.mark.timeout(90)

GROUPS: dict[str, type[WorkerGroup]] = {
    "thread": ThreadGroup,
    "shm": ProcessGroup,
    "mp": ProcessGroup,
}


def make_policy(fill: float = 0.0) -> nn.Sequential:
    policy = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with torch.no_grad():
        for tensor in (*policy.parameters(), *policy.buffers()):
            tensor.fill_(fill)
    return policy


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


class Worker:
    """What a test's worker hosts: a model and its receiver."""

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id
        self.model: Any = make_policy()
        self.receiver: Receiver | None = None

    def reset(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.model, self.receiver = make_policy(), None

    def connect(self, address: Address, **options: Any) -> int:
        self.receiver = Receiver(address, self.model, **options)
        return os.getpid()

    def receive(self, timeout: float | None = None) -> int | None:
        assert self.receiver is not None
        return self.receiver.receive(timeout)

    def serve(self) -> int:
        """Receive until the sender has gone."""
        assert self.receiver is not None
        try:
            while True:
                self.receiver.receive()
        except SenderLostError:
            return self.receiver.version

    def values(self) -> set[float]:
        return {v for p in self.model.parameters() for v in p.detach().flatten().tolist()}

    def call(self, function: Callable[[Worker], Any]) -> Any:
        return function(self)


class Workers:
    """A sender and the workers that it serves."""

    def __init__(self, sender: Sender, group: WorkerGroup) -> None:
        self.sender = sender
        self.group = group
        self.connect(*sender.all_worker_ids())

    def connect(self, *worker_ids: int) -> None:
        for worker_id in worker_ids:
            address = self.sender.address(worker_id)
            self.group.call(worker_id, Worker.connect, address).result(30)

    def pid(self, worker_id: int) -> int:
        return self.group.call(worker_id, lambda _worker: os.getpid()).result(30)

    def receive(self, *worker_ids: int, timeout: float = 20.0) -> list[Any]:
        return [self.group.call(i, Worker.receive, timeout) for i in worker_ids]

    def send(self, *args: Any, **kwargs: Any) -> SendReport:
        """Send while every worker receives."""
        pending = self.sender.send_async(*args, **kwargs)
        ids = self.sender.all_worker_ids()
        calls = self.receive(*ids, timeout=2.0 if kwargs.get("worker_ids") is not None else 20.0)
        try:
            return pending.wait()
        finally:
            for call in calls:
                call.exception(30)

    def values(self) -> list[set[float]]:
        return [self.group.call(i, Worker.values).result(30) for i in self.sender.all_worker_ids()]


_groups: dict[type[WorkerGroup], WorkerGroup] = {}


@pytest.fixture(autouse=True, scope="module")
def _groups_are_stopped() -> Iterator[None]:
    yield
    while _groups:
        _groups.popitem()[1].stop()


def group_of(scheme: str) -> WorkerGroup:
    """Three workers, started once for all tests; those that a test has killed are replaced."""
    group_type = GROUPS[scheme]
    if group_type not in _groups:
        _groups[group_type] = group_type(Worker, 3)
    group = _groups[group_type]
    for worker_id in group.worker_ids:
        if not group.alive(worker_id):
            group.restart(worker_id)
        group.call(worker_id, Worker.reset).result(30)
    return group


@contextmanager
def started(scheme: str, model: Any, num_workers: int = 2, **options: Any) -> Iterator[Workers]:
    with Sender(scheme, model, num_workers=num_workers, **options) as sender:
        yield Workers(sender, group_of(scheme))


@pytest.fixture(params=GROUPS)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["shm", "mp"])
def process_scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("zero_copy", [False, True], ids=["copy", "zero_copy"])
def test_every_worker_gets_every_version(scheme: str, zero_copy: bool) -> None:
    policy = make_policy(1.0)
    with started(scheme, policy, zero_copy=zero_copy) as workers:
        for version in range(1, 6):
            fill(policy, float(version))
            report = workers.send()
            assert (report.version, report.updated, report.failed) == (version, (0, 1), {})
            assert workers.values() == [{float(version)}] * 2
            assert report.nbytes > 0
            assert all(0 < result.seconds <= report.seconds for result in report.workers.values())


def test_blocking_send_returns_when_everybody_has_committed(scheme: str) -> None:
    policy = make_policy(7.0)
    with started(scheme, policy) as workers:
        serving = [workers.group.call(i, Worker.serve) for i in (0, 1)]
        assert workers.sender.send().updated == (0, 1)
        assert workers.sender.send().version == 2
        workers.sender.close()
        assert [call.result(30) for call in serving] == [2, 2]
        assert workers.group.call(0, Worker.values).result(30) == {7.0}


@pytest.mark.parametrize("zero_copy", [False, True], ids=["copy", "zero_copy"])
def test_a_step_after_send_async_changes_nothing_that_arrives(scheme: str, zero_copy: bool) -> None:
    policy = make_policy(1.0)
    with started(scheme, policy, zero_copy=zero_copy) as workers:
        pending = workers.sender.send_async()
        fill(policy, 9.0)
        workers.receive(0, 1)
        pending.wait()
        assert workers.values() == [{1.0}, {1.0}]


def test_the_trainers_module_is_never_altered(scheme: str) -> None:
    policy = make_policy(1.0)
    pointers = [tensor.data_ptr() for tensor in (*policy.parameters(), *policy.buffers())]
    with started(scheme, policy) as workers:
        workers.send()
        assert not any(parameter.is_shared() for parameter in policy.parameters())
    assert [t.data_ptr() for t in (*policy.parameters(), *policy.buffers())] == pointers


def test_some_workers_only(scheme: str) -> None:
    policy = make_policy(1.0)
    with started(scheme, policy, num_workers=3) as workers:
        report = workers.send(worker_ids=[2, 0])
        assert report.updated == (0, 2)
        assert workers.values() == [{1.0}, {0.0}, {1.0}]


def test_the_forms_of_weights(scheme: str) -> None:
    with started(scheme, make_policy(), num_workers=1) as workers:
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


def test_weights_found_by_a_path_in_a_context() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.nets = {"actor": make_policy(3.0)}

    with Sender("thread", "nets['actor']", context=Trainer(), num_workers=1) as sender:
        worker = Worker(0)
        receiver = Receiver(sender.address(0), "model", context=worker)
        pending = sender.send_async()
        assert receiver.receive() == 1
        assert pending.wait().updated == (0,)
        assert (worker.model[0].weight == 3).all()
        receiver.close()


def test_addresses_pickle() -> None:
    with Sender("shm", make_policy(), num_workers=1) as sender:
        address = sender.address(0)
        assert pickle.loads(pickle.dumps(address)) == address
        assert address.token not in repr(address)


def test_the_newest_version_is_the_one_that_counts(scheme: str) -> None:
    policy = make_policy(1.0)
    with started(scheme, policy, num_workers=1) as workers:
        for value in (1.0, 2.0, 3.0):
            fill(policy, value)
            pending = workers.sender.send_async()
            with pytest.raises(SendError):
                pending.wait(0.0)
        assert workers.receive(0)[0].result(30) == 3
        assert workers.values() == [{3.0}]
        assert workers.receive(0, timeout=0.0)[0].result(30) is None


def test_a_late_answer_counts_for_no_other_send(scheme: str) -> None:
    policy = make_policy(1.0)
    with started(scheme, policy, num_workers=1) as workers:
        pending = workers.sender.send_async()
        with pytest.raises(SendError) as failure:
            pending.wait(0.01)
        assert isinstance(failure.value.report.workers[0].error, WorkerTimeoutError)
        workers.receive(0)[0].result(30)
        late = workers.sender.send_async()
        assert not late.done()
        workers.receive(0)[0].result(30)
        assert late.wait().updated == (0,)


def test_looking_for_news_answers_at_once(scheme: str) -> None:
    with started(scheme, make_policy(), num_workers=1) as workers:
        assert workers.group.call(0, Worker.receive, 0.0).result(30) is None

        def look_often(worker: Worker) -> float:
            begin = time.perf_counter()
            for _ in range(200):
                worker.receive(0.0)
            return time.perf_counter() - begin

        assert workers.group.call(0, look_often).result(30) < 1.0


def test_waiting_for_news_ends_in_time(scheme: str) -> None:
    with started(scheme, make_policy(), num_workers=1) as workers:

        def wait(worker: Worker) -> float:
            begin = time.perf_counter()
            assert worker.receive(0.2) is None
            return time.perf_counter() - begin

        assert 0.2 <= workers.group.call(0, wait).result(30) < 1.5
        workers.send()
        assert workers.values() == [{0.0}]


def test_two_schemes_and_two_senders_at_once() -> None:
    group = group_of("shm")
    with (
        Sender("shm", make_policy(1.0), num_workers=1, model_id="actor") as first,
        Sender("mp", make_policy(2.0), num_workers=1, model_id="critic") as second,
        Sender("shm", make_policy(3.0), num_workers=1) as third,
    ):
        senders = (first, second, third)
        for worker_id, sender in enumerate(senders):
            group.call(worker_id, Worker.connect, sender.address(0)).result(30)
        pending = [sender.send_async() for sender in senders]
        for worker_id in range(3):
            group.call(worker_id, Worker.receive, 20.0)
        assert all(send.wait().updated == (0,) for send in pending)
        values = [group.call(worker_id, Worker.values).result(30) for worker_id in range(3)]
        assert values == [{1.0}, {2.0}, {3.0}]


@pytest.mark.parametrize("worker_id", [-1, 2, True, "0", 0.0, None], ids=repr)
def test_ids_that_are_none(worker_id: Any) -> None:
    with Sender("thread", make_policy(), num_workers=2) as sender:
        with pytest.raises(UnknownWorkerError, match="there is no worker"):
            sender.send(worker_ids=[0, worker_id])
        assert sender.version == 0


def test_ids_that_are() -> None:
    with started("thread", make_policy(), num_workers=2) as workers:
        assert workers.send(worker_ids=np.int64(1)).updated == (1,)
        assert workers.send(worker_ids=[1, 1, np.int32(1)]).updated == (1,)
        assert workers.sender.version == 2
        report = workers.sender.send(worker_ids=[])
        assert (report.version, dict(report.workers)) == (2, {})


def test_sending_while_a_send_is_pending() -> None:
    with started("thread", make_policy(), num_workers=1) as workers:
        with pytest.raises(PendingSendError, match="call send_async"):
            workers.sender.wait_async()
        pending = workers.sender.send_async()
        for send in (workers.sender.send, workers.sender.send_async):
            with pytest.raises(PendingSendError, match="call wait_async"):
                send()
        workers.receive(0)
        assert workers.sender.wait_async(30) is pending.wait()


def test_after_a_send_that_failed_the_next_one_works(scheme: str) -> None:
    with started(scheme, make_policy(1.0), num_workers=1, timeout=20.0) as workers:
        with pytest.raises(SendError, match="did not confirm version 1 within"):
            workers.sender.send(timeout=0.1)
        assert workers.send().updated == (0,)


def test_an_apply_that_raises_reaches_the_sender(scheme: str) -> None:
    with started(scheme, make_policy(1.0)) as workers:

        def shrink(worker: Worker) -> None:
            worker.model[0].weight = nn.Parameter(torch.full((1, 1), 5.0))

        workers.group.call(1, shrink).result(30)
        with pytest.raises(SendError) as failure:
            workers.send()
        report = failure.value.report
        assert report.updated == (0,)
        assert isinstance(report.workers[1].error, ApplyError)
        assert "'0.weight' is float32[4, 3] in the weights and float32[1, 1]" in str(failure.value)
        assert workers.values() == [{1.0}, {0.0, 5.0}]


def test_a_model_that_does_not_fit_is_refused_at_once() -> None:
    with (
        Sender("thread", make_policy(), num_workers=1) as sender,
        pytest.raises(LayoutMismatchError, match=r"'0.weight' is in the weights, not in the model"),
    ):
        Receiver(sender.address(0), nn.Linear(3, 4))


def test_weights_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    with Sender("thread", make_policy(), num_workers=1) as sender:
        for weights in ({"0.weight": torch.ones(1)}, nn.Linear(2, 2), {}):
            with pytest.raises(LayoutMismatchError):
                sender.send(weights)
        assert sender.version == 0


def test_a_partial_update(scheme: str) -> None:
    with started(scheme, make_policy(), num_workers=1, partial=True) as workers:
        workers.send({"0.bias": torch.full((4,), 6.0)})
        assert workers.values() == [{0.0, 6.0}]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.LazyLinear(2), "no shape yet"),
        ({}, "no tensors"),
        (nn.Sequential(), "no tensors"),
        (3, "cannot read weights from a int"),
    ],
)
def test_models_that_cannot_be_sent(model: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Sender("thread", model, num_workers=1)


def test_a_lazy_model_in_the_worker() -> None:
    with (
        Sender("thread", nn.Linear(3, 2), num_workers=1) as sender,
        pytest.raises(ModelError, match="run the model once"),
    ):
        Receiver(sender.address(0), nn.LazyLinear(2))


def test_options_that_do_not_exist() -> None:
    with pytest.raises(OptionError, match="'shm' has no option 'slot'; its options are: direct"):
        Sender("shm", make_policy(), num_workers=1, slot=3)
    with pytest.raises(OptionError, match=r"layers=\['bf16'\]"):
        Sender("shm", make_policy(), num_workers=1, layers="bf16")


def test_a_closed_sender() -> None:
    with started("thread", make_policy(), num_workers=1) as workers:
        workers.sender.close()
        workers.sender.close()
        with pytest.raises(ClosedError):
            workers.sender.send()
        with pytest.raises(ClosedError):
            workers.sender.address(0)


def test_receivers_learn_that_the_sender_closed(scheme: str) -> None:
    with started(scheme, make_policy(), num_workers=1) as workers:
        waiting = workers.group.call(0, Worker.receive, 30.0)
        time.sleep(0.2)
        workers.sender.close()
        failure = waiting.exception(30)
        assert failure is not None
        assert isinstance(failure.__cause__, SenderLostError)


@pytest.mark.parametrize("zero_copy", [False, True], ids=["copy", "zero_copy"])
def test_a_worker_keeps_its_weights_when_the_sender_is_gone(scheme: str, zero_copy: bool) -> None:
    with started(scheme, make_policy(4.0), num_workers=1, zero_copy=zero_copy) as workers:
        workers.send()
        workers.sender.close()
        assert workers.group.call(0, Worker.values).result(30) == {4.0}

        def close(worker: Worker) -> None:
            assert worker.receiver is not None
            worker.receiver.close()
            fill(worker.model, 5.0)

        workers.group.call(0, close).result(30)
        assert workers.group.call(0, Worker.values).result(30) == {5.0}


def test_a_worker_that_joins_late_gets_the_newest_version(scheme: str) -> None:
    with started(scheme, make_policy(8.0), num_workers=1) as workers:
        workers.send()
        new = workers.sender.add_worker()
        assert new == 1
        workers.connect(new)
        assert workers.receive(new)[0].result(30) == 1
        assert workers.values() == [{8.0}, {8.0}]
        assert workers.send().updated == (0, 1)


def test_a_worker_that_is_removed(scheme: str) -> None:
    with started(scheme, make_policy(1.0)) as workers:
        workers.sender.remove_worker(0)
        assert workers.sender.all_worker_ids() == (1,)
        with pytest.raises(UnknownWorkerError):
            workers.sender.send(worker_ids=0)
        assert workers.send().updated == (1,)


def test_killed_before_a_send(process_scheme: str) -> None:
    with started(process_scheme, make_policy(1.0)) as workers:
        os.kill(workers.pid(0), signal.SIGKILL)
        with pytest.raises(SendError) as failure:
            workers.send()
        report = failure.value.report
        assert isinstance(report.workers[0].error, WorkerLostError)
        assert report.updated == (1,)
        assert report.seconds < 10


def test_killed_during_a_send(process_scheme: str) -> None:
    with started(process_scheme, make_policy(1.0)) as workers:
        pid = workers.pid(0)
        pending = workers.sender.send_async()
        workers.receive(1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SendError) as failure:
            pending.wait()
        report = failure.value.report
        assert isinstance(report.workers[0].error, WorkerLostError)
        assert str(pid) in str(report.workers[0].error)
        assert report.updated == (1,)
        assert report.seconds < 10


def test_killed_after_a_send_and_back_again(process_scheme: str) -> None:
    policy = make_policy(1.0)
    with started(process_scheme, policy) as workers:
        workers.send()
        os.kill(workers.pid(0), signal.SIGKILL)
        workers.group.restart(0)
        workers.connect(0)
        assert workers.receive(0)[0].result(30) == 1
        assert workers.group.call(0, Worker.values).result(30) == {1.0}
        fill(policy, 2.0)
        assert workers.send().updated == (0, 1)


def test_stopped_for_a_while(process_scheme: str) -> None:
    policy = make_policy(1.0)
    with started(process_scheme, policy, timeout=20.0) as workers:
        pid = workers.pid(0)
        os.kill(pid, signal.SIGSTOP)
        try:
            for value in range(2, 8):
                fill(policy, float(value))
                pending = workers.sender.send_async()
                workers.receive(1)
                with pytest.raises(SendError) as failure:
                    pending.wait(0.5)
                report = failure.value.report
                assert report.updated == (1,)
                assert isinstance(report.workers[0].error, WorkerTimeoutError)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert workers.receive(0)[0].result(30) == 6
        assert workers.values() == [{7.0}, {7.0}]


def test_dropped_when_it_fails(process_scheme: str) -> None:
    with started(process_scheme, make_policy(1.0), on_failure="drop") as workers:
        os.kill(workers.pid(0), signal.SIGKILL)
        pending = workers.sender.send_async()
        workers.receive(1)
        report = pending.wait()
        assert (report.dropped, report.updated, report.failed) == ((0,), (1,), {})
        assert workers.sender.all_worker_ids() == (1,)


def test_the_wrong_token_is_refused(scheme: str) -> None:
    if scheme == "thread":
        pytest.skip("within one process there is nobody to keep out")
    with Sender(scheme, make_policy(), num_workers=1) as sender:
        forged = dataclasses.replace(sender.address(0), token="0" * 32)
        with pytest.raises(SenderLostError):
            Receiver(forged, make_policy())


def test_a_second_receiver_takes_the_place_of_the_first() -> None:
    with Sender("shm", make_policy(2.0), num_workers=1) as sender:
        first = Receiver(sender.address(0), make_policy())
        second = Receiver(sender.address(0), make_policy())
        with pytest.raises(SenderLostError, match="another receiver was given the same address"):
            first.receive(5.0)
        pending = sender.send_async()
        assert second.receive() == 1
        assert pending.wait().updated == (0,)
        second.close()


def test_an_address_whose_sender_is_gone() -> None:
    with Sender("shm", make_policy(), num_workers=1) as sender:
        address = sender.address(0)
    with pytest.raises(SenderLostError, match="closed or died"):
        Receiver(address, make_policy())


def test_hooks_run_after_each_send() -> None:
    calls: list[str] = []
    with started("thread", make_policy(), num_workers=1) as workers:
        workers.sender.register_post_hook(lambda: calls.append("first"))
        workers.sender.register_post_hook(lambda: calls.append("second"))
        workers.send()
        with pytest.raises(SendError):
            workers.sender.send(timeout=0.01)
    assert calls == ["first", "second"]


def test_weights_given_by_hand(scheme: str) -> None:
    with started(scheme, make_policy(1.0), num_workers=1, zero_copy=True) as workers:
        workers.send()

        def by_hand(worker: Worker) -> int | None:
            assert worker.receiver is not None
            return worker.receiver.update_weights(make_policy(9.0).state_dict())

        assert workers.group.call(0, by_hand).result(30) == 1
        assert workers.values() == [{9.0}]


@pytest.mark.parametrize("zero_copy", [False, True], ids=["copy", "zero_copy"])
def test_nothing_is_left_behind(scheme: str, zero_copy: bool) -> None:
    def resources() -> tuple[int, set[str], int]:
        gc.collect()
        names = {path.name for path in Path("/dev/shm").iterdir()}
        return len(list(Path("/proc/self/fd").iterdir())), names, threading.active_count()

    with started(scheme, make_policy(), num_workers=1) as workers:
        workers.send()
    before = resources()
    for _ in range(3):
        with started(scheme, make_policy(), num_workers=2, zero_copy=zero_copy) as workers:
            workers.send()
    assert resources() == before


@pytest.mark.parametrize("scheme", ["shm", "mp"])
@pytest.mark.parametrize(
    ("directory", "where"), [(None, "memory"), ("/dev/shm", "/dev/shm")], ids=["memfd", "dev_shm"]
)
def test_a_model_that_is_too_large_for_memory(
    scheme: str, directory: str | None, where: str
) -> None:
    model = {"weight": torch.zeros(1, dtype=torch.uint8).expand(2**44)}
    message = rf"a slot needs \d{{14}} bytes of {where}, \d+ are available; "
    with pytest.raises(CapacityError, match=message):
        Sender(scheme, model, num_workers=1, directory=directory)


def test_slots_in_a_directory(tmp_path: Path) -> None:
    policy, target = make_policy(3.0), make_policy()
    with Sender("shm", policy, num_workers=1, directory=str(tmp_path)) as sender:
        receiver = Receiver(sender.address(0), target)
        pending = sender.send_async()
        assert receiver.receive() == 1
        assert pending.wait().updated == (0,)
        assert not list(tmp_path.iterdir())
    with pytest.raises(OptionError, match="cannot hold slots"):
        Sender("shm", policy, num_workers=1, directory=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("zero_copy", [False, True], ids=["copy", "zero_copy"])
def test_the_trainer_is_killed(tmp_path: Path, zero_copy: bool) -> None:
    source = f"""
import pickle, sys, time, torch
from sync_core import Sender
weights = {{"weight": torch.full((1000,), 5.0)}}
sender = Sender("shm", weights, num_workers=1, zero_copy={zero_copy})
with open({str(tmp_path / "address")!r}, "wb") as file:
    pickle.dump(sender.address(0), file)
print("ready", flush=True)
sender.send()
time.sleep(60)
"""
    trainer = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    try:
        assert trainer.stdout.readline() == b"ready\n"
        target = {"weight": torch.zeros(1000)}
        receiver = Receiver(pickle.loads((tmp_path / "address").read_bytes()), target)
        assert receiver.receive() == 1
        trainer.kill()
        trainer.wait()
        with pytest.raises(SenderLostError):
            receiver.receive(10.0)
        assert (target["weight"] == 5).all()
        target["weight"] += 1
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()


def test_a_slot_that_is_read_is_never_written_to() -> None:
    policy, target = make_policy(1.0), make_policy()
    with Sender("shm", policy, num_workers=2, zero_copy=True, slots=2, timeout=1.0) as sender:
        reader = Receiver(sender.address(0), target)
        other = Receiver(sender.address(1), make_policy())
        for value, receiver in ((1.0, reader), (2.0, other)):
            fill(policy, value)
            with pytest.raises(SendError):
                sender.send_async().wait(0)
            receiver.receive()
        fill(policy, 3.0)
        with pytest.raises(CapacityError, match=r"worker 0 .* worker 1 .* more slots="):
            sender.send()
        assert all((parameter == 1).all() for parameter in target.parameters())
        reader.close()
        with pytest.raises(SendError):
            sender.send_async().wait(0)
        assert other.receive() is not None
        assert all((parameter == 1).all() for parameter in target.parameters())
        other.close()


def test_pipes_that_exist_already() -> None:
    mine, theirs = multiprocessing.Pipe()
    policy, target = make_policy(2.0), make_policy()
    with Sender("mp", policy, workers=[mine]) as sender:
        address = pickle.loads(pickle.dumps(sender.address(0)))
        with pytest.raises(AddressError, match=r"with_pipe\(address, connection\)"):
            Receiver(address, target)
        receiver = Receiver(with_pipe(address, theirs), target)
        pending = sender.send_async()
        assert receiver.receive() == 1
        assert pending.wait().updated == (0,)
        assert {v for p in target.parameters() for v in p.flatten().tolist()} == {2.0}
        receiver.close()
    for end in (mine, theirs):
        end.close()
    with pytest.raises(OptionError, match="no duplex pipe"):
        Sender("mp", policy, workers=["worker"])


def test_an_address_of_a_pipe_is_good_for_one_receiver() -> None:
    with Sender("mp", make_policy(), num_workers=1) as sender:
        address = sender.address(0)
        Receiver(address, make_policy()).close()
        with pytest.raises(AddressError, match="good for one receiver"):
            Receiver(address, make_policy())
        Receiver(sender.address(0), make_policy()).close()
