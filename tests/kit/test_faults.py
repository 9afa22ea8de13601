"""The fault kit: faults strike at the points that they name, and leave a scheme as it was."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from chaos_kit import SUBJECTS, Outcome, Verdict
from chaos_kit.ledger import Ledger
from chaos_kit.outcome import Complaint, Journal, table
from chaos_kit.plan import Round
from chaos_kit.torn import hunt
from torch import Tensor

from sync_core import (
    ApplyError,
    CapacityError,
    Delivery,
    Layout,
    LayoutMismatchError,
    Payload,
    Receiver,
    Sender,
    SendError,
    SenderTransport,
    SendReport,
    SyncError,
    TransportContext,
    WorkerResult,
    WorkerTimeoutError,
    hookimpl,
)
from sync_testing import descendants, eventually
from sync_testing.faults import (
    POINTS,
    Fault,
    Faulty,
    InjectedFaultError,
    Raising,
    few_descriptors,
    fork,
    full,
    small_files,
    stop,
)
from sync_testing.faults.fault import gated

pytestmark = pytest.mark.timeout(60)


def make_model(value: float) -> dict[str, Tensor]:
    return {name: torch.full((100,), value) for name in ("first", "second")}


def held(model: dict[str, Tensor]) -> set[float]:
    return {value for tensor in model.values() for value in tensor.tolist()}


@contextmanager
def connected(
    *faults: Fault, layers: tuple[object, ...] = (), timeout: float = 0.2
) -> Iterator[tuple[Sender, Receiver, dict[str, Tensor]]]:
    """A trainer whose weights are 7, and a worker's model of zeros."""
    target = make_model(0.0)
    with (
        Sender(
            Faulty("thread", *faults),
            make_model(7.0),
            num_workers=1,
            layers=layers,
            timeout=timeout,
        ) as sender,
        Receiver(sender.address(0), target) as receiver,
    ):
        yield sender, receiver, target


def error_of(sender: Sender, receiver: Receiver) -> SyncError | None:
    """Return what the sender says of its worker, which receives once."""
    pending = sender.send_async()
    receiver.receive(0.0)
    try:
        pending.wait()
    except SendError as error:
        return error.report.workers[0].error
    return None


@pytest.mark.parametrize(
    ("point", "action", "error", "value"),
    [
        ("staged", "drop", WorkerTimeoutError, 0.0),
        ("acknowledge", "drop", WorkerTimeoutError, 7.0),
        ("acknowledge", "duplicate", None, 7.0),
        ("staged", "duplicate", None, 7.0),
        ("staged", "delay", None, 7.0),
        ("commit", "delay", None, 7.0),
        ("transfer", "delay", None, 7.0),
        ("transfer", "fork", None, 7.0),
        ("transfer", "exec", None, 7.0),
    ],
)
def test_what_the_sender_says_and_what_the_worker_has(
    point: str, action: str, error: type[SyncError] | None, value: float
) -> None:
    fault = Fault(action=action, point=point, version=1, seconds=0.05)
    with connected(fault) as (sender, receiver, target):
        assert isinstance(error_of(sender, receiver), error or type(None))
        assert held(target) == {value}
        # A fault strikes once.
        receiver.receive(0.0)
        assert error_of(sender, receiver) is None
        assert held(target) == {7.0}


def test_whoever_waits_for_a_version_is_not_sent_home_by_an_old_one_that_comes_again() -> None:
    fault = Fault(action="duplicate", point="staged", version=1)
    with connected(fault, timeout=10.0) as (sender, receiver, target):
        assert error_of(sender, receiver) is None
        started = time.monotonic()
        assert receiver.receive(0.3) is None
        assert time.monotonic() - started >= 0.3
        assert held(target) == {7.0}


@pytest.mark.parametrize("layers", [(), ("checksum",)], ids=["plain", "with extras"])
def test_a_version_with_names_that_are_not_the_models(layers: tuple[object, ...]) -> None:
    fault = Fault(action="misname", point="staged", version=1)
    with connected(fault, layers=layers) as (sender, receiver, target):
        pending = sender.send_async()
        with pytest.raises(LayoutMismatchError, match=re.escape("'first?'")):
            receiver.receive()
        with pytest.raises(SendError) as failure:
            pending.wait()
        assert isinstance(failure.value.report.workers[0].error, ApplyError)
        assert held(target) == {0.0}


def test_one_bit_of_a_byte_is_changed() -> None:
    fault = Fault(action="corrupt", point="staged", version=1, at_byte=3)
    with connected(fault) as (sender, receiver, target):
        assert error_of(sender, receiver) is None
        assert (target["first"][1:] == 7).all()
        assert target["first"][0] != 7


@pytest.mark.parametrize("point", ["connect", "receive", "staged", "acknowledge"])
def test_raised_in_the_worker(point: str) -> None:
    fault = Fault(action="raise", point=point, version=1)
    with pytest.raises(InjectedFaultError, match=point), connected(fault) as (sender, receiver, _):
        error_of(sender, receiver)


def test_what_comes_before_a_version_strikes_after_an_answer_that_raised() -> None:
    faults = [
        Fault(action="raise", point="acknowledge", version=1),
        Fault(action="raise", point="receive", version=2),
    ]
    with connected(*faults) as (sender, receiver, target):
        for point in ("acknowledge", "receive"):
            with pytest.raises(InjectedFaultError, match=point):
                error_of(sender, receiver)
            with pytest.raises(SendError):
                sender.wait_async()
            assert held(target) == {7.0}


def test_what_comes_before_a_version_strikes_after_one_that_the_transport_refused() -> None:
    refusing = Faulty("thread", Fault(action="raise", point="staged", version=1))
    scheme = Faulty(refusing, Fault(action="raise", point="receive", version=2))
    with (
        Sender(scheme, make_model(7.0), num_workers=1, timeout=0.2) as sender,
        Receiver(sender.address(0), make_model(0.0)) as receiver,
    ):
        for point in ("staged", "receive"):
            with pytest.raises(InjectedFaultError, match=point):
                error_of(sender, receiver)
            with pytest.raises(SendError):
                sender.wait_async()


def test_raised_while_a_version_is_packed() -> None:
    with connected(Fault(action="raise", point="transfer", version=1)) as (
        sender,
        receiver,
        target,
    ):
        with pytest.raises(SendError, match="scheme 'Faulty'") as raised:
            sender.send()
        assert isinstance(raised.value.__cause__, InjectedFaultError)
        assert receiver.receive(0.0) is None
        assert error_of(sender, receiver) is None
        assert held(target) == {7.0}


def test_for_other_workers_and_versions_nothing_happens() -> None:
    faults = [
        Fault(action="raise", point="staged", version=2),
        Fault(action="raise", point="staged", version=1, worker_ids=(1, 2)),
    ]
    with connected(*faults) as (sender, receiver, _):
        assert error_of(sender, receiver) is None


def test_who_connects_later_suffers_later_faults_only() -> None:
    faults = [Fault(action="drop", point="staged", version=v) for v in (1, 2)]
    with connected(*faults) as (sender, receiver, _):
        assert error_of(sender, receiver) is not None
        receiver.close()
        with Receiver(sender.address(0), make_model(0.0)) as other:
            assert other.receive(0.0) == 1
            assert error_of(sender, other) is not None


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("hook", ["prepare_weights", "skip_update"])
def test_hooks_of_the_trainer_that_raise(hook: str, late: bool) -> None:
    with connected(layers=(Raising(hook, 1, late=late),)) as (sender, receiver, target):
        with pytest.raises(InjectedFaultError, match=hook):
            sender.send()
        assert receiver.receive(0.0) is None
        assert sender.version == 0
        assert error_of(sender, receiver) is None
        assert held(target) == {7.0}


def test_faults_and_layers_pickle() -> None:
    fault = Fault(action="drop", point="staged", version=1)
    with connected(fault, layers=(Raising("apply_weights", 1),)) as (sender, _, _target):
        address = pickle.loads(pickle.dumps(sender.address(0)))
        assert address.scheme.capabilities == Faulty("thread").capabilities


@pytest.mark.parametrize("point", POINTS)
def test_actions_that_a_point_does_not_have(point: str) -> None:
    with pytest.raises(ValueError, match=f"at '{point}' one can"):
        Fault(action="explode", point=point, version=1)


def test_hooks_and_points_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="no point 'nowhere'; the points: connect, receive"):
        Fault(action="kill", point="nowhere", version=1)
    with pytest.raises(ValueError, match="no hook 'create_transport'"):
        Raising("create_transport", 1)


def test_a_fork_ends_and_is_reaped() -> None:
    before = descendants()
    fork(0.05)
    assert descendants() - before
    assert eventually(lambda: not descendants() - before)


def test_limits_end_with_the_block() -> None:
    with few_descriptors(), pytest.raises(OSError, match="Too many open files"):
        os.pipe()
    for end in os.pipe():
        os.close(end)
    with small_files(4096), tempfile.TemporaryFile() as file, pytest.raises(OSError, match="large"):
        os.posix_fallocate(file.fileno(), 0, 8192)


def test_no_room_in_shared_memory() -> None:
    model = {"weight": torch.ones(100_000)}
    before = set(os.listdir("/proc/self/fd"))
    with small_files(100_000), pytest.raises(CapacityError, match="a slot needs"):
        Sender("shm", model, num_workers=1)
    assert set(os.listdir("/proc/self/fd")) == before
    Sender("shm", model, num_workers=1).close()


def test_a_directory_too_large_to_be_filled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use small_files"), full(str(tmp_path), at_most=0):
        pass
    with full(str(tmp_path), left=2**62):
        pass
    assert not list(tmp_path.iterdir())


def test_the_ledger_says_what_is_not_as_documented() -> None:
    ledger = Ledger()
    ledger.round = Round(1, "drop the version", (0,))
    workers = {i: WorkerResult(version=1, seconds=0.1, nbytes=4) for i in range(3)}
    report = SendReport(1, 0.1, workers)
    ledger.compare(report, None, {0: [0.0], 1: [0.0, 1.0], 2: [0.0]})
    assert sorted((c.verdict, c.detail.partition(": ")[2]) for c in ledger.complaints) == [
        (Verdict.LOST, "worker 0 confirmed, and has [0.0]"),
        (Verdict.LOST, "worker 2 confirmed, and has [0.0]"),
        (Verdict.OTHER, "worker 0 has None, not WorkerTimeoutError"),
        (Verdict.TORN, "worker 1 has [0.0, 1.0]"),
    ]


def test_outcomes_are_kept_and_counted(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    complaint = Complaint(Verdict.TORN, "two versions")
    for complaints in ((), (complaint,)):
        journal.add(Outcome("a", "shm", ("drop the answer",), 1.0, complaints))
    journal.add(Outcome("b", "shm", ("drop the answer", "wrong names"), 1.0))
    read = journal.read()
    assert [outcome.complaints for outcome in read] == [(complaint,), ()]
    assert "| shm | drop the answer | 2 | 0 | 1 | 0 | 0 | 0 |" in table(read)
    assert "| shm | wrong names | 1 | 0 | 0 | 0 | 0 | 0 |" in table(read)


def test_torn_reads_are_looked_for() -> None:
    seen = hunt(SUBJECTS["thread"], reads=2_000, zero_copy=True, kill_every=None)
    assert seen.reads >= 2_000
    assert seen.versions > 0
    assert (seen.torn, seen.backwards) == (0, 0)


def test_the_page_about_them(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "authors" / "faults.md"
    code, printed = re.findall(r"```(?:python|text)\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile(code, str(page), "exec"), {})
    assert capsys.readouterr().out == printed


_STOPS_ITSELF = """
import os, threading, time
from sync_testing.faults import stop
ended = threading.Event()
def run():
    begin = time.monotonic()
    stop(os.getpid())
    print(time.monotonic() - begin)
    ended.set()
threading.Thread(target=run).start()
while not ended.is_set():
    pass
"""


def test_a_thread_that_stops_its_process_does_not_run_on() -> None:
    command = [sys.executable, "-c", _STOPS_ITSELF]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        stopped = eventually(lambda: _state(program.pid) == "T", 30.0)
        time.sleep(0.1)
        os.kill(program.pid, signal.SIGCONT)
        seconds, _ = program.communicate()
    assert stopped
    assert float(seconds) > 0.1


def test_a_process_that_was_stopped_stands_still() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as program:
        stop(program.pid)
        state = _state(program.pid)
        program.kill()
    assert state == "T"


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_fault_strikes_where_a_view_of_the_memory_is_copied() -> None:
    made: list[str] = []
    tensors = torch.ones(2), torch.ones(4)
    layout = Layout.of({"a": tensors[0], "b": tensors[1]})
    _, second = gated(tensors, layout, 64, lambda: made.append("struck"))
    view = second.detach().view(-1).view(torch.uint8)
    assert made == []
    assert view.numpy().nbytes == 16
    assert made == ["struck"]


class Idle(SenderTransport):
    """Sends nothing."""

    capabilities = frozenset({"pull"})

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport:
        del context
        return self

    def address(self, worker_id: int) -> None:
        del worker_id

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        return {i: Delivery(i, payload.version, payload.nbytes) for i in worker_ids}

    def add_worker(self, worker_id: int, worker: object = None) -> None:
        del worker_id, worker

    def remove_worker(self, worker_id: int) -> None:
        del worker_id

    def close(self) -> None:
        pass


def test_a_fault_that_could_not_strike_is_told() -> None:
    faults = [Fault(action="delay", point="transfer", version=version) for version in (1, 2)]
    scheme = Faulty(Idle(), *faults)
    with Sender(scheme, make_model(7.0), num_workers=1) as sender:
        sender.send_async()
    assert scheme.missed == (faults[0],)
