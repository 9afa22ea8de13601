"""The standard schemes do what every scheme does, and those between processes a little more."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch

from sync_core import (
    CapacityError,
    ClosedError,
    Layout,
    OptionError,
    Receiver,
    Sender,
    SenderLostError,
    SendError,
)
from sync_core.errors import AddressError
from sync_core.transports import Block
from sync_plugin_std import with_pipe
from sync_plugin_std.local import ProcessEvent, SharedMemoryReceiver
from sync_testing import SchemeConformance, eventually
from sync_testing.faults import Fault, Faulty, few_descriptors
from sync_testing.schemes import (
    DeliveryCases,
    FaultCases,
    IsolationCases,
    LifetimeCases,
    ProtocolCases,
    SchemeCases,
    fill,
    make_policy,
)

pytestmark = pytest.mark.timeout(90)


def mapped_memory() -> set[str]:
    """The shared memory of ours that this process maps."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in maps if "memfd:sync-core" in line}


def opened() -> list[str]:
    """The sockets and the like that this process has open."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        # That of the folder itself is closed by now.
        with suppress(FileNotFoundError):
            links.append(os.readlink(link))
    return sorted(link for link in links if link.startswith(("socket:", "pipe:", "anon_inode:")))


@contextmanager
def no_threads() -> Iterator[None]:
    """Let no thread be started: there is no memory for its stack."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)


def refuse_memory(nbytes: int) -> Block:
    raise CapacityError(f"{nbytes} bytes are too many")


class KeepsVersions(SchemeCases):
    """Of schemes that keep a version for as long as it has readers."""

    # Pieces of shared memory in the end.
    mapped = 0

    def test_each_worker_gets_its_own_version_however_late_it_asks(self) -> None:
        policy, models = make_policy(), [make_policy() for _ in range(5)]
        with self.sender(policy, 5) as sender, ExitStack() as stack:
            receivers = [
                stack.enter_context(Receiver(sender.address(i), model))
                for i, model in enumerate(models)
            ]
            # More versions than there are slots at first.
            for worker_id in range(5):
                fill(policy, worker_id + 1.0)
                with pytest.raises(SendError):
                    sender.send(worker_ids=worker_id, timeout=0)
            assert [receiver.receive(5.0) for receiver in receivers] == [1, 2, 3, 4, 5]
            for version, model in enumerate(models, 1):
                assert all((parameter == version).all() for parameter in model.parameters())

    @pytest.mark.parametrize("views", [True, False], ids=["zero_copy", "stuck"])
    def test_workers_that_fail_at_different_versions(self, views: bool) -> None:
        policy, models = make_policy(), [make_policy() for _ in range(3)]
        before = mapped_memory()
        with (
            self.sender(policy, 3, zero_copy=views, timeout=2.0) as sender,
            ExitStack() as stack,
        ):
            slots = sender._pipeline.transport._publisher.slots  # type: ignore[union-attr]
            receivers = [
                stack.enter_context(Receiver(sender.address(i), model))
                for i, model in enumerate(models)
            ]

            def send(value: float, to: Sequence[Receiver]) -> None:
                fill(policy, value)
                pending = sender.send_async()
                for receiver in to:
                    assert receiver.receive() == value
                if len(to) == 3:
                    assert pending.wait().updated == (0, 1, 2)
                else:
                    with pytest.raises(SendError):
                        pending.wait(0)

            for version in (1, 2, 3):
                if views:
                    send(version, receivers[version - 1 :])
                else:
                    send(version, ())
                    receivers[version - 1].stage()
            assert len(slots) == 3
            send(4, ())
            send(5, ())
            if views:
                values = [model.state_dict()["0.bias"].unique().item() for model in models]
                assert values == [1, 2, 3]
            assert len(slots) == 4
            send(6, receivers)
            assert len(slots) == 3
            send(7, receivers)
            assert all((p == 7).all() for model in models for p in model.parameters())
            for receiver in receivers:
                assert receiver.receive(0) is None
            gc.collect()
            assert len(mapped_memory() - before) == self.mapped


class TestThread(KeepsVersions, SchemeConformance):
    scheme = "thread"

    def test_a_receiver_is_told_that_it_is_not_the_workers_any_more(self) -> None:
        with self.sender(make_policy(2.0), 1) as sender:
            waiting = Receiver(sender.address(0), make_policy())
            with ThreadPoolExecutor(1) as pool:
                replaced = pool.submit(waiting.receive, 30.0)
                removed = Receiver(sender.address(0), make_policy())
                with pytest.raises(SenderLostError, match="another receiver"):
                    replaced.result(10)
            sender.remove_worker(0)
            with pytest.raises(SenderLostError, match="worker 0 was removed"):
                removed.receive(5.0)
            sender.add_worker(0)
            with Receiver(sender.address(0), make_policy()) as added:
                pending = sender.send_async()
                with pytest.raises(ClosedError):
                    removed.receive(0)
                assert added.receive() == 1
                assert pending.wait().updated == (0,)

    def test_a_signal_handler_closes_a_receiver_that_waits(self) -> None:
        with self.sender(make_policy(), 1) as sender:
            receiver = Receiver(sender.address(0), make_policy())
            before = signal.signal(signal.SIGALRM, lambda *_: receiver.close())
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                begin = time.monotonic()
                with pytest.raises(ClosedError):
                    receiver.receive(30.0)
                assert time.monotonic() - begin < 20.0, "receive() waited until its own deadline"
            finally:
                signal.signal(signal.SIGALRM, before)

    def test_where_there_is_no_memory_for_one_more_version(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policy, models = make_policy(1.0), [make_policy() for _ in range(3)]
        with self.sender(policy, 3, timeout=0.5) as sender, ExitStack() as stack:
            for worker_id, model in enumerate(models):
                receiver = stack.enter_context(Receiver(sender.address(worker_id), model))
                with pytest.raises(SendError):
                    sender.send_async().wait(0)
                receiver.stage()
            publisher = sender._pipeline.transport._publisher  # type: ignore[union-attr]
            monkeypatch.setattr(publisher, "_allocate", refuse_memory)
            with pytest.raises(CapacityError, match=r"worker 2 read all 3 .* no more can be made"):
                sender.send_async()
            letting_go = threading.Timer(0.2, receiver.close)
            letting_go.start()
            with pytest.raises(SendError):
                sender.send_async().wait(0)
            letting_go.join()

    def test_weights_found_by_a_path_in_a_context(self) -> None:
        class Trainer:
            def __init__(self) -> None:
                self.nets = {"actor": make_policy(3.0)}

        class Worker:
            def __init__(self) -> None:
                self.model = make_policy()

        with Sender("thread", "nets['actor']", context=Trainer(), num_workers=1) as sender:
            worker = Worker()
            receiver = Receiver(sender.address(0), "model", context=worker)
            pending = sender.send_async()
            assert receiver.receive() == 1
            assert pending.wait().updated == (0,)
            assert all((parameter == 3).all() for parameter in worker.model.parameters())
            receiver.close()


class SharedMemoryCases(KeepsVersions):
    """Of schemes whose slots lie in shared memory."""

    # The board and three slots.
    mapped = 6  # three slots, and a page for each worker

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_a_fork_that_closes_a_receiver_in_which_its_parent_waits(self) -> None:
        with (
            self.sender(make_policy(2.0), 1) as sender,
            Receiver(sender.address(0), make_policy()) as receiver,
            ThreadPoolExecutor(1) as threads,
        ):
            waiting = threads.submit(receiver.receive, 10.0)
            time.sleep(0.1)
            if not (child := os.fork()):
                try:
                    receiver.close()
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            assert sender.send().updated == (0,)
            assert waiting.result(10) == 1

    def test_a_worker_that_leaves_just_before_the_sender_closes_is_known_to_have_left(self) -> None:
        for _ in range(20):
            # The receiver is closed first.
            with (
                self.sender(make_policy(), 1) as sender,
                Receiver(sender.address(0), make_policy()),
            ):
                pass
            assert "closed its receiver" in str(sender.workers[0].error)

    def test_no_header_is_read_of_a_layout_that_is_known(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Large enough to be gathered in the worker, whose commits make no views of a slot then.
        policy, target = torch.nn.Linear(1024, 512), torch.nn.Linear(1024, 512)
        with self.sender(policy) as sender, Receiver(sender.address(0), target) as receiver:
            monkeypatch.setattr(Layout, "from_header", lambda _: pytest.fail("a header was read"))
            for _ in range(5):
                pending = sender.send_async()
                assert receiver.receive() == pending.version
                assert pending.wait().updated == (0,)

    @pytest.mark.parametrize(
        ("directory", "where"),
        [(None, "memory"), ("/dev/shm", "/dev/shm")],
        ids=["memfd", "dev_shm"],
    )
    def test_a_model_that_is_too_large_for_memory(self, directory: str | None, where: str) -> None:
        model = {"weight": torch.zeros(1, dtype=torch.uint8).expand(2**44)}
        message = rf"a slot needs \d{{14}} bytes of {where}, \d+ are available; "
        with pytest.raises(CapacityError, match=message):
            self.sender(model, directory=directory)

    def test_slots_in_a_directory(self, tmp_path: Path) -> None:
        policy, target = make_policy(3.0), make_policy()
        with self.sender(policy, directory=str(tmp_path)) as sender:
            receiver = Receiver(sender.address(0), target)
            pending = sender.send_async()
            assert receiver.receive() == 1
            assert pending.wait().updated == (0,)
            assert not list(tmp_path.iterdir())
            receiver.close()
        with pytest.raises(OptionError, match="cannot hold slots"):
            self.sender(policy, directory=str(tmp_path / "nowhere"))

    @pytest.mark.parametrize("left", [0, 1])
    def test_a_worker_that_can_open_no_more_descriptors(self, left: int) -> None:
        policy, target = make_policy(1.0), make_policy()
        with self.sender(policy) as sender, Receiver(sender.address(0), target) as receiver:
            for value in (1.0, 2.0, 3.0):
                fill(policy, value)
                pending = sender.send_async()
                if value == 2.0:
                    with few_descriptors(left), pytest.raises(CapacityError, match="ulimit -n"):
                        receiver.receive(5.0)
                    with pytest.raises(SendError, match="ulimit -n"):
                        pending.wait()
                    continue
                assert receiver.receive(5.0) == value
                assert pending.wait().updated == (0,)
                assert all((parameter == value).all() for parameter in target.parameters())

    def test_a_slot_that_is_announced_before_it_is_offered(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        announced = threading.Event()
        read, offer = SharedMemoryReceiver._handle_next, ProcessEvent.set

        def read_and_say(receiver: SharedMemoryReceiver, timeout: float) -> None:
            with few_descriptors():
                read(receiver, timeout)
            announced.set()

        def offer_late(event: ProcessEvent) -> None:
            announced.wait(10.0)
            offer(event)

        with (
            self.sender(make_policy(1.0)) as sender,
            Receiver(sender.address(0), make_policy()) as receiver,
        ):
            monkeypatch.setattr(SharedMemoryReceiver, "_handle_next", read_and_say)
            monkeypatch.setattr(ProcessEvent, "set", offer_late)
            with ThreadPoolExecutor(1) as pool:
                receiving = pool.submit(receiver.receive, 5.0)
                with pytest.raises(SendError, match="ulimit -n"):
                    sender.send()
                with pytest.raises(CapacityError, match="ulimit -n"):
                    receiving.result(10.0)
            monkeypatch.undo()
            pending = sender.send_async()
            assert receiver.receive(5.0) == 2
            assert pending.wait().updated == (0,)

    @pytest.mark.parametrize("left", [0, 1])
    def test_a_sender_that_can_open_no_more_descriptors(self, left: int) -> None:
        policy = make_policy(1.0)
        with ExitStack() as stack:
            sender = stack.enter_context(self.sender(policy, 2, zero_copy=True, timeout=5.0))
            receivers = [
                stack.enter_context(Receiver(sender.address(i), make_policy())) for i in (0, 1)
            ]
            # Each holds its own version, so that the next needs another slot.
            for worker_id, receiver in enumerate(receivers):
                pending = sender.send_async(worker_ids=worker_id)
                receiver.receive()
                assert pending.wait().updated == (worker_id,)
            with few_descriptors(left), pytest.raises(CapacityError, match="ulimit -n"):
                sender.send_async()
            pending = sender.send_async()
            assert [receiver.receive() for receiver in receivers] == [4, 4]
            assert pending.wait().updated == (0, 1)

    def test_a_sender_that_can_start_no_thread_leaves_nothing_open(self) -> None:
        before = opened()
        # Objects that the error refers to are not released.
        with no_threads(), pytest.raises(RuntimeError, match="new thread") as refused:
            self.sender(make_policy())
        assert opened() == before
        del refused

    def test_after_an_answer_that_was_lost(self) -> None:
        policy, target = make_policy(1.0), make_policy()
        lost = Fault(action="drop", point="acknowledge", version=1)
        with (
            Sender(Faulty(self.scheme, lost), policy, num_workers=1) as sender,
            Receiver(sender.address(0), target) as receiver,
        ):
            pending = sender.send_async()
            assert receiver.receive(5.0) == 1
            with pytest.raises(SendError):
                pending.wait(0.1)
            pending = sender.send_async()
            assert receiver.receive(5.0) == 2
            assert pending.wait().updated == (0,)

    def test_a_slot_that_is_read_is_never_written_to(self) -> None:
        policy, target = make_policy(1.0), make_policy()
        with self.sender(policy, 2, zero_copy=True, slots=2, timeout=0.5) as sender:
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


class TestShm(SharedMemoryCases, SchemeConformance):
    scheme = "shm"

    def test_a_rank_without_workers_has_no_memory_for_them(self) -> None:
        before = mapped_memory()
        with self.sender(make_policy(), 0) as sender:
            sender.send()
            assert mapped_memory() == before
            assert sender.add_worker() == 0
            with Receiver(sender.address(0), make_policy()) as receiver:
                pending = sender.send_async()
                assert receiver.receive(5.0) == pending.version
                assert pending.wait().updated == (0,)

    def test_a_forked_copy_of_the_receiver_takes_no_version(self) -> None:
        policy, target = make_policy(1.0), make_policy()
        with (
            self.sender(policy) as sender,
            Receiver(sender.address(0), target) as receiver,
        ):
            pending = sender.send_async()
            with warnings.catch_warnings():
                # Of threads that the child lacks.
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                try:
                    receiver.receive(5.0)
                except ClosedError as error:
                    os._exit(3 if "was forked" in str(error) else 1)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
            assert receiver.receive(5.0) == 1
            assert pending.wait().updated == (0,)
        assert all((parameter == 1).all() for parameter in target.parameters())

    def test_its_options_are_named(self) -> None:
        with pytest.raises(
            OptionError, match="'shm' has no option 'slot'; its options are: direct"
        ):
            self.sender(make_policy(), slot=3)
        with pytest.raises(OptionError, match=r"layers=\['bf16'\]"):
            self.sender(make_policy(), layers="bf16")

    def test_beside_the_scheme_mp(self) -> None:
        targets = [make_policy(), make_policy()]
        with (
            self.sender(make_policy(1.0)) as first,
            Sender("mp", make_policy(2.0), num_workers=1) as second,
        ):
            senders = (first, second)
            receivers = [
                Receiver(sender.address(0), target)
                for sender, target in zip(senders, targets, strict=True)
            ]
            pending = [sender.send_async() for sender in senders]
            assert [receiver.receive() for receiver in receivers] == [1, 1]
            assert all(send.wait().updated == (0,) for send in pending)
            assert [target.state_dict()["0.bias"].unique().item() for target in targets] == [
                1.0,
                2.0,
            ]
            for receiver in receivers:
                receiver.close()


class TestMp(
    SharedMemoryCases, DeliveryCases, IsolationCases, ProtocolCases, LifetimeCases, FaultCases
):
    """Its slots are those of `shm`, over which all values, combinations and increments arrive."""

    scheme = "mp"

    def test_a_worker_that_is_removed_before_it_connects_leaves_no_pipe(self) -> None:
        with self.sender(make_policy()) as sender:
            before = opened()
            address = sender.address(sender.add_worker(7))
            sender.remove_worker(7)
            assert eventually(lambda: opened() == before)
            with pytest.raises(AddressError, match="get a new one"):
                Receiver(address, make_policy())

    def test_pipes_that_exist_already(self) -> None:
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
        with pytest.raises(OptionError, match="not a duplex pipe"):
            Sender("mp", policy, workers=["worker"])

    def test_pipes_that_cannot_be_used_are_left_as_they_were(self) -> None:
        mine, theirs = multiprocessing.Pipe()
        before = opened()
        with no_threads(), pytest.raises(RuntimeError, match="new thread") as refused:
            Sender("mp", make_policy(), workers=[mine])
        with pytest.raises(OptionError, match="not a duplex pipe") as unusable:
            Sender("mp", make_policy(), workers=[mine, "worker"])
        assert opened() == before
        del refused, unusable
        mine.send("still open")
        assert theirs.recv() == "still open"
        for end in (mine, theirs):
            end.close()

    def test_an_address_of_a_pipe_is_good_until_its_receiver_is_closed(self) -> None:
        with self.sender(make_policy()) as sender:
            address = sender.address(0)
            first = Receiver(address, make_policy())
            second = Receiver(address, make_policy())
            with pytest.raises(SenderLostError, match="another receiver was given"):
                first.receive(self.slack)
            second.close()
            with pytest.raises(AddressError, match="until its receiver is closed"):
                Receiver(address, make_policy())
            Receiver(sender.address(0), make_policy()).close()
