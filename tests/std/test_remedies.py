"""Workers that are killed or stopped, and what a sender does about them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sync_core import Address, OptionError, Receiver, RemoteCallError, Sender, WorkerGroup
from sync_plugin_std import Restart
from sync_plugin_std.workers import InlineGroup, ProcessGroup, ThreadGroup

pytestmark = pytest.mark.timeout(60)


class Hosted:
    """The object that a worker of a group hosts."""

    def __init__(self, worker_id: int) -> None:
        self.target = {"w": torch.zeros(2)}
        self.receiver: Receiver | None = None

    def connect(self, address: Address) -> int:
        self.receiver = Receiver(address, self.target)
        return os.getpid()

    def rejoin(self, address: Address) -> None:
        self.connect(address)
        self.receive()

    def receive(self) -> int | None:
        assert self.receiver is not None
        return self.receiver.receive(5.0)

    def value(self) -> float:
        return self.target["w"][0].item()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(scope="module")
def processes() -> Iterator[WorkerGroup]:
    with ProcessGroup(Hosted, 2, torch_threads=1) as group:
        yield group


def connect(sender: Sender, group: WorkerGroup) -> list[int]:
    return [group.call(i, Hosted.connect, sender.address(i)).result(20) for i in (0, 1)]


def send(sender: Sender, group: WorkerGroup, value: float, *receiving: int) -> Any:
    pending = sender.send_async({"w": torch.full((2,), value)})
    calls = [group.call(worker_id, Hosted.receive) for worker_id in receiving]
    try:
        return pending.wait()
    finally:
        for call in calls:
            call.exception(20)


@pytest.mark.parametrize("scheme", ["shm", "mp"])
def test_a_killed_worker_is_restarted_and_comes_up_to_date(
    processes: WorkerGroup, scheme: str
) -> None:
    events = []
    weights = {"w": torch.zeros(2)}
    with Sender(
        scheme,
        weights,
        num_workers=2,
        timeout=20.0,
        on_failure=Restart(processes, Hosted.rejoin),
    ) as sender:
        pids = connect(sender, processes)
        sender.subscribe(lambda event: events.append((event.worker_id, event.after)))
        assert send(sender, processes, 1.0, 0, 1).updated == (0, 1)
        os.kill(pids[0], signal.SIGKILL)
        report = send(sender, processes, 2.0, 1)
        assert (report.updated, report.restarted, report.failed) == ((1,), (0,), {})
        assert report.seconds < 5
        # No send waits for the one that is being started.
        assert send(sender, processes, 3.0, 1).updated == (1,)
        wait_until(lambda: sender.workers[0].state == "current")
        assert processes.call(0, Hosted.value).result(20) == 3.0
        assert send(sender, processes, 4.0, 0, 1).updated == (0, 1)
    assert [after for worker_id, after in events if worker_id == 0 and after != "behind"] == [
        "current",
        "lost",
        "restarting",
        "current",
        "current",
    ]


def test_a_stopped_worker_is_waited_for_once_and_comes_back_up_to_date(
    processes: WorkerGroup,
) -> None:
    weights = {"w": torch.zeros(2)}
    with Sender("shm", weights, num_workers=2, timeout=2.0, on_failure="quarantine") as sender:
        pids = connect(sender, processes)
        os.kill(pids[0], signal.SIGSTOP)
        try:
            stuck = processes.call(0, Hosted.receive)
            assert send(sender, processes, 1.0, 1).quarantined == (0,)
            begin = time.monotonic()
            for value in (2.0, 3.0, 4.0):
                report = send(sender, processes, value, 1)
                assert (report.updated, report.quarantined) == ((1,), (0,))
            assert time.monotonic() - begin < 2.0, "a worker in quarantine was waited for"
        finally:
            os.kill(pids[0], signal.SIGCONT)
        assert stuck.result(20) == 4
        wait_until(lambda: sender.workers[0].state == "current")
        report = send(sender, processes, 5.0, 0, 1)
        assert (report.updated, report.returned) == ((0, 1), (0,))


class Fragile:
    """A hosted object that is made once."""

    made = 0

    def __init__(self, worker_id: int) -> None:
        Fragile.made += 1
        if Fragile.made > 1:
            raise RuntimeError("there is only one of me")


def test_a_worker_that_cannot_be_restarted_is_put_into_quarantine() -> None:
    Fragile.made = 0
    weights = {"w": torch.zeros(2)}
    with (
        ThreadGroup(Fragile, 1) as group,
        Sender("thread", weights, num_workers=1, timeout=1.0, on_failure=Restart(group)) as sender,
    ):
        assert sender.send().restarted == (0,)
        wait_until(lambda: sender.workers[0].state == "quarantined")
        assert "there is only one of me" in str(sender.workers[0].error)
        report = sender.send()
        assert report.quarantined == (0,)
        assert report.seconds < 1.0, "a worker in quarantine was waited for"
        with pytest.raises(RemoteCallError):
            group.restart(0)


def test_workers_that_are_called_cannot_be_restarted() -> None:
    with (
        InlineGroup(Hosted, 1) as group,
        pytest.raises(OptionError, match="has a new handle"),
    ):
        Sender("mp", {"w": torch.zeros(2)}, workers=[object()], on_failure=Restart(group))


class Rigid(InlineGroup):
    """A group that cannot restart workers."""

    capabilities = frozenset()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("process",), OptionError, "group='process' is not a worker group; give the one"),
        ((Rigid(Hosted, 0),), OptionError, "group=Rigid cannot restart its workers"),
        ((InlineGroup(Hosted, 0), 3), TypeError, "on_restart is 3, which cannot be called"),
    ],
)
def test_what_cannot_restart_workers(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        Restart(*arguments)
