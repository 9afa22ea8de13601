"""`VllmTarget` with adapters: engines that take the steps, and fail at each of them."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import peft
import pytest
import torch

from sync_core import Address, Receiver, Sender, SendError, SyncError
from sync_plugin_std import lora
from sync_plugin_vllm import AdapterError, NotLoadedError, VllmTarget
from sync_plugin_vllm.clients import Client, Pause

pytestmark = pytest.mark.timeout(60)


class AdapterEngine(Client):
    """A server of one rank that has adapters, and a `Receiver`."""

    names_adapters = True

    def __init__(self, name: str = "engine") -> None:
        self.name = name
        #: A step that fails, before or after it has been taken.
        self.fails_before = self.fails_after = ""
        #: Called before each step, with its name.
        self.watch: Callable[[str], object] = lambda _: None
        #: The adapters by which requests can be made, and those that the ranks have files of.
        self.served: list[str] = []
        self.files: set[str] = set()
        #: The adapters that requests use; None where the engine does not know.
        self.used: set[str] | None = set()
        self._step: dict[str, Any] = {}
        self._found = False

    def world_size(self, timeout: float) -> int:
        return 1

    def init(self, info: dict[str, Any], timeout: float) -> None:
        step = info.get("step")
        if step is None:
            [address] = info["addresses"]
            self.receiver = Receiver(Address.from_json(address), load=self._load)
            return
        self._call(step["step"], lambda: self._take(step))

    def _call(self, name: str, take: Callable[[], None]) -> None:
        self.watch(name)
        if name == self.fails_before:
            raise ConnectionError("no engine is there")
        take()
        if name == self.fails_after:
            raise TimeoutError("no answer came")

    def _take(self, step: dict[str, Any]) -> None:
        kind = step["step"]
        if kind == "stage":
            self.receiver.stage(10)
        elif kind == "check":
            assert self.receiver.staged == step["version"]
        elif kind == "write":
            self._step = step
            self.files.add(step["name"])
            with pytest.raises(AdapterError):
                self.receiver.load()
        elif kind == "confirm":
            self._found = True
            self.receiver.load()
            self._step, self._found = {}, False
            self.receiver.confirm()
        elif kind == "drop":
            error = AdapterError if step["reason"] else NotLoadedError
            self.receiver.reject(error(0, step["reason"]))
            self.files.discard(self._step.get("name", ""))
            self._step = {}
        else:
            self.files &= set(step["names"])

    def _load(self, named: Any) -> None:
        if not self._found:
            raise AdapterError(0, "not loaded yet")

    def add_adapter(self, name: str, lora_id: int, directory: str, timeout: float) -> None:
        self._call("add", lambda: self.served.append(name))

    def served_adapters(self, name: str, timeout: float) -> list[str]:
        return list(self.served)

    def forget_adapter(self, name: str, timeout: float) -> None:
        self.served.remove(name)

    def adapters_in_use(self, timeout: float) -> set[str] | None:
        self.watch("use")
        return self.used

    def call(self, method: str, timeout: float, *args: Any) -> None: ...
    def pause(self, mode: Pause, timeout: float) -> None: ...
    def label(self, version: str, timeout: float) -> None: ...
    def resume(self, timeout: float) -> None: ...


@pytest.fixture
def engines() -> list[AdapterEngine]:
    return [AdapterEngine("one"), AdapterEngine("two")]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Linear(4, 4)


def connected(target: VllmTarget, **options: Any) -> Sender:
    model = peft.get_peft_model(Model(), peft.LoraConfig(r=2, target_modules=["q"]))
    layers = [lora("adapter")]
    sender = Sender(
        "shm", model, num_workers=target.num_workers, layers=layers, timeout=20, **options
    )
    target.connect(sender)
    return sender


STEPS = ("stage", "write", "add", "confirm")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("all_or_none", [False, True])
def test_one_fails_at_a_step(engines: list[AdapterEngine], step: str, *, all_or_none: bool) -> None:
    target = VllmTarget(engines, adapter="policy", all_or_none=all_or_none, timeout=20)
    with connected(target) as sender:
        target.send()
        engines[1].fails_before = step
        with pytest.raises(SendError, match="no engine is there") as raised:
            target.send()
        assert isinstance(raised.value.report.failed[1].error, SyncError)
        # What ranks confirm is the last step, and cannot be undone.
        others = not all_or_none or step == "confirm"
        assert raised.value.report.updated == ((0,) if others else ())
        for engine, status, has in zip(engines, target.engines, (others, False), strict=True):
            assert status.state == ("current" if has else "behind")
            assert status.version == (2 if has else 1)
            assert status.adapter == ("policy-v2" if has else "policy-v1")
            assert engine.served == [status.adapter]
            assert status.adapter in engine.files
        if not others:
            assert isinstance(target.engines[0].error, NotLoadedError)
            assert sender.workers[0].failures == 0
            assert engines[0].files == {"policy-v1"}

        engines[1].fails_before = ""
        assert target.send().updated == (0, 1)
        assert [engine.served for engine in engines] == [["policy-v3"]] * 2
        target.send()
        assert [engine.files for engine in engines] == [{"policy-v3", "policy-v4"}] * 2


@pytest.mark.parametrize("step", STEPS)
def test_an_answer_that_is_lost(engines: list[AdapterEngine], step: str) -> None:
    """The adapter that the ranks have confirmed is current, whatever became of the answer."""
    target = VllmTarget(engines[0], adapter="policy", timeout=20)
    with connected(target):
        target.send()
        engines[0].fails_after = step
        if step == "confirm":
            target.send()
        else:
            with pytest.raises(SendError, match="no answer came"):
                target.send()
        [status] = target.engines
        version = 2 if step == "confirm" else 1
        assert (status.version, status.adapter) == (version, f"policy-v{version}")
        assert engines[0].served == [status.adapter]
        assert status.adapter in engines[0].files


def test_an_interrupted_send_leaves_the_adapter_before(engines: list[AdapterEngine]) -> None:
    target = VllmTarget(engines[0], adapter="policy", timeout=20)
    with connected(target) as sender:
        target.send()
        ended, main = threading.Event(), threading.get_ident()

        def interrupt(step: str) -> None:
            if step == "confirm" and not ended.is_set():
                signal.pthread_kill(main, signal.SIGINT)
                assert ended.wait(20)

        end = sender.on_report(lambda _: ended.set())
        engines[0].watch = interrupt
        with pytest.raises(KeyboardInterrupt):
            target.send()
        end()
        [status] = target.engines
        assert (status.state, status.version, status.adapter) == ("behind", 1, "policy-v1")
        assert engines[0].served == ["policy-v1"]
        assert target.send().version == 3
        assert engines[0].served == ["policy-v3"]


def test_unloading_that_is_late_leaves_the_version(engines: list[AdapterEngine]) -> None:
    target = VllmTarget(engines[0], adapter="policy", timeout=20)
    go_on = threading.Event()
    with connected(target):
        engines[0].watch = lambda name: name == "use" and go_on.wait(30)
        with pytest.raises(SyncError, match="did not return before the deadline"):
            target.send(timeout=2)
        [status] = target.engines
        assert (status.state, status.version, status.adapter) == ("current", 1, "policy-v1")
        go_on.set()
        thread = target._engines[0].thread
        assert thread is not None
        thread.join(20)
        target.send()


def test_files_remain_while_requests_may_use_them(engines: list[AdapterEngine]) -> None:
    [engine, _] = engines
    target = VllmTarget(engine, adapter="policy", timeout=20)
    with connected(target):
        target.send()
        engine.used = None
        for _ in range(3):
            target.send()
        assert engine.files == {"policy-v1", "policy-v2", "policy-v3", "policy-v4"}
    # Those of the trainer before, too.
    engine.used = {"policy-v2"}
    target = VllmTarget(engine, adapter="policy", timeout=20)
    with connected(target, version=4):
        target.send()
        assert engine.files == {"policy-v2", "policy-v4", "policy-v5"}
        engine.used = set()
        target.send()
        assert engine.files == {"policy-v5", "policy-v6"}


class Server(BaseHTTPRequestHandler):
    """A server of vLLM that has adapters and metrics."""

    adapters, metrics = True, True

    def do_GET(self) -> None:
        if self.path == "/get_world_size":
            self.reply(200, {"world_size": 1})
        elif self.path == "/metrics":
            self.reply(200, "# TYPE vllm:lora_requests_info gauge\n" if self.metrics else "")
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        known = self.path == "/v1/load_lora_adapter" and self.adapters
        self.reply(400 if known else 404, {"detail": "Not Found"})

    def reply(self, status: int, body: Any) -> None:
        content = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


class WithoutMetrics(Server):
    metrics = False


class WithoutCalls(Server):
    adapters = False


@pytest.fixture
def serve() -> Iterator[Callable[[type[Server]], str]]:
    with ExitStack() as ends:

        def start(handler: type[Server]) -> str:
            server = ends.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), handler))
            thread = threading.Thread(target=server.serve_forever, args=(0.02,))
            thread.start()
            ends.callback(thread.join)
            ends.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}"

        yield start


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (WithoutMetrics, "leave out --disable-log-stats"),
        (WithoutCalls, "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ],
)
def test_a_server_that_cannot_take_adapters_is_refused(
    serve: Callable[[type[Server]], str], handler: type[Server], message: str
) -> None:
    target = VllmTarget(serve(handler), adapter="policy", timeout=20)
    with pytest.raises(SyncError, match=message):
        connected(target)
    assert target.engines[0].state == "unconnected"
