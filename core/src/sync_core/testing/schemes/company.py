"""A scheme beside others: two senders, two schemes, layers, and what all may know of it."""

from __future__ import annotations

import inspect

from sync_core import Receiver, Sender, registry
from sync_core.hooks import SCHEME_CAPABILITIES
from sync_core.testing.loopback import Loopback
from sync_core.testing.negated import Negated
from sync_core.testing.schemes.base import SchemeCases, Start
from sync_core.testing.schemes.models import fill, make_policy
from sync_core.testing.schemes.pool import Pool
from sync_core.testing.schemes.worker import Worker


class CompanyCases(SchemeCases):
    """Nothing that one sender does is seen by the workers of another."""

    def test_two_senders_at_once(self, pool: Pool) -> None:
        self._send_by_two(pool, "actor", "critic")

    def test_two_senders_of_one_model_id(self, pool: Pool) -> None:
        self._send_by_two(pool, "policy", "policy")

    def test_one_sender_closes_and_the_other_goes_on(self, start: Start) -> None:
        first, second = start(make_policy(1.0), 1), self.sender(make_policy(2.0))
        second.close()
        assert first.send().updated == (0,)
        assert first.values() == [{1.0}]

    def test_beside_another_scheme(self, start: Start) -> None:
        workers = start(make_policy(1.0), 1)
        target = make_policy()
        with Sender(Loopback(), make_policy(2.0), num_workers=1) as other:
            receiver = Receiver(other.address(0), target)
            pending = other.send_async()
            workers.send()
            assert receiver.receive() == 1
            assert pending.wait().updated == (0,)
        assert workers.values() == [{1.0}]
        assert all((parameter == 2).all() for parameter in target.parameters())

    def test_under_a_layer(self, start: Start) -> None:
        policy = make_policy(1.0)
        workers = start(policy, layers=[Negated()])
        for value in (2.0, -3.0):
            fill(policy, value)
            assert workers.send().updated == (0, 1)
            assert workers.values() == [{value}] * 2

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

    def _send_by_two(self, pool: Pool, *model_ids: str) -> None:
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
            assert all(send.wait(5.0).updated == (0,) for send in pending)
            assert [call.result(30) for call in calls] == [1, 1]
            assert [pool.call(i, Worker.values) for i in (0, 1)] == [{1.0}, {2.0}]
