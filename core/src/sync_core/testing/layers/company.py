"""A layer beside others: the trainer, another sender, another layer, and what it leaves behind."""

from __future__ import annotations

import gc
import inspect
import pickle
from contextlib import ExitStack

import pytest
import torch

from sync_core.plugins import registry
from sync_core.testing.layers.base import LayerCases
from sync_core.testing.layers.weights import eighths
from sync_core.testing.negated import Negated
from sync_core.testing.schemes.models import fill, fingerprints, make_policy
from sync_core.testing.worker_groups import count_threads


class CompanyCases(LayerCases):
    """Nothing but the weights on the way is changed."""

    def test_the_trainers_tensors_are_not_touched(self, senders: ExitStack) -> None:
        policy = make_policy(0.3)
        tensors = (*policy.parameters(), *policy.buffers())
        before = [(t.data_ptr(), t._version, t.requires_grad) for t in tensors]
        prints = fingerprints(policy)
        self.link(senders, policy, make_policy()).send()
        assert fingerprints(policy) == prints
        assert [(t.data_ptr(), t._version, t.requires_grad) for t in tensors] == before
        assert all(parameter.grad_fn is None for parameter in policy.parameters())

    def test_a_step_after_send_async_changes_nothing_that_arrives(self, senders: ExitStack) -> None:
        policy, target = make_policy(1.0), make_policy()
        link = self.link(senders, policy, target)
        link.send()
        pending = link.sender.send_async()
        fill(policy, 9.0)
        received = link.receivers[0].receive()
        pending.wait()
        if received is not None:
            self.check(dict(target.named_parameters()), dict(make_policy(1.0).named_parameters()))

    def test_two_senders_do_not_mix(self, senders: ExitStack) -> None:
        targets = [{"w": torch.zeros(12)}, {"w": torch.zeros(12)}]
        links = [self.link(senders, {"w": eighths(i)}, targets[i]) for i in (0, 1)]
        for seed in (1, 2, 3):
            for i, link in enumerate(links):
                link.send({"w": eighths(10 * i + seed)})
            for i, target in enumerate(targets):
                self.check(target, {"w": eighths(10 * i + seed)})

    @pytest.mark.parametrize("place", ["outside", "inside"])
    def test_with_another_layer(self, senders: ExitStack, place: str) -> None:
        layers = [self.layer, Negated()] if place == "outside" else [Negated(), self.layer]
        target = {"w": torch.zeros(12), "n": torch.zeros(2, dtype=torch.int64)}
        link = self.link(senders, target, {n: t.clone() for n, t in target.items()}, layers=layers)
        for seed in (1, 2):
            sent = {"w": eighths(seed), "n": torch.tensor([seed, -seed])}
            link.send(sent)
            self.check(link.target, sent)

    def test_addresses_that_name_it_pickle(self, senders: ExitStack) -> None:
        target = {"w": torch.zeros(12)}
        link = self.link(senders, {"w": eighths(0)}, target)
        pickle.loads(pickle.dumps(link.sender.address(0)))
        link.come_back(target)
        link.send({"w": eighths(1)})
        self.check(target, {"w": eighths(1)})

    def test_it_keeps_no_thread(self) -> None:
        threads = count_threads()
        with ExitStack() as senders:
            self.link(senders, {"w": eighths(0)}, {"w": torch.zeros(12)}).send()
        gc.collect()
        assert count_threads() == threads

    def test_it_says_what_it_does(self) -> None:
        made = registry.find(registry.LAYERS, self.layer).object
        assert inspect.getdoc(made if inspect.ismodule(made) else type(made)), "it has no docstring"
