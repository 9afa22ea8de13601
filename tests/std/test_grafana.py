"""The Grafana dashboard asks only for what the layer `metrics` exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from torch import nn

from sync_core import Receiver, Sender, SendError
from sync_plugin_std import Metrics

PROMTOOL = shutil.which("promtool")
PROMETHEUS = shutil.which("prometheus")
_LISTENING = re.compile(r'msg="Listening on".* address=(\S+)')
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


@pytest.mark.skipif(PROMETHEUS is None, reason="no Prometheus: apt-get install prometheus")
@pytest.mark.timeout(120)
def test_prometheus_answers_every_query(dashboard: dict[str, Any], tmp_path: Path) -> None:
    """A real Prometheus scrapes a sender, and each panel and each variable has values."""
    registry = CollectorRegistry()
    with (
        exporter(registry) as (port, scraped),
        Sender("thread", nn.Linear(2, 2), num_workers=1, layers=[Metrics(registry)]) as sender,
        Receiver(sender.address(0), nn.Linear(2, 2)) as receiver,
    ):
        with suppress(SendError):
            sender.send(timeout=0)
        receiver.receive()
        with prometheus(port, tmp_path) as url:
            for _ in range(4):  # a rate needs samples of several scrapes
                assert scraped.acquire(timeout=60)
                with suppress(SendError):
                    sender.send(timeout=0)
                receiver.receive()
                pending = sender.send_async()
                receiver.receive()
                pending.wait()
            for expression in expressions(dashboard):
                query = re.sub(r"\$[a-z]\w*", ".*", expression.replace("$__rate_interval", "1m"))
                result = ask(f"{url}/api/v1/query", query=query)["result"]
                assert result, expression
                assert "NaN" not in {each["value"][1] for each in result}, expression
            for label, value in (("scheme", "thread"), ("model_id", "policy")):
                known = ask(f"{url}/api/v1/label/{label}/values", **{"match[]": "sync_version"})
                assert known == [value]


@contextmanager
def exporter(registry: CollectorRegistry) -> Iterator[tuple[int, threading.Semaphore]]:
    """Serve metrics; yield the port, and a semaphore that each scrape releases."""
    scraped = threading.Semaphore(0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(generate_latest(registry))
            scraped.release()

        def log_message(self, *args: Any) -> None:
            del args

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port, scraped
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def prometheus(port: int, folder: Path) -> Iterator[str]:
    """Run a server that scrapes this port; yield its address."""
    scrape = {
        "job_name": "trainer",
        "scrape_interval": "300ms",
        "scrape_timeout": "300ms",
        "static_configs": [{"targets": [f"127.0.0.1:{port}"]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps({"scrape_configs": [scrape]}))
    options = ("--web.listen-address=127.0.0.1:0", f"--storage.tsdb.path={folder / 'data'}")
    command = [str(PROMETHEUS), f"--config.file={folder / 'prometheus.yml'}", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            listening = filter(None, map(_LISTENING.search, server.stderr))
            yield f"http://{next(listening)[1]}"
        finally:
            server.terminate()
            server.communicate(timeout=30)


def ask(url: str, **parameters: str) -> Any:
    """Return the data of an answer of Prometheus."""
    with urlopen(f"{url}?{urlencode(parameters)}", timeout=30) as answer:
        return json.load(answer)["data"]


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
