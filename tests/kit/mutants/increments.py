"""Increments that are broken in one way each, over a transport that is not."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from sync_core import Layout, ReceiverTransport, SenderTransport, TransportContext, hookimpl
from sync_core.transports import unheard
from sync_plugin_scale.increments.history import PackedVersion
from sync_plugin_scale.increments.patch import Patch, positions_of
from sync_plugin_scale.increments.receiver import IncrementalReceiver
from sync_plugin_scale.increments.sender import IncrementalSender
from sync_plugin_std.schemes.thread import ThreadScheme
from sync_testing import SchemeConformance

#: What mutants leak on purpose, for the test to release.
released = threading.Event()


class Threads(ThreadScheme):
    """Threads of one process, as if they were elsewhere."""

    capabilities = frozenset({"broadcast", "late_join", "cross_process"})


class Silent(Threads):
    """The same, whose sender is not told that a worker has connected."""

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        return super().create_transport(replace(context, notify=unheard))


class Mutant:
    """Replaces a method of the core while its case runs."""

    caught_by: ClassVar[str]
    scheme: ClassVar[Threads] = Threads()
    owner: ClassVar[type]
    name: ClassVar[str]

    @staticmethod
    def method(*args: Any) -> Any:
        raise NotImplementedError


class IgnoresTheBase(Mutant):
    """Applies an increment to whatever there is."""

    caught_by = "test_a_worker_that_comes_back_after_increments_gets_the_version_whole"
    scheme = Silent()
    owner, name = IncrementalReceiver, "_apply"

    @staticmethod
    def method(this: Any, patch: Patch) -> PackedVersion:
        kept: PackedVersion = this._kept or PackedVersion.allocate(_layouts[patch.digest])
        _layouts[patch.digest] = kept.layout
        kept.body[positions_of(patch.gaps)] = patch.values
        return kept


# The layouts that increments were applied to, by digest.
_layouts: dict[str, Layout] = {}


class AddsDifferences(Mutant):
    """Adds what arrives to what there is, so that twice is once too often."""

    caught_by = "test_an_increment_brings_what_changed"
    owner, name = Patch, "apply"

    @staticmethod
    def method(this: Patch, body: Any) -> None:
        body[positions_of(this.gaps)] += this.values


class LosesTheWholeVersionForAJoiner(Mutant):
    caught_by = "test_a_worker_that_joins_after_increments_gets_the_version_whole"
    owner, name = IncrementalSender, "_request"

    @staticmethod
    def method(this: Any, worker: Any) -> bool:
        return False


class ChecksNoChecksum(Mutant):
    caught_by = "test_an_increment_with_a_wrong_result_is_followed_by_the_whole_version"
    owner, name = Patch, "check_result"

    @staticmethod
    def method(this: Patch, body: Any) -> None: ...


class BuildsOnTheVersionBefore(Mutant):
    """Takes for granted that every worker has it."""

    caught_by = "test_an_increment_after_versions_that_one_worker_missed"
    owner, name = IncrementalSender, "_best_increment"

    @staticmethod
    def method(this: Any, line: Any, version: int, held: Any) -> Patch | None:
        found: Patch | None = line.history.since(version - 1)
        return found


class BelievesThatAllIsThere(Mutant):
    """Sends workers that refuse an increment nothing else."""

    caught_by = "test_an_increment_with_a_wrong_result_is_followed_by_the_whole_version"
    owner, name = IncrementalSender, "_send_again"

    @staticmethod
    def method(this: Any, worker: Any) -> None: ...


class Case(SchemeConformance):
    """A mutant's, in place of the sound code."""

    __test__ = False
    scheme = Threads()
    group = "thread"
    options: ClassVar[Any] = {"timeout": 5.0}
    mutant: ClassVar[type[Mutant] | None] = None

    @pytest.fixture(autouse=True)
    def broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if self.mutant is not None:
            monkeypatch.setattr(self.mutant.owner, self.mutant.name, self.mutant.method)


class TestBaseline(Case):
    __test__ = True


class TestBaselineSilent(Case):
    __test__ = True
    scheme = Silent()


globals().update(
    {
        f"Test{mutant.__name__}": type(
            f"Test{mutant.__name__}",
            (Case,),
            {
                "mutant": mutant,
                "scheme": mutant.scheme,
                # Two are caught when a version has not arrived for that long.
                "options": {"timeout": 1.0},
                "slack": 1.0,
                "__test__": True,
                "__module__": __name__,
            },
        )
        for mutant in Mutant.__subclasses__()
    }
)
CAUGHT_BY = {f"Test{m.__name__}": m.caught_by for m in Mutant.__subclasses__()} | {
    "TestBaseline": "",
    "TestBaselineSilent": "",
}
