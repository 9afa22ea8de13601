"""What a layer remembers of earlier pushes is right for every worker, whatever came before."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import nn

from sync_core import SendError, SkipContext
from sync_core.plugins import registry
from sync_core.plugins.hook_check import implemented
from sync_core.testing.layers.base import LayerCases
from sync_core.testing.layers.weights import eighths
from sync_core.testing.schemes.models import fingerprints, make_policy


class HistoryCases(LayerCases):
    """Workers that join, miss versions, come back, or were changed; pushes that are held back."""

    def test_many_versions_in_a_row(self, senders: ExitStack) -> None:
        link = self.link(senders, {"w": eighths(0)}, {"w": torch.zeros(12)})
        versions = []
        for seed in range(1, 21):
            versions.append(link.send({"w": eighths(seed)}))
            self.check(link.target, {"w": eighths(seed)})
        assert versions == sorted(set(versions))

    def test_a_worker_that_missed_versions(self, senders: ExitStack) -> None:
        link = self.link(senders, {"w": eighths(0)}, {"w": torch.zeros(12)})
        link.send({"w": eighths(1)})
        for seed in (2, 3):
            with pytest.raises(SendError):
                link.push_unseen({"w": eighths(seed)})
        link.send({"w": eighths(4)})
        self.check(link.target, {"w": eighths(4)})

    def test_workers_that_get_different_versions(self, senders: ExitStack) -> None:
        targets = [{"w": torch.zeros(12)}, {"w": torch.zeros(12)}]
        link = self.link(senders, {"w": eighths(0)}, *targets)
        link.send({"w": eighths(1)})
        link.send({"w": eighths(2)}, [0])
        self.check(targets[0], {"w": eighths(2)})
        self.check(targets[1], {"w": eighths(1)})
        link.send({"w": eighths(3)}, [1])
        self.check(targets[0], {"w": eighths(2)})
        self.check(targets[1], {"w": eighths(3)})
        link.send({"w": eighths(4)})
        for target in targets:
            self.check(target, {"w": eighths(4)})

    def test_a_worker_that_joins_late(self, senders: ExitStack) -> None:
        link = self.link(senders, {"w": eighths(0)}, {"w": torch.zeros(12)})
        for seed in (1, 2, 3):
            link.send({"w": eighths(seed)})
        target = {"w": torch.zeros(12)}
        link.join(target)
        if link.receivers[-1].receive(0) is not None:
            self.check(target, {"w": eighths(3)})
        link.send({"w": eighths(4)})
        self.check(target, {"w": eighths(4)})

    def test_a_worker_that_comes_back_with_another_model(self, senders: ExitStack) -> None:
        link = self.link(senders, {"w": eighths(0)}, {"w": torch.zeros(12)})
        for seed in (1, 2):
            link.send({"w": eighths(seed)})
        target = {"w": torch.full((12,), 7.0)}
        link.come_back(target)
        link.send({"w": eighths(3)})
        self.check(target, {"w": eighths(3)})

    def test_a_worker_whose_model_was_changed(self, senders: ExitStack) -> None:
        link = self.link(senders, {"w": eighths(0)}, {"w": torch.zeros(12)})
        link.send({"w": eighths(1)})
        link.target["w"].fill_(100.0)
        link.send({"w": eighths(1)})
        self.check(link.target, {"w": eighths(1)})

    def test_after_an_update_that_did_not_fit(self, senders: ExitStack) -> None:
        target = make_policy()
        link = self.link(senders, make_policy(1.0), target)
        link.send()
        fitting = target[0].weight
        target[0].weight = nn.Parameter(torch.zeros(1, 1))
        before = fingerprints(target)
        with pytest.raises(SendError, match="do not fit"):
            link.send(make_policy(2.0))
        assert fingerprints(target) == before
        target[0].weight = fitting
        link.send(make_policy(3.0))
        self.check(target.state_dict(), make_policy(3.0).state_dict())

    def test_weights_given_by_hand_pass_no_layer(self, senders: ExitStack) -> None:
        target = {"w": torch.zeros(12)}
        link = self.link(senders, {"w": eighths(0)}, target)
        link.send({"w": eighths(1)})
        link.receivers[0].update_weights({"w": eighths(2)})
        assert torch.equal(target["w"], eighths(2))
        link.send({"w": eighths(3)})
        self.check(target, {"w": eighths(3)})

    def test_the_first_push_to_a_worker_goes_out(self, senders: ExitStack) -> None:
        link = self.link(senders, {"w": eighths(0)}, {"w": torch.zeros(12)})
        pending = link.sender.send_async()
        link.receivers[0].receive(0)
        assert pending.wait().updated == (0,), "a worker that has no weights is to get some"

    def test_what_it_says_of_skipping(self) -> None:
        plugin = registry.find(registry.LAYERS, self.layer)
        if "skip_update" not in implemented(plugin.object):
            pytest.skip("the layer holds no push back")
        for pushes in (1, 2, 3, 100):
            for updated in (False, True):
                context = SkipContext(
                    model_id="policy", worker_id=0, version=5, pushes=pushes, updated=updated
                )
                assert plugin.object.skip_update(context=context) in (True, False, None)
