"""Cases: the protocol between sender and receivers, alone and with layers."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import time
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from torch import nn

from sync_core import (
    ClosedError,
    LayoutMismatchError,
    ModelError,
    OptionError,
    PendingSendError,
    Receiver,
    Sender,
    SenderLostError,
    SendError,
    UnknownWorkerError,
    registry,
)
from sync_core.errors import AddressError
from sync_core.hooks import SCHEME_CAPABILITIES, Finding, FindingsContext, FindsProblems
from sync_testing.expectations import NOTHING_SENT, RECEIVED, REPORT, VALUES
from sync_testing.loopback import Loopback
from sync_testing.negated import Negated
from sync_testing.schemes.models import fill, make_policy
from sync_testing.schemes.pool import SchemeCases, SharedGroup, Start, ended
from sync_testing.schemes.worker import Worker


class ProtocolCases(SchemeCases):
    """Correct and incorrect use of senders and receivers."""

    @pytest.mark.parametrize("pickler", [pickle, cloudpickle], ids=["pickle", "cloudpickle"])
    def test_addresses_pickle(self, pickler: Any) -> None:
        target = make_policy()
        with self.sender(make_policy(2.0)) as sender:
            address = sender.address(0)
            assert address.token not in repr(address), (
                "the repr of an address must not show its token"
            )
            with Receiver(pickle.loads(pickler.dumps(address)), target) as receiver:
                pending = sender.send_async()
                assert receiver.receive() == 1, RECEIVED
                assert pending.wait().updated == (0,), REPORT
        assert all((parameter == 2).all() for parameter in target.parameters()), VALUES

    @pytest.mark.parametrize("worker_id", [-1, 2, True, "0", 0.0, None], ids=repr)
    def test_ids_that_are_none(self, worker_id: Any) -> None:
        with self.sender(make_policy(), 2) as sender:
            with pytest.raises(UnknownWorkerError, match="there is no worker"):
                sender.send(worker_ids=[0, worker_id])
            assert sender.version == 0, NOTHING_SENT

    def test_ids_that_are(self, start: Start) -> None:
        workers = start(make_policy())
        scalar: Any = np.int64(1)
        assert workers.send(worker_ids=[1, 1, scalar]).updated == (1,), REPORT
        pending = workers.sender.send_async(worker_ids=scalar)
        workers.receive(1)
        assert pending.wait().updated == (1,), REPORT
        report = workers.sender.send(worker_ids=[])
        assert (report.version, dict(report.workers)) == (2, {}), REPORT

    def test_sending_while_a_send_is_pending(self, start: Start) -> None:
        workers = start(make_policy(), 1)
        with pytest.raises(PendingSendError, match="call send_async"):
            workers.sender.wait_async()
        pending = workers.sender.send_async()
        for send in (workers.sender.send, workers.sender.send_async):
            with pytest.raises(PendingSendError, match="call wait_async"):
                send()
        workers.receive(0)
        assert workers.sender.wait_async(30) is pending.wait(), (
            "wait_async() must return the report of the send that is pending"
        )

    def test_hooks_run_after_each_send(self, start: Start) -> None:
        calls: list[str] = []
        workers = start(make_policy(), 1)
        workers.sender.register_post_hook(lambda: calls.append("first"))
        workers.sender.register_post_hook(lambda: calls.append("second"))
        workers.send()
        with pytest.raises(SendError):
            workers.sender.send(timeout=0.01)
        assert calls == ["first", "second"], (
            "hooks must run in the order in which they were registered"
        )

    def test_a_model_that_does_not_fit_is_refused_at_once(self) -> None:
        with (
            self.sender(make_policy()) as sender,
            pytest.raises(LayoutMismatchError, match=r"'0.weight' is in the weights, not in the"),
        ):
            Receiver(sender.address(0), nn.Linear(3, 4))

    def test_weights_that_do_not_fit_are_refused_before_anything_is_sent(self) -> None:
        with self.sender(make_policy()) as sender:
            for weights in ({"0.weight": torch.ones(1)}, nn.Linear(2, 2), {}):
                with pytest.raises(LayoutMismatchError):
                    sender.send(weights)
            assert sender.version == 0, NOTHING_SENT

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            (nn.LazyLinear(2), "no shape yet"),
            ({}, "no tensors"),
            (nn.Sequential(), "no tensors"),
            (3, "cannot read weights from a int"),
        ],
        ids=["lazy", "empty dict", "empty module", "int"],
    )
    def test_models_that_cannot_be_sent(self, model: Any, message: str) -> None:
        with pytest.raises(ModelError, match=message):
            self.sender(model)

    def test_a_lazy_model_in_the_worker(self) -> None:
        with (
            self.sender(nn.Linear(3, 2)) as sender,
            pytest.raises(ModelError, match="run the model once"),
        ):
            Receiver(sender.address(0), nn.LazyLinear(2))

    def test_an_option_that_does_not_exist(self) -> None:
        with pytest.raises(OptionError, match="has no option 'no_such_option'"):
            self.sender(make_policy(), no_such_option=3)

    def test_what_it_finds_amiss_is_told_in_time(self) -> None:
        plugin = registry.find(registry.SCHEMES, self.scheme)
        if not isinstance(plugin.object, FindsProblems):
            pytest.skip("the scheme has no findings()")
        context = FindingsContext(scheme=plugin.name, options=self.options)
        begin = time.perf_counter()
        found = list(plugin.object.findings(context))
        assert time.perf_counter() - begin < 10.0, "doctor waits for so long, and no longer"
        assert all(isinstance(finding, Finding) for finding in found), (
            "findings() must give sync_core.transports.Finding objects"
        )
        assert not any("\n" in str(finding) for finding in found), "each is one line"

    def test_a_closed_sender(self) -> None:
        with self.sender(make_policy()) as sender:
            address = sender.address(0)
            sender.close()
            sender.close()
            with pytest.raises(ClosedError):
                sender.send()
            with pytest.raises(ClosedError):
                sender.address(0)
        with pytest.raises((AddressError, SenderLostError)):
            Receiver(address, make_policy()).receive()

    def test_the_wrong_token_is_refused(self) -> None:
        self.need("cross_process")
        with self.sender(make_policy()) as sender:
            guessed = "0" * 32
            forged = dataclasses.replace(sender.address(0), token=guessed, sender_token=guessed)
            with pytest.raises(SenderLostError):
                Receiver(forged, make_policy())

    def test_a_second_receiver_takes_the_place_of_the_first(self) -> None:
        self.need("cross_process")
        with self.sender(make_policy(2.0)) as sender:
            addresses = [sender.address(0), sender.address(0)]
            first = Receiver(addresses[0], make_policy())
            pending = sender.send_async()
            assert first.receive() == 1, RECEIVED
            pending.wait()
            second = Receiver(addresses[1], make_policy())
            assert second.receive() == 1, (
                "the receiver that takes a worker's place must get the newest version"
            )
            with pytest.raises(SenderLostError, match="another receiver"):
                first.receive(self.slack)
            pending = sender.send_async()
            assert second.receive() == 2, "versions must go to the receiver that came last"
            assert pending.wait().updated == (0,), REPORT
            second.close()


class CombinationCases(SchemeCases):
    """Several senders, which must not affect each other's workers."""

    def test_two_senders_at_once(self, pool: SharedGroup) -> None:
        self._send_by_two(pool, "actor", "critic")

    def test_two_senders_of_one_model_id(self, pool: SharedGroup) -> None:
        self._send_by_two(pool, "policy", "policy")

    def test_one_sender_closes_and_the_other_goes_on(self, start: Start) -> None:
        first, second = start(make_policy(1.0), 1), self.sender(make_policy(2.0))
        second.close()
        assert first.send().updated == (0,), REPORT
        assert first.values() == [{1.0}], VALUES

    def test_beside_another_scheme(self, start: Start) -> None:
        workers = start(make_policy(1.0), 1)
        target = make_policy()
        with Sender(Loopback(), make_policy(2.0), num_workers=1) as other:
            receiver = Receiver(other.address(0), target)
            pending = other.send_async()
            workers.send()
            assert receiver.receive() == 1, RECEIVED
            assert pending.wait().updated == (0,), REPORT
        assert workers.values() == [{1.0}], VALUES
        assert all((parameter == 2).all() for parameter in target.parameters()), VALUES

    def test_under_a_layer(self, start: Start) -> None:
        policy = make_policy(1.0)
        workers = start(policy, layers=[Negated()])
        for value in (2.0, -3.0):
            fill(policy, value)
            assert workers.send().updated == (0, 1), REPORT
            assert workers.values() == [{value}] * 2, VALUES

    def test_its_capabilities_are_known_or_explained(self) -> None:
        plugin = registry.find(registry.SCHEMES, self.scheme)
        text = inspect.getdoc(type(plugin.object)) or ""
        unknown = [
            name
            for name in plugin.capabilities
            if name not in SCHEME_CAPABILITIES and name not in text
        ]
        assert not unknown, (
            f"{plugin.describe()} declares {unknown}; the core knows "
            f"{sorted(SCHEME_CAPABILITIES)}; explain others in the docstring of its class"
        )

    def _send_by_two(self, pool: SharedGroup, *model_ids: str) -> None:
        pool.make_ready()
        with (
            self.sender(make_policy(1.0), model_id=model_ids[0]) as first,
            self.sender(make_policy(2.0), model_id=model_ids[1]) as second,
        ):
            senders = (first, second)
            for worker_id, sender in enumerate(senders):
                pool.call(worker_id, Worker.connect, sender.address(0))
            pending = [sender.send_async() for sender in senders]
            calls = [pool.submit(worker_id, Worker.receive) for worker_id in (0, 1)]
            assert all(send.wait(self.slack).updated == (0,) for send in pending), REPORT
            assert ended(calls, "receive()") == [1, 1], RECEIVED
            assert [pool.call(i, Worker.values) for i in (0, 1)] == [{1.0}, {2.0}], VALUES
