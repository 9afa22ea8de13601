"""Schemes that are broken in one way each; `caught_by` is the case that is to notice."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from sync_core import (
    Answer,
    Delivery,
    Layout,
    Payload,
    ReceiverTransport,
    SenderLostError,
    SenderTransport,
    TransportContext,
    hookimpl,
)
from sync_core.transports import Block, Notice
from sync_plugin_std.schemes.shm import ShmScheme
from sync_plugin_std.schemes.thread import ThreadReceiver, ThreadScheme, ThreadSender
from sync_testing import SchemeConformance, eventually

#: What mutants leak on purpose, for the test to release.
released = threading.Event()
descriptors: list[int] = []
files: list[Path] = []


def leak_a_file() -> None:
    """As a transport that keeps its versions in the temporary directory."""
    descriptor, name = tempfile.mkstemp()
    os.close(descriptor)
    files.append(Path(name))


class Mutant(ThreadScheme):
    """The scheme `thread`, of which one side is another."""

    caught_by: ClassVar[str]
    #: Of its sender, which is not to wait long for what never comes.
    options: ClassVar[Mapping[str, Any]] = {}
    Sender: ClassVar[Any] = ThreadSender
    Receiver: ClassVar[Any] = ThreadReceiver

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        side = type(self).Receiver if context.side == "receiver" else type(self).Sender
        transport: SenderTransport | ReceiverTransport = side(context)
        return transport


def changing(change: Callable[[Payload], Payload]) -> Callable[[TransportContext], ThreadSender]:
    """A sender that sends something else."""

    class Sender(ThreadSender):
        def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
            return super().send(change(payload), worker_ids)

    return Sender


def mapping(change: Callable[[Tensor], Tensor]) -> Callable[[TransportContext], ThreadSender]:
    """A sender that changes each tensor."""

    def changed(payload: Payload) -> Payload:
        tensors = [change(tensor.detach()) for tensor in payload.tensors]
        return Payload(payload.version, payload.layout.with_tensors(tensors), tensors)

    return changing(changed)


def choosing(keep: Callable[[int, str, Tensor], str | None]) -> Any:
    """A sender that leaves tensors out, or gives them other names."""

    def changed(payload: Payload) -> Payload:
        named = zip(payload.layout.specs, payload.tensors, strict=True)
        kept = {
            name: tensor
            for i, (spec, tensor) in enumerate(named)
            if (name := keep(i, spec.name, tensor)) is not None
        }
        return Payload(payload.version, Layout.of(kept), tuple(kept.values()))

    return changing(changed)


class LosesTheTail(Mutant):
    caught_by = "test_every_bit_arrives"

    class Sender(ThreadSender):
        def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
            deliveries = super().send(payload, worker_ids)
            for slot in self._publisher.slots:
                slot.block.memory[payload.nbytes - 4 : payload.nbytes] = 0
            return deliveries


class KeepsEveryVersion(Mutant):
    caught_by = "test_versions_that_are_over_are_released"

    class Sender(ThreadSender):
        def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
            self.kept = [*getattr(self, "kept", ()), payload.to_bytes()]
            return super().send(payload, worker_ids)


class TurnsDoublesIntoFloats(Mutant):
    caught_by = "test_every_bit_arrives"
    Sender = mapping(lambda tensor: tensor.float() if tensor.dtype == torch.float64 else tensor)


class GivesScalarsADimension(Mutant):
    caught_by = "test_every_bit_arrives"
    Sender = mapping(lambda tensor: tensor.reshape(-1) if tensor.dim() == 0 else tensor)


class DropsEmptyTensors(Mutant):
    caught_by = "test_every_bit_arrives"
    Sender = choosing(lambda i, name, tensor: name if tensor.numel() else None)


class FlipsNanBits(Mutant):
    caught_by = "test_every_bit_arrives"
    Sender = mapping(
        lambda tensor: (
            torch.nan_to_num(tensor, nan=float("nan"), posinf=None, neginf=None)
            if tensor.dtype == torch.float32
            else tensor
        )
    )


class ForgetsTheSignOfZero(Mutant):
    caught_by = "test_every_bit_arrives"
    Sender = mapping(lambda tensor: tensor + 0 if tensor.dtype == torch.float32 else tensor)


class IgnoresStrides(Mutant):
    caught_by = "test_every_bit_arrives"
    Sender = mapping(
        lambda tensor: (
            tensor
            if tensor.is_contiguous()
            else torch.as_strided(tensor, tensor.shape, torch.empty(tensor.shape).stride())
        )
    )


class CutsLongNames(Mutant):
    caught_by = "test_every_bit_arrives"
    Sender = choosing(lambda i, name, tensor: name[:255])


class Unties(Mutant):
    caught_by = "test_tied_tensors_stay_tied"

    @staticmethod
    def Sender(context: TransportContext) -> ThreadSender:  # noqa: N802 - in place of a class
        def untied(payload: Payload) -> Payload:
            tensors = payload.tensors
            named = {n: tensors[i].detach().clone() for n, i in payload.layout.index.items()}
            return Payload(payload.version, Layout.of(named), tuple(named.values()))

        return changing(untied)(context)


class CarriesAtMost4096Tensors(Mutant):
    caught_by = "test_5000_tensors"
    Sender = choosing(lambda i, name, tensor: name if i < 4096 else None)


class ChangesTheTrainer(Mutant):
    caught_by = "test_the_trainers_bits_and_versions_stay"
    Sender = mapping(lambda tensor: tensor.zero_() if tensor.numel() == 1 else tensor)


class MovesTheTrainer(Mutant):
    caught_by = "test_the_trainers_module_is_never_altered"
    Sender = mapping(lambda tensor: tensor.share_memory_())


class AliasesTheTrainer(Mutant):
    caught_by = "test_a_step_after_send_async_changes_nothing_that_arrives"
    newest: ClassVar[dict[str, Payload]] = {}

    class Sender(ThreadSender):
        def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
            AliasesTheTrainer.newest[self._name] = payload
            return super().send(payload, worker_ids)

    class Receiver(ThreadReceiver):
        def __init__(self, context: TransportContext) -> None:
            super().__init__(context)
            self._endpoint = context.endpoint

        def receive(self, timeout: float) -> Payload | None:
            return super().receive(timeout) and AliasesTheTrainer.newest[self._endpoint]


class AliasesConsolidatedModels(Mutant):
    caught_by = "test_a_consolidated_model_is_sent_like_any_other"
    Sender = AliasesTheTrainer.Sender

    class Receiver(AliasesTheTrainer.Receiver):
        def receive(self, timeout: float) -> Payload | None:
            received = ThreadReceiver.receive(self, timeout)
            newest = AliasesTheTrainer.newest.get(self._endpoint)
            return newest if received and newest and newest.bodies else received


class ReusesWhatIsRead(Mutant):
    caught_by = "test_what_a_worker_views_is_never_overwritten"

    class Receiver(ThreadReceiver):
        def receive(self, timeout: float) -> Payload | None:
            payload = super().receive(timeout)
            self._publisher.give_back(self)
            return payload


class ReusesWhatAnInterruptedSendHasShown(Mutant):
    caught_by = "test_an_interrupted_send_tears_no_version"

    class Sender(ThreadSender):
        def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
            try:
                deliveries = super().send(payload, worker_ids)
                slots = self._publisher.slots
                eventually(lambda: any(slot.readers for slot in slots), 0.2)
                # Moments enough for one of those that are tried.
                for _ in range(8):
                    self._publisher.newest(0)
            except BaseException:
                for slot in self._publisher.slots:
                    slot.readers.clear()
                raise
            return deliveries


class ReusesWhatIsStaged(Mutant):
    caught_by = "test_what_was_staged_is_what_is_committed"
    capabilities = ThreadScheme.capabilities - {"zero_copy"}
    Receiver = ReusesWhatIsRead.Receiver


class KeepsABlockThatTorchMayMove(Mutant):
    """As a reader that lays one block over memory that its sender writes to."""

    caught_by = "test_a_worker_that_shares_its_memory_gets_newer_versions"

    class Receiver(ThreadReceiver):
        def __init__(self, context: TransportContext) -> None:
            super().__init__(context)
            self._slots: dict[int, tuple[bytearray, Block]] = {}

        def receive(self, timeout: float) -> Payload | None:
            payload = super().receive(timeout)
            if payload is None:
                return None
            data = payload.to_bytes()
            if payload.version % 2 not in self._slots:
                memory = bytearray(data)
                block = Block(torch.frombuffer(memory, dtype=torch.uint8))
                self._slots[payload.version % 2] = memory, block
            memory, block = self._slots[payload.version % 2]
            memory[:] = data
            return replace(payload, source=block)


class WritesToWhatIsCopied(Mutant):
    """As a reader that takes a version piece by piece from where the next one may be put."""

    caught_by = "test_a_large_version_is_whole_while_others_are_sent"
    capabilities = ThreadScheme.capabilities - {"zero_copy"}

    class Receiver(ReusesWhatIsRead.Receiver):
        def receive(self, timeout: float) -> Payload | None:
            payload = super().receive(timeout)
            if payload is None:
                return None
            copies = [torch.empty_like(tensor) for tensor in payload.tensors]
            for tensor, copied in zip(payload.tensors, copies, strict=True):
                flat, into = tensor.reshape(-1), copied.reshape(-1)
                for pieces in zip(flat.split(1 << 18), into.split(1 << 18), strict=True):
                    time.sleep(0.001)
                    pieces[1].copy_(pieces[0])
            return Payload(payload.version, payload.layout, tuple(copies))


class ConfirmsAtOnce(Mutant):
    caught_by = "test_nothing_is_confirmed_before_it_is_committed"

    class Sender(ThreadSender):
        def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
            deliveries = super().send(payload, worker_ids)
            for delivery in deliveries.values():
                delivery.acknowledge()
            return deliveries


class ConfirmsBeforeApplying(Mutant):
    caught_by = "test_an_apply_that_raises_reaches_the_sender"

    class Receiver(ThreadReceiver):
        def receive(self, timeout: float) -> Payload | None:
            payload = super().receive(timeout)
            if payload is not None:
                self.acknowledge(Answer(version=payload.version))
            return payload


class SwallowsTheWorkersError(Mutant):
    caught_by = "test_an_apply_that_raises_reaches_the_sender"

    class Receiver(ThreadReceiver):
        def acknowledge(self, answer: Answer) -> None:
            super().acknowledge(Answer(version=answer.version))


class ConfirmsAnotherVersion(Mutant):
    caught_by = "test_an_answer_about_an_older_version_counts_for_no_other"

    class Receiver(ThreadReceiver):
        def acknowledge(self, answer: Answer) -> None:
            newest = self._publisher.newest(self._worker_id)
            super().acknowledge(replace(answer, version=newest))


class TakesALateRefusalForAnother(Mutant):
    caught_by = "test_a_late_refusal_fails_no_other_send"

    class Receiver(ThreadReceiver):
        def acknowledge(self, answer: Answer) -> None:
            if answer.error is not None:
                newest = self._publisher.newest(self._worker_id)
                answer = replace(answer, version=newest)
            super().acknowledge(answer)


class TakesAnyReceiversAnswer(Mutant):
    caught_by = "test_an_answer_of_a_receiver_that_was_replaced_counts_for_no_other"

    class Receiver(ThreadReceiver):
        def acknowledge(self, answer: Answer) -> None:
            worker = self._publisher.roster._workers[self._worker_id]
            self._publisher.answer(self._worker_id, answer, worker.reader)


class TakesTheAnswerOfWhoWasRemoved(Mutant):
    caught_by = "test_an_answer_of_a_worker_that_was_removed_counts_for_no_other"
    Receiver = TakesAnyReceiversAnswer.Receiver


class CountsVersionsInAByte(Mutant):
    caught_by = "test_after_hundreds_of_versions_answers_still_count"
    options = {"timeout": 0.5}

    class Receiver(ThreadReceiver):
        def acknowledge(self, answer: Answer) -> None:
            super().acknowledge(replace(answer, version=answer.version % 256))


class LosesEveryEighthAnswer(Mutant):
    caught_by = "test_after_hundreds_of_versions_answers_still_count"
    options = {"timeout": 0.5}

    class Receiver(ThreadReceiver):
        def acknowledge(self, answer: Answer) -> None:
            if answer.version % 8:
                super().acknowledge(answer)


class SaysThatNothingTravelled(Mutant):
    caught_by = "test_the_report_tells_how_much_travelled"

    class Sender(ThreadSender):
        def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
            deliveries = super().send(payload, worker_ids)
            for delivery in deliveries.values():
                delivery.nbytes = 1
            return deliveries


class DeliversOldestFirst(Mutant):
    caught_by = "test_the_newest_version_is_the_one_that_counts"

    class Sender(ThreadSender):
        def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
            waiting = [self._publisher.newest(worker_id) for worker_id in worker_ids]
            if any(waiting):
                return {i: Delivery(i, payload.version, payload.nbytes) for i in worker_ids}
            return super().send(payload, worker_ids)


class IgnoresWorkerIds(Mutant):
    caught_by = "test_some_workers_only"

    class Sender(ThreadSender):
        def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
            deliveries = super().send(payload, self._publisher.roster.worker_ids)
            return {worker_id: deliveries[worker_id] for worker_id in worker_ids}


class DeliversToRemovedWorkers(Mutant):
    caught_by = "test_a_worker_that_is_removed_gets_nothing_more"

    class Sender(IgnoresWorkerIds.Sender):
        def remove_worker(self, worker_id: int) -> None:
            pass


class LetsWaitForRemovedWorkers(Mutant):
    caught_by = "test_removing_a_worker_ends_what_is_on_its_way_to_it"
    options = {"timeout": 0.5}

    class Sender(ThreadSender):
        def remove_worker(self, worker_id: int) -> None:
            self._publisher.roster._workers[worker_id].delivery = None
            super().remove_worker(worker_id)


class ServesNoIdTwice(Mutant):
    caught_by = "test_an_id_may_be_removed_and_added_again"

    class Sender(ThreadSender):
        def __init__(self, context: TransportContext) -> None:
            super().__init__(context)
            self._removed: set[int] = set()

        def remove_worker(self, worker_id: int) -> None:
            self._removed.add(worker_id)
            super().remove_worker(worker_id)

        def add_worker(self, worker_id: int, worker: Any = None) -> None:
            if worker_id not in self._removed:
                super().add_worker(worker_id, worker)


class LateWorkersGetNothing(Mutant):
    caught_by = "test_a_worker_that_joins_late_gets_the_newest_version"

    class Sender(ThreadSender):
        def add_worker(self, worker_id: int, worker: Any = None) -> None:
            self._publisher.roster._owed_to_new = None
            super().add_worker(worker_id, worker)


class CannotAddWorkers(Mutant):
    caught_by = "test_a_worker_that_joins_late_gets_the_newest_version"

    class Sender(ThreadSender):
        def add_worker(self, worker_id: int, worker: Any = None) -> None:
            raise NotImplementedError


class CountsLateWorkersItself(Mutant):
    caught_by = "test_a_late_worker_may_take_an_id_of_its_own"

    class Sender(ThreadSender):
        def add_worker(self, worker_id: int, worker: Any = None) -> None:
            super().add_worker(len(self._publisher.roster.worker_ids), worker)


class ForgetsWhoComesBack(Mutant):
    caught_by = "test_a_worker_that_comes_back_gets_the_newest_version"

    class Receiver(ThreadReceiver):
        def __init__(self, context: TransportContext) -> None:
            super().__init__(context)
            self._seen = self._publisher.newest(self._worker_id)

        def receive(self, timeout: float) -> Payload | None:
            return super().receive(min(timeout, 0.5))


class WaitsForWhoeverLeft(Mutant):
    caught_by = "test_a_worker_that_left_holds_nobody_up"

    class Sender(ThreadSender):
        def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
            if any(each.lost for each in self._publisher.roster._workers.values()):
                time.sleep(0.6)
            return super().send(payload, worker_ids)


class RaisesForWhoeverLeft(Mutant):
    caught_by = "test_a_worker_that_left_holds_nobody_up"

    class Sender(ThreadSender):
        def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
            if any(each.lost for each in self._publisher.roster._workers.values()):
                raise ConnectionError("a worker is gone")
            return super().send(payload, worker_ids)


class ForgetsTheTimeout(Mutant):
    caught_by = "test_waiting_for_news_ends_in_time"

    class Receiver(ThreadReceiver):
        def receive(self, timeout: float) -> Payload | None:
            return super().receive(timeout + 0.6)


class BlocksWhereItShouldLook(Mutant):
    caught_by = "test_looking_for_news_answers_at_once"

    class Receiver(ThreadReceiver):
        def receive(self, timeout: float) -> Payload | None:
            return super().receive(max(timeout, 0.06))


class ReturnsTooEarly(Mutant):
    caught_by = "test_waiting_for_news_ends_in_time"

    class Receiver(ThreadReceiver):
        def receive(self, timeout: float) -> Payload | None:
            return super().receive(timeout / 4)


class DoesNotEndWhenClosed(Mutant):
    caught_by = "test_receivers_learn_that_the_sender_closed"

    class Sender(ThreadSender):
        def close(self) -> None:
            pass


class WaitsForWorkersToLeave(Mutant):
    caught_by = "test_closing_waits_for_no_worker"

    class Sender(ThreadSender):
        def close(self) -> None:
            workers = self._publisher.roster._workers.values()
            if not self._publisher.closed and any(each.lost is None for each in workers):
                time.sleep(0.6)
            super().close()


class SharesStateBetweenSenders(Mutant):
    caught_by = "test_two_senders_at_once"
    last: ClassVar[list[ThreadSender]] = []

    class Sender(ThreadSender):
        def __init__(self, context: TransportContext) -> None:
            super().__init__(context)
            SharesStateBetweenSenders.last[:] = [self]

        def address(self, worker_id: int) -> str:
            return SharesStateBetweenSenders.last[0]._name

        def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
            return ThreadSender.send(SharesStateBetweenSenders.last[0], payload, worker_ids)


class HasAnAddressThatDoesNotPickle(Mutant):
    caught_by = "test_addresses_pickle"

    class Sender(ThreadSender):
        def address(self, worker_id: int) -> Any:
            return threading.Lock()


class AcceptsAnyOption(Mutant):
    caught_by = "test_an_option_that_does_not_exist"

    @staticmethod
    def Sender(context: TransportContext) -> ThreadSender:  # noqa: N802 - in place of a class
        return ThreadSender(replace(context, options={}))


class RefusesPartialUpdates(Mutant):
    caught_by = "test_a_partial_update"

    class Sender(ThreadSender):
        def __init__(self, context: TransportContext) -> None:
            super().__init__(context)
            self._layout = context.layout

        def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
            if payload.layout != self._layout:
                raise ValueError("not the layout of the sender")
            return super().send(payload, worker_ids)


class LeaksAThread(Mutant):
    caught_by = "test_nothing_is_left_behind"

    class Sender(ThreadSender):
        def __init__(self, context: TransportContext) -> None:
            super().__init__(context)
            threading.Thread(target=released.wait, daemon=True).start()


class LeaksADescriptor(Mutant):
    caught_by = "test_nothing_is_left_behind"

    class Receiver(ThreadReceiver):
        def __init__(self, context: TransportContext) -> None:
            super().__init__(context)
            descriptors.append(os.open("/dev/null", os.O_RDONLY))


class LeaksAThreadForEachPendingSend(Mutant):
    caught_by = "test_a_send_that_was_pending_leaves_nothing_behind"

    class Sender(ThreadSender):
        def close(self) -> None:
            deliveries = [each.delivery for each in self._publisher.roster._workers.values()]
            if any(delivery and delivery.answer is None for delivery in deliveries):
                threading.Thread(target=released.wait, daemon=True).start()
            super().close()


class LeavesFiles(Mutant):
    caught_by = "test_no_file_is_left_in_the_temporary_directory"

    class Sender(ThreadSender):
        def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
            leak_a_file()
            return super().send(payload, worker_ids)


class DeclaresWhatNobodyKnows(Mutant):
    caught_by = "test_its_capabilities_are_known_or_explained"
    capabilities = frozenset({"late_join", "telepathy"})


class SleepsOn(Mutant):
    caught_by = "test_closing_a_receiver_wakes_a_thread_that_waits_in_it"

    class Receiver(ThreadReceiver):
        def wake(self) -> None: ...


class PromisesToTell(Mutant):
    caught_by = "test_who_is_told_of_versions_need_not_look"

    class Receiver(ThreadReceiver):
        def on_arrival(self, callback: Callable[[], None]) -> bool:
            return True


class Listening(ThreadReceiver):
    """Has a thread that calls back whenever a version may have come."""

    def __init__(self, context: TransportContext) -> None:
        self._arrived = threading.Event()
        super().__init__(context)
        self._listener: threading.Thread | None = None
        self._ended = False

    def on_arrival(self, callback: Callable[[], None]) -> bool:
        def listen() -> None:
            with suppress(SenderLostError):
                while not self._ended:
                    self.listen(callback)

        self._listener = threading.Thread(target=listen)
        self._listener.start()
        return True

    def listen(self, callback: Callable[[], None]) -> None:
        """Call back once."""

    def _wake(self) -> None:
        super()._wake()
        self._arrived.set()

    def close(self) -> None:
        self._ended = True
        self._arrived.set()
        super().close()
        if self._listener is not None:
            self._listener.join()


class HoldsItsLockWhileItListens(Mutant):
    """Receives in its own thread, so that a worker that only looks has to wait for that."""

    caught_by = "test_a_worker_that_steps_gets_versions_between_its_steps"

    class Receiver(Listening):
        def __init__(self, context: TransportContext) -> None:
            super().__init__(context)
            self._turn = threading.Lock()
            self._found: list[Payload] = []

        def receive(self, timeout: float) -> Payload | None:
            with self._turn:
                return self._found.pop() if self._found else super().receive(timeout)

        def listen(self, callback: Callable[[], None]) -> None:
            with self._turn:
                payload = None if self._found else ThreadReceiver.receive(self, 0.3)
                if payload is not None:
                    self._found.append(payload)
            callback()


class ForgetsWhatTheCallbackLeaves(Mutant):
    """Takes a version for received once the callback has returned, as an edge-triggered event."""

    caught_by = "test_a_worker_that_steps_gets_versions_between_its_steps"
    options = {"timeout": 1.0}

    class Receiver(Listening):
        def listen(self, callback: Callable[[], None]) -> None:
            self._arrived.wait()
            self._arrived.clear()
            callback()
            self._seen = max(self._seen, self._publisher.newest(self._worker_id))


class DropsLateAnswers(Mutant):
    caught_by = "test_an_answer_after_the_deadline_is_known"

    class Receiver(ThreadReceiver):
        def acknowledge(self, answer: Answer) -> None:
            delivery = self._publisher.roster._workers[self._worker_id].delivery
            if delivery is not None and not delivery.ended:
                super().acknowledge(answer)


class NeverSaysThatAWorkerHasConnected(Mutant):
    caught_by = "test_a_worker_that_has_connected_is_known"

    @staticmethod
    def Sender(context: TransportContext) -> ThreadSender:  # noqa: N802 - in place of a class
        def notify(worker_id: int, notice: Notice) -> None:
            if notice.kind != "connected":
                context.notify(worker_id, notice)

        return ThreadSender(replace(context, notify=notify))


class AcceptsAnyToken(ShmScheme):
    caught_by = "test_the_wrong_token_is_refused"

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        return super().create_transport(replace(context, token=""))


MUTANTS: tuple[Any, ...] = (*Mutant.__subclasses__(), AcceptsAnyToken)


class TestBaseline(SchemeConformance):
    """The base of all mutants, which passes every case that one of them fails."""

    scheme = "thread"
    group = "thread"


class TestBaselineShm(SchemeConformance):
    scheme = "shm"


globals().update(
    {
        f"Test{mutant.__name__}": type(
            f"Test{mutant.__name__}",
            (SchemeConformance,),
            {
                "scheme": mutant(),
                "options": MappingProxyType(getattr(mutant, "options", {})),
                # Most are caught when something has not happened for so long.
                "slack": 0.5,
                "group": "thread",
                "__module__": __name__,
            },
        )
        for mutant in MUTANTS
    }
)
CAUGHT_BY = {f"Test{mutant.__name__}": mutant.caught_by for mutant in MUTANTS} | {
    "TestBaseline": "",
    "TestBaselineShm": AcceptsAnyToken.caught_by,
}
