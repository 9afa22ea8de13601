"""Texts of strangers on the terminal: metadata, files, and what answers at an address."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from sync_tools.main import main

EVIL = "boom\x1b]0;title\x07\x1b[2J\x9b\u202e\u200b\r\nworker 1: current"
# What is not a line of text, and a line that a stranger has begun.
FORGED = re.compile(r"[^\n -~…µ]|^worker 1: current", re.MULTILINE)


@pytest.fixture(autouse=True)
def checked(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Check that nothing that the command prints acts on the terminal."""
    yield
    printed = "".join(capsys.readouterr())
    assert printed
    assert not FORGED.search(printed), printed


@pytest.mark.parametrize("command", [["list"], ["--help"], ["evil"], ["doctor", "evil"]])
def test_metadata(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = EVIL.replace("\r\n", " ")
    (tmp_path / "evil.py").write_text(
        "from sync_core import SyncError\nfrom sync_tools import Command\n"
        f"HELP = Command({EVIL!r}, __name__)\n"
        f"def __getattr__(name): raise ValueError({EVIL!r})\n"
    )
    info = tmp_path / "evil-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: evil\nVersion: {evil}\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text(
        "[sync.commands]\nevil = evil:GONE\nevil-help = evil:HELP\n"
        "[sync.schemes]\nevil = evil:GONE\n[sync.layers]\nevil = evil:GONE\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with suppress(SystemExit):
        main(command)


@pytest.mark.parametrize("command", ["check-history", "report"])
@pytest.mark.parametrize("key", ["event", "version", "model_id", "run"])
def test_files(command: str, key: str, tmp_path: Path) -> None:
    path = tmp_path / "boom.jsonl"
    values = {"event": "send", "time": 1.0, "version": 1, "seconds": 1.0, "run": "r"}
    path.write_text(json.dumps(values | {key: EVIL}) + "\n")
    main([command, str(path)])


WORKER = {"worker_id": 0, "state": EVIL, "state_seconds": 1.0, "version": EVIL, "lag": EVIL}
STATUS = {
    **dict.fromkeys(("model_id", "scheme", "process", "version", "sends", "failed_sends"), EVIL),
    "nbytes": 1,
    "last": None,
    "workers": [WORKER | {"last": None, "error": EVIL}],
}


@pytest.mark.parametrize("status", [200, 403])
@pytest.mark.parametrize(
    "content", [STATUS, {"error": EVIL, "workers": []}, {"workers": EVIL}, {"workers": [EVIL]}, []]
)
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_another_server(status: int, content: object, as_json: list[str]) -> None:
    class Evil(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Evil) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        main(["watch", "--once", *as_json, f"http://127.0.0.1:{server.server_port}/x"])
        thread.join()
