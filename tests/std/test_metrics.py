"""Metrics of sends in the registries of Prometheus and OpenTelemetry."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import REGISTRY, CollectorRegistry, Gauge
from torch import nn

from sync_core import Receiver, Reporter, Sender, SendError, SendReport, hookimpl
from sync_core.errors import RequirementError
from sync_plugin_std import Interval, Metrics
from sync_tools.main import main

WHICH = {"scheme": "thread", "model_id": "policy"}


class Equal(Reporter):
    told = 0

    def __call__(self, report: SendReport) -> None:
        self.told += 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    __hash__ = None  # type: ignore[assignment]


def send_to_one_of_two(**options: Any) -> None:
    """A send that the first worker commits, and the second does not answer."""
    with Sender("thread", nn.Linear(2, 2), num_workers=2, **options) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(2, 2))
        pending = sender.send_async()
        receiver.receive()
        with pytest.raises(SendError):
            pending.wait(0)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


Sample = Callable[..., float | None]


@pytest.fixture
def sample(registry: CollectorRegistry) -> Sample:
    return lambda name, **labels: registry.get_sample_value(name, WHICH | labels)


def test_prometheus_counts_sends_workers_bytes_and_phases(
    registry: CollectorRegistry, sample: Sample
) -> None:
    send_to_one_of_two(layers=[Metrics(registry)])
    assert sample("sync_sends_total", outcome="failed") == 1
    assert sample("sync_worker_updates_total", outcome="updated") == 1
    assert sample("sync_worker_updates_total", outcome="failed") == 1
    assert (sample("sync_delivered_bytes_total") or 0) > 24
    assert sample("sync_version") == 1
    assert sample("sync_send_seconds_count") == 1
    for phase in (
        "prepare",
        "publish",
        "pack",
        "deliver",
        "stage",
        "commit",
        "acknowledge",
        "pause",
    ):
        assert sample("sync_phase_seconds_count", phase=phase) == 1, phase
    assert (sample("sync_phase_seconds_sum", phase="commit") or 0) > 0


def test_several_metrics_may_share_a_registry(registry: CollectorRegistry, sample: Sample) -> None:
    for _ in range(2):
        send_to_one_of_two(layers=[Metrics(registry)])
    assert sample("sync_sends_total", outcome="failed") == 2


def test_what_is_skipped_is_no_send(registry: CollectorRegistry, sample: Sample) -> None:
    layers = [Interval(2), Metrics(registry)]
    with Sender("thread", nn.Linear(2, 2), num_workers=1, layers=layers) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(2, 2))
        pending = sender.send_async()
        receiver.receive()
        pending.wait()
        sender.send()
    assert sample("sync_sends_total", outcome="ok") == 1
    assert sample("sync_worker_updates_total", outcome="skipped") == 1


def test_opentelemetry_has_the_same() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    send_to_one_of_two(layers=[Metrics(CollectorRegistry(), provider)])
    data = reader.get_metrics_data()
    provider.shutdown()
    assert data is not None
    ((scope,),) = [resource.scope_metrics for resource in data.resource_metrics]
    points: dict[str, list[Any]] = {m.name: list(m.data.data_points) for m in scope.metrics}
    assert scope.scope.name == "sync_core"
    assert {p.attributes["outcome"]: p.value for p in points["sync_worker_updates"]} == {
        "updated": 1,
        "skipped": 0,
        "failed": 1,
        "dropped": 0,
        "quarantined": 0,
        "restarted": 0,
        "joining": 0,
    }
    assert [p.value for p in points["sync_version"]] == [1]
    phases = {p.attributes["phase"]: p.count for p in points["sync_phase_seconds"]}
    assert phases == dict.fromkeys(
        ("prepare", "publish", "pack", "deliver", "stage", "commit", "acknowledge", "pause"), 1
    )
    assert {m.name: m.unit for m in scope.metrics}["sync_send_seconds"] == "s"


def test_without_either_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sync_plugin_std.layers._prometheus", None)
    Metrics()
    with pytest.raises(RequirementError, match=r"sync-plugin-std\[prometheus\]"):
        Metrics(CollectorRegistry())
    monkeypatch.setitem(sys.modules, "sync_plugin_std.layers._opentelemetry", None)
    with pytest.raises(RequirementError, match=r"sync-plugin-std\[opentelemetry\]"):
        Metrics(None, MeterProvider())
    with pytest.raises(RequirementError, match="Metrics needs pip install"):
        Metrics()
    with pytest.raises(RequirementError, match=r"'metrics' \(sync-plugin-std .*Metrics needs pip"):
        Sender("none", nn.Linear(2, 2), num_workers=1, layers=["metrics"])
    main(["list", "--json"])
    (listed,) = [each for each in json.loads(capsys.readouterr().out) if each["name"] == "metrics"]
    assert "Metrics needs pip install" in listed["needs"]
    assert listed["error"] is None


def test_metrics_by_name_are_those_of_the_process() -> None:
    which = {"scheme": "none", "model_id": "by name", "outcome": "ok"}
    for given in ({"layers": ["metrics"]}, {"on_report": Metrics()}):
        model = nn.Linear(2, 2)
        with Sender("none", model, num_workers=1, model_id="by name", **given) as sender:
            sender.send()
    assert REGISTRY.get_sample_value("sync_sends_total", which) == 2


def test_a_reporter_without_hooks_stays_with_the_sender(registry: CollectorRegistry) -> None:
    metrics = Metrics(registry)
    model = nn.Linear(2, 2)
    with Sender("shm", model, num_workers=1, layers=["bf16", metrics]) as sender:
        assert sender.address(0).layers == ()


def test_reporters_without_hooks_are_told_apart_by_identity() -> None:
    first, second = Equal(), Equal()
    with Sender("none", nn.Linear(2, 2), num_workers=1, layers=[first, second]) as sender:
        sender.send()
    assert (first.told, second.told) == (1, 1)


def test_a_report_interrupted_by_ctrl_c_is_not_told_again() -> None:
    told: list[int] = []
    hooks: list[int] = []

    def interrupted(report: SendReport) -> None:
        told.append(report.version)
        raise KeyboardInterrupt

    with Sender("none", nn.Linear(2, 2), num_workers=1, on_report=interrupted) as sender:
        sender.register_post_hook(lambda: hooks.append(sender.version))
        with pytest.raises(KeyboardInterrupt):
            sender.send()
    assert (told, hooks) == ([1], [1])


def test_a_name_that_is_taken_leaves_the_others_free(registry: CollectorRegistry) -> None:
    taken = Gauge("sync_version", "Another library's.", registry=registry)
    with pytest.raises(ValueError, match="sync_version"):
        Metrics(registry)
    registry.unregister(taken)
    send_to_one_of_two(layers=[Metrics(registry)])


def test_a_reporter_may_have_hooks_too() -> None:
    class Both(Reporter):
        def __init__(self) -> None:
            self.versions: list[int] = []

        @hookimpl
        def skip_update(self) -> bool:
            return len(self.versions) == 1

        def __call__(self, report: SendReport) -> None:
            self.versions.append(report.version)

    both = Both()
    with Sender("none", nn.Linear(2, 2), num_workers=1, layers=[both]) as sender:
        skipped = [sender.send().skipped for _ in range(3)]
    assert skipped == [(), (0,), ()]
    assert both.versions == [1, 1, 2]


def test_what_on_report_raises_is_logged_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(report: SendReport) -> None:
        raise ZeroDivisionError

    with Sender("none", nn.Linear(2, 2), num_workers=1, on_report=fail) as sender:
        assert sender.send().updated == (0,)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "raised about the report of version 1" in record.message


def test_increments_and_the_share_that_travelled(
    registry: CollectorRegistry, tmp_path: Path
) -> None:
    weights, metrics = {"w": torch.zeros(1000)}, Metrics(registry)
    which = {"scheme": "increments::file", "model_id": "policy"}
    with Sender(
        "increments::file",
        weights,
        num_workers=1,
        layers=[metrics],
        directory=str(tmp_path),
        poll=0.001,
    ) as sender:
        receiver = Receiver(sender.address(0), {"w": torch.ones(1000)})
        for kind in ("whole", "increment"):
            pending = sender.send_async()
            receiver.receive()
            pending.wait()
            name = "sync_worker_increments_total"
            assert registry.get_sample_value(name, which | {"kind": kind}) == 1
            weights["w"][3] += 1
    changed = registry.get_sample_value("sync_changed_ratio", which)
    assert changed == pytest.approx(0.001, rel=0.02)
