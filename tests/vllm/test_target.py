"""`VllmTarget` with engines that have vLLM's calls, and a module of torch as their model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sync_core import (
    Address,
    OptionError,
    Receiver,
    Sender,
    SendError,
    SyncError,
    gathered,
)
from sync_plugin_scale import Sharded, join_addresses
from sync_plugin_std import lora
from sync_plugin_vllm import AsleepError, NotLoadedError, VllmTarget

pytestmark = pytest.mark.timeout(60)


class Wrapped(torch.nn.Module):
    """A module whose tensors have a prefix, as PEFT needs."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(2, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.proj(x)
        return found


class TorchEngine:
    """An engine of one rank: vLLM's calls, and a `Receiver`."""

    def __init__(self) -> None:
        self.model: Any = torch.nn.Linear(2, 1)
        self.labels: list[str] = []
        self.caches: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.fails_in = ""
        self.hangs_in = ""
        self.asleep = False
        self.updating = False
        self.calls: list[tuple[str, TorchEngine]] = []

    def call(self, name: str) -> None:
        self.calls.append((name, self))
        if self.fails_in == name:
            raise ConnectionError("no engine is there")
        if self.hangs_in in ("", name):
            assert self.go_on.wait(30)

    def get_world_size(self) -> int:
        return 1

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        step = request["init_info"].get("step")
        if step is None:
            [self.address] = request["init_info"]["addresses"]
            self.join()
        elif step["step"] == "check" and self.receiver.staged != step["version"]:
            raise ValueError(f"its ranks have staged {self.receiver.staged}: no engine is there")
        elif step["step"] == "updating" and not self.updating:
            raise ValueError("no weight update has begun")

    def join(self) -> None:
        self.receiver = Receiver(Address.from_json(self.address), load=self.load)

    def sleep(self) -> None:
        """Discard the weights, as ``sleep(level=2)`` does."""
        self.asleep = True
        self.receiver.close()
        self.join()

    def load(self, named: Any) -> None:
        self.call("load")
        self.model.load_state_dict(dict(named))

    def start_weight_update(self) -> None:
        if self.updating:
            raise RuntimeError("start_weight_update called while an update is active")
        self.updating = True
        self.call("start")
        if self.fails_in != "stage":
            self.receiver.stage(10)
        if self.asleep:
            self.receiver.reject(AsleepError(self.receiver.worker_id, "the engine is asleep"))

    def update_weights(self, request: dict[str, Any]) -> None:
        version = request["update_info"]["version"]
        if self.asleep:
            return  # it has refused the version already
        assert self.receiver.staged == version
        try:
            self.receiver.load()
        except SyncError as error:
            self.receiver.reject(error)
        else:
            self.receiver.confirm()

    def finish_weight_update(self) -> None:
        if not self.updating:
            raise RuntimeError("finish_weight_update called without an update")
        self.updating = False
        self.receiver.reject(NotLoadedError(self.receiver.worker_id, "not loaded"))

    def update_weight_version(self, version: str) -> None:
        self.call("label")
        self.labels.append(version)

    def reset_prefix_cache(self) -> None:
        self.call("pause")

    def reset_mm_cache(self) -> None:
        self.caches.append("images")

    @property
    def llm_engine(self) -> TorchEngine:
        return self

    def reset_encoder_cache(self) -> None:
        self.caches.append("encoder")


@pytest.fixture
def engines() -> list[TorchEngine]:
    return [TorchEngine(), TorchEngine()]


def connected(target: VllmTarget, model: Any, **options: Any) -> Sender:
    sender = Sender("shm", model, num_workers=target.num_workers, timeout=20, **options)
    target.connect(sender)
    return sender


def test_a_version_comes_into_every_engine(engines: list[TorchEngine]) -> None:
    model = torch.nn.Linear(2, 1)
    target = VllmTarget(engines)
    with connected(target, model):
        assert target.send().updated == (0, 1)
    for engine in engines:
        assert torch.equal(engine.model.weight, model.weight)
        assert engine.labels == ["1"]
        assert engine.caches == ["images", "encoder"]
    assert [status.version for status in target.engines] == [1, 1]


@pytest.mark.parametrize(
    ("where", "state"), [("start", "behind"), ("pause", "behind"), ("load", "bad")]
)
def test_one_fails_and_the_next_send_heals_it(
    engines: list[TorchEngine], where: str, state: str
) -> None:
    model = torch.nn.Linear(2, 1)
    target = VllmTarget(engines, timeout=20)
    with connected(target, model):
        engines[1].fails_in = where
        began = time.monotonic()
        with pytest.raises(SendError, match="no engine is there") as raised:
            target.send()
        assert time.monotonic() - began < 15  # it does not wait for what will not come
        assert raised.value.report.updated == (0,)
        assert [status.state for status in target.engines] == ["current", state]
        assert engines[1].labels == (["bad"] if state == "bad" else [])

        engines[1].fails_in = ""
        assert target.send().updated == (0, 1)
        assert [status.state for status in target.engines] == ["current", "current"]
        assert engines[1].labels[-1] == "2"


def test_half_a_version_stays_bad_until_a_whole_one_is_loaded(engines: list[TorchEngine]) -> None:
    target = VllmTarget(engines, timeout=20)
    with connected(target, torch.nn.Linear(2, 1)):
        for fails_in in ("load", "start"):
            engines[0].fails_in = fails_in
            with pytest.raises(SendError):
                target.send()
            assert [status.state for status in target.engines] == ["bad", "current"]
            assert target.engines[0].version is None
        engines[0].fails_in = ""
        target.send()
        assert target.engines[0].version == 3


@pytest.mark.parametrize("where", ["start", "load"])
def test_one_that_hangs_is_given_up_at_the_deadline(engines: list[TorchEngine], where: str) -> None:
    model = torch.nn.Linear(2, 1)
    target = VllmTarget(engines, timeout=20)
    with connected(target, model):
        engines[1].hangs_in = where
        engines[1].go_on.clear()
        with pytest.raises(SendError, match="worker 1"):
            target.send(timeout=1)
        healthy = target.engines[0]
        assert (healthy.state, healthy.version, healthy.error) == ("current", 1, None)
        assert healthy.pause_seconds < 0.9  # it was resumed before the deadline
        assert engines[0].labels == ["1"]
        assert torch.equal(engines[0].model.weight, model.weight)
        began = time.monotonic()
        with pytest.raises(SendError, match="the call before has not returned"):
            target.send()
        assert time.monotonic() - began < 15  # it does not wait for the call before
        engines[1].go_on.set()
        assert target._engines[1].thread is not None
        target._engines[1].thread.join(20)
        # One that did not come as far as to be paused was not paused.
        assert (target.engines[1].pause_seconds > 0) == (where == "load")
        assert target.send().updated == (0, 1)


def test_engines_take_each_step_together(engines: list[TorchEngine]) -> None:
    calls: list[tuple[str, TorchEngine]] = []
    for engine in engines:
        engine.calls = calls
    model = torch.nn.Linear(2, 1)
    target = VllmTarget(engines, all_or_none=True, timeout=20)
    with connected(target, model):
        assert target.send().updated == (0, 1)
        assert target.send().updated == (0, 1)
    steps = ["start", "pause", "load", "label"]
    assert [name for name, _ in calls] == [step for step in steps * 2 for _ in engines]
    for engine in engines:
        assert torch.equal(engine.model.weight, model.weight)


def none_loaded(target: VllmTarget, engines: list[TorchEngine], sender: Sender) -> None:
    """Fail unless the first engine, which is healthy, keeps its weights and runs."""
    healthy = target.engines[0]
    assert (healthy.state, healthy.version) == ("behind", 1)
    assert isinstance(healthy.error, NotLoadedError)
    assert [engine.labels for engine in engines] == [["1"], ["1"]]
    assert sender.workers[0].failures == 0
    assert sender.workers[0].state == "behind"
    assert not engines[0].updating


@pytest.mark.parametrize("on_failure", ["raise", "quarantine"])
@pytest.mark.parametrize("where", ["start", "stage", "pause"])
def test_no_engine_loads_what_one_cannot(
    engines: list[TorchEngine], where: str, on_failure: Any
) -> None:
    model = torch.nn.Linear(2, 1)
    target = VllmTarget(engines, all_or_none=True, timeout=20)
    with connected(target, model, on_failure=on_failure) as sender:
        target.send()
        old = model.weight.detach().clone()
        model.weight.data.add_(1.0)
        engines[1].fails_in = where
        began = time.monotonic()
        with pytest.raises(
            SendError, match=r"did not load version 2: .*no engine is there"
        ) as raised:
            target.send()
        assert time.monotonic() - began < 15
        report = raised.value.report
        assert report.quarantined == ((1,) if on_failure == "quarantine" else ())
        assert report.updated == ()
        none_loaded(target, engines, sender)
        # To wait for what another stages is no pause.
        assert (target.engines[0].pause_seconds > 0) == (where == "pause")
        for engine in engines:
            assert torch.equal(engine.model.weight, old)

        # One in quarantine is not waited for, and decides nothing.
        if on_failure == "quarantine":
            assert target.send().updated == (0,)
            assert torch.equal(engines[0].model.weight, model.weight)
            assert torch.equal(engines[1].model.weight, old)
        engines[1].fails_in = ""
        target.send()
        assert [status.state for status in target.engines] == ["current", "current"]
        assert torch.equal(engines[1].model.weight, model.weight)


@pytest.mark.parametrize("where", ["start", "pause"])
def test_no_engine_waits_for_one_that_hangs(engines: list[TorchEngine], where: str) -> None:
    target = VllmTarget(engines, all_or_none=True, timeout=20)
    with connected(target, torch.nn.Linear(2, 1)) as sender:
        target.send()
        engines[1].hangs_in = where
        engines[1].go_on.clear()
        with pytest.raises(SendError, match=r"workers 1\): was not in time"):
            target.send(timeout=1)
        none_loaded(target, engines, sender)
        # The engine that hangs cannot be called, so that no engine can be updated.
        with pytest.raises(SendError, match="the call before has not returned"):
            target.send()
        none_loaded(target, engines, sender)
        engines[1].go_on.set()
        thread = target._engines[1].thread
        assert thread is not None
        thread.join(20)
        assert target.send().updated == (0, 1)


def test_one_that_fails_to_load_is_bad_alone(engines: list[TorchEngine]) -> None:
    target = VllmTarget(engines, all_or_none=True, timeout=20)
    with connected(target, torch.nn.Linear(2, 1)):
        engines[1].fails_in = "load"
        with pytest.raises(SendError, match="no engine is there") as raised:
            target.send()
        assert raised.value.report.updated == (0,)
        assert [status.state for status in target.engines] == ["current", "bad"]
        engines[1].fails_in = ""
        assert target.send().updated == (0, 1)


@pytest.mark.parametrize("all_or_none", [False, True])
def test_an_engine_without_weights_is_not_current(
    engines: list[TorchEngine], *, all_or_none: bool
) -> None:
    model = torch.nn.Linear(2, 1)
    target = VllmTarget(engines, all_or_none=all_or_none, timeout=20)
    with connected(target, model) as sender:
        target.send()
        engines[1].sleep()
        for _ in range(2):
            assert [engine.state for engine in target.engines] == ["current", "lost"]
            assert (target.engines[1].version, sender.workers[1].version) == (None, 0)
            with pytest.raises(SendError, match="the engine is asleep") as raised:
                target.send()
            assert raised.value.report.updated == (() if all_or_none else (0,))
            assert isinstance(raised.value.report.failed[1].error, AsleepError)
            assert sender.workers[1].failures == 0
            if all_or_none:
                assert target.engines[0].state == "behind"
                assert "the engine is asleep" in str(target.engines[0].error)
                break
        engines[1].asleep = False
        assert target.send().updated == (0, 1)
        assert [engine.state for engine in target.engines] == ["current", "current"]
    # The weights outlive the end of a sender.
    assert [engine.state for engine in target.engines] == ["current", "current"]


def test_an_engine_that_was_dropped_is_not_current(engines: list[TorchEngine]) -> None:
    target = VllmTarget(engines, timeout=20)
    with connected(target, torch.nn.Linear(2, 1), on_failure="drop"):
        engines[1].fails_in = "start"
        target.send()
        engines[1].fails_in = ""
        assert target.send().updated == (0,)
        assert [(e.state, e.version) for e in target.engines] == [("current", 2), ("behind", 0)]
        assert "type target.remove" in str(target.engines[1].error)
        assert engines[1].labels == []


def test_nothing_is_current_before_the_first_send(engines: list[TorchEngine]) -> None:
    target = VllmTarget(engines, timeout=20)
    with connected(target, torch.nn.Linear(2, 1)):
        assert [(e.state, e.version) for e in target.engines] == [("behind", 0)] * 2


def test_a_send_waits_for_an_engine_that_joins(engines: list[TorchEngine]) -> None:
    model = torch.nn.Linear(2, 1)
    target = VllmTarget(engines[0], timeout=20)
    joining = threading.Event()

    class Late(TorchEngine):
        def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
            joining.set()
            assert self.go_on.wait(30)
            super().init_weight_transfer_engine(request)

    late = Late()
    late.go_on.clear()
    with connected(target, model), ThreadPoolExecutor(2) as threads:
        added = threads.submit(target.add, late)
        assert joining.wait(30)
        sent = threads.submit(target.send)
        wait([sent], 0.2)
        late.go_on.set()
        assert added.result(30) == (1,)
        assert sent.result(30).updated == (0, 1)


def test_a_new_sender_has_the_engines_that_are_left(engines: list[TorchEngine]) -> None:
    model = torch.nn.Linear(2, 1)
    target = VllmTarget(engines, timeout=20)
    with connected(target, model):
        target.remove(0)
    with connected(target, model):
        assert target.send().updated == (0,)
    assert torch.equal(engines[1].model.weight, model.weight)
    assert [status.worker_ids for status in target.engines] == [(0,)]


def test_what_cannot_be_driven_is_refused(engines: list[TorchEngine]) -> None:
    with pytest.raises(OptionError, match="not an engine"):
        VllmTarget([object()])
    with pytest.raises(OptionError, match="http://localhost:8000"):
        VllmTarget("localhost:8000")
    target = VllmTarget(engines)
    with pytest.raises(SyncError, match=r"target\.connect\(sender\)"):
        target.send()
    with (
        Sender("shm", torch.nn.Linear(2, 1), num_workers=1) as sender,
        pytest.raises(OptionError, match=r"num_workers=target\.num_workers"),
    ):
        target.connect(sender)


class Engine(BaseHTTPRequestHandler):
    """A server of one rank."""

    def do_GET(self) -> None:
        content = b'{"world_size": 1}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


class Proxy(Engine):
    def do_GET(self) -> None:
        self.send_error(503)


@pytest.fixture
def serve() -> Iterator[Callable[[type[Engine]], int]]:
    """Start a server on the loopback interface, and return its port."""
    with ExitStack() as ends:

        def start(handler: type[Engine]) -> int:
            server = ends.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), handler))
            thread = threading.Thread(target=server.serve_forever, args=(0.02,))
            thread.start()
            ends.callback(thread.join)
            ends.callback(server.shutdown)
            return server.server_port

        yield start


def test_a_proxy_is_asked_for_other_machines_alone(
    serve: Callable[[type[Engine]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{serve(Proxy)}")
    for host in ("127.0.0.1", "localhost"):
        assert VllmTarget(f"http://{host}:{serve(Engine)}", timeout=5).num_workers == 1
    with pytest.raises(SyncError, match=r"(?s)503.*http_proxy names.*no_proxy=192\.0\.2\.7"):
        VllmTarget("http://192.0.2.7:8000", timeout=5)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("adapters", [False, True])
def test_a_sharded_trainer_gathers_what_engines_load(
    engines: list[TorchEngine], *, adapters: bool
) -> None:
    model: Any = Wrapped()
    layers: list[Any] = []
    expected = model.proj.weight.detach().clone()
    if adapters:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["proj"]))
        with torch.no_grad():
            model.base_model.model.proj.lora_B["default"].weight.fill_(1.0)
            expected += model.base_model.model.proj.get_delta_weight("default")
        layers = [lora("merged")]
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    target = VllmTarget(engines)
    for engine in engines:
        engine.model = Wrapped()
    with Sender(
        "shm",
        gathered(model),
        num_workers=target.num_workers,
        strategy="checkpoint",
        layers=layers,
    ) as sender:
        target.connect(sender)
        assert target.send().updated == (0, 1)
    for engine in engines:
        torch.testing.assert_close(engine.model.proj.weight, expected)


def test_ranks_send_the_parts_that_they_hold(engines: list[TorchEngine]) -> None:
    """The first rank drives the engines; here the second one is in the same process."""
    weights = {"weight": torch.randn(4, 3), "bias": torch.randn(4)}
    for engine in engines:
        engine.model = torch.nn.Linear(3, 4)
    rows = {name: len(tensor) for name, tensor in weights.items()}
    senders = []
    for rank in range(2):
        bounds = {name: (rank * n // 2, (rank + 1) * n // 2) for name, n in rows.items()}
        regions = {
            name: (bounds[name], *((0, n) for n in tensor.shape[1:]))
            for name, tensor in weights.items()
        }
        mine = {name: weights[name][first:last] for name, (first, last) in bounds.items()}
        senders.append(Sender(Sharded("shm", rank, 2, regions), mine, num_workers=2))
    target = VllmTarget(engines)
    with senders[0], senders[1]:
        with pytest.raises(OptionError, match="addresses has 1 addresses, and the engines 2 ranks"):
            target.connect(senders[0], [senders[0].address(0)])
        with pytest.raises(SyncError, match="this is the address of rank 0 of 2; join it"):
            target.connect(senders[0])
        target.connect(
            senders[0], [join_addresses([s.address(i) for s in senders]) for i in range(2)]
        )
        for version in (1, 2):
            others = senders[1].send_async()
            assert target.send().updated == (0, 1)
            assert others.wait().version == version
    for engine in engines:
        for name, tensor in engine.model.state_dict().items():
            assert torch.equal(tensor, weights[name])
