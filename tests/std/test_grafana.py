"""The Grafana dashboard asks only for what the layer `metrics` exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from torch import nn

from sync_core import Receiver, Sender
from sync_plugin_std import Metrics

PROMTOOL = shutil.which("promtool")
_SELECTOR = re.compile(r"\b(sync_\w+)\{(.*?)\}")
_GROUPING = re.compile(r"by \((.*?)\)")
_MATCHER = re.compile(r'(\w+)(=~?)"(.*?)"')


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    text = files("sync_plugin_std").joinpath("grafana.json").read_text()
    loaded: dict[str, Any] = json.loads(text)
    return loaded


@pytest.fixture(scope="module")
def samples() -> dict[str, list[dict[str, str]]]:
    """The labels of each sample that is exported after a send, by its name."""
    registry = CollectorRegistry()
    with Sender("shm", nn.Linear(2, 2), num_workers=1, layers=[Metrics(registry)]) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(2, 2))
        pending = sender.send_async()
        receiver.receive()
        pending.wait()
        receiver.close()
    exported: dict[str, list[dict[str, str]]] = {}
    for metric in registry.collect():
        for sample in metric.samples:
            exported.setdefault(sample.name, []).append(sample.labels)
    return exported


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_every_query_finds_samples(
    dashboard: dict[str, Any], samples: dict[str, list[dict[str, str]]]
) -> None:
    for expression in expressions(dashboard):
        selectors = _SELECTOR.findall(expression)
        assert selectors, expression
        for name, matchers in selectors:
            assert name in samples, f"{name} is not exported: {expression}"
            known = {label for labels in samples[name] for label in labels}
            wanted = {label: value for label, _, value in _MATCHER.findall(matchers)}
            assert wanted.keys() <= known, expression
            for grouping in _GROUPING.findall(expression):
                assert {*grouping.split(", ")} <= known, expression
            fixed = {label: value for label, value in wanted.items() if "$" not in value}
            # No send has failed here.
            if fixed != {"outcome": "failed"}:
                assert any(fixed.items() <= labels.items() for labels in samples[name]), expression


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool is installed: apt-get install prometheus")
def test_prometheus_parses_every_query(dashboard: dict[str, Any], tmp_path: Path) -> None:
    queries = [
        re.sub(r"\$[a-z]\w*", ".*", query.replace("$__rate_interval", "1m"))
        for query in expressions(dashboard)
    ]
    rules = [{"record": f"panel_{i}", "expr": query} for i, query in enumerate(queries)]
    path = tmp_path / "rules.json"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    command = [str(PROMTOOL), "check", "rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_every_metric_is_shown(
    dashboard: dict[str, Any], samples: dict[str, list[dict[str, str]]]
) -> None:
    shown = {
        name for expression in expressions(dashboard) for name, _ in _SELECTOR.findall(expression)
    }
    exported = {name for name in samples if not name.endswith(("_created", "_sum", "_count"))}
    assert exported == shown


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_variables_come_from_labels(
    dashboard: dict[str, Any], samples: dict[str, list[dict[str, str]]]
) -> None:
    used = {name for text in expressions(dashboard) for name in re.findall(r"\$([a-z]\w+)", text)}
    defined = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert used <= defined.keys()
    for name in used:
        query = defined[name]["query"]["query"]
        found = re.fullmatch(r"label_values\((\w+), (\w+)\)", query)
        assert found is not None
        assert found[2] in samples[found[1]][0]
