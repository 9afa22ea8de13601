"""Engines that sleep: a level 2 sleep discards the weights, and the next send brings them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engines.engines import (
    blocks,
    change,
    check_output,
    generated,
    make_llama,
    with_engine,
)

from sync_core import Sender, SendError
from sync_plugin_vllm import AsleepError, VllmTarget

pytestmark = pytest.mark.timeout(600)


def refused(target: VllmTarget) -> None:
    """Fail unless an engine that is asleep refuses a version, and says how to wake it up."""
    with pytest.raises(SendError, match=r"llm\.wake_up\(tags=\[\"weights\"\]\)") as raised:
        target.send()
    [result] = raised.value.report.failed.values()
    assert isinstance(result.error, AsleepError)


def lost(target: VllmTarget, sender: Sender) -> None:
    """Fail unless both sides of the trainer know that an engine has no weights."""
    assert (target.engines[0].state, target.engines[0].version) == ("lost", None)
    assert (sender.workers[0].state, sender.workers[0].version) == ("behind", 0)


def test_discarded_weights_are_known_and_come_with_the_next_send(checkpoint: Path) -> None:
    from tests.engines.sleeping import WORKER

    def use(llm: Any) -> None:
        sleep_and_send(llm, "shm", all_or_none=False)
        sleep_and_send(llm, "increments::dist", all_or_none=True)

    with_engine(checkpoint, use, worker_cls=WORKER)


def sleep_and_send(llm: Any, scheme: str, *, all_or_none: bool) -> None:
    model = make_llama(1)
    target = VllmTarget(llm, all_or_none=all_or_none)
    with Sender(scheme, model, num_workers=1, strategy="checkpoint", timeout=60) as sender:
        target.connect(sender)
        target.send()
        check_output(generated(llm), model, "1")

        # At level 1 the weights are kept, and cannot be written.
        llm.sleep(level=1)
        assert target.engines[0].state == "current"
        refused(target)
        llm.wake_up()
        assert (target.engines[0].state, target.engines[0].version) == ("behind", 1)
        check_output(generated(llm), model, "1")
        target.send()

        llm.sleep(level=2)
        lost(target, sender)
        refused(target)
        lost(target, sender)
        llm.wake_up(tags=["weights"])
        lost(target, sender)
        change(model)
        version = target.send().version
        assert target.engines[0].state == sender.workers[0].state == "current"
        llm.wake_up(tags=["kv_cache"])
        check_output(generated(llm), model, version)

        names = dict(llm=llm, target=target, model=model, train=change)
        exec(compile(blocks("python")[5], "vllm.md", "exec"), names)
        check_output(generated(llm), model, version + 1)


@pytest.mark.parametrize("scheme", ["shm", "dist"])
def test_a_rank_that_has_staged_the_version_before_catches_up(
    checkpoint: Path, scheme: str
) -> None:
    """A rank that joins again may be given the last version just before the next one is sent."""
    from tests.engines.sleeping import WORKER

    def use(llm: Any) -> None:
        model = make_llama(1)
        target = VllmTarget(llm)
        with Sender(scheme, model, num_workers=1, strategy="checkpoint", timeout=60) as sender:
            target.connect(sender)
            target.send()
            llm.sleep(level=2)
            llm.wake_up()
            llm.start_weight_update()
            engine = llm.llm_engine.model_executor.driver_worker.weight_transfer_engine
            assert engine._staging._version == 1
            change(model)
            pending = sender.send_async()
            llm.update_weights({"update_info": {"version": 2}})
            llm.finish_weight_update()
            assert pending.wait().updated == (0,)
            assert (sender.workers[0].state, sender.workers[0].version) == ("current", 2)
            tokens, _ = generated(llm)
            check_output((tokens, ["2"]), model, 2)

    with_engine(checkpoint, use, worker_cls=WORKER)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "loaded"])
def test_a_rank_that_sleeps_refuses_each_version_that_it_is_sent(
    checkpoint: Path, check: bool
) -> None:
    """A rank that joins again in its sleep may be sent the last version, and then the next one."""
    from tests.engines.sleeping import WORKER

    def use(llm: Any) -> None:
        model = make_llama(1)
        target = VllmTarget(llm)
        with Sender("dist", model, num_workers=1, strategy="checkpoint", timeout=60) as sender:
            target.connect(sender)
            target.send()
            llm.sleep(level=2)
            llm.start_weight_update()
            pending = sender.send_async()
            if check:
                step = {"step": "check", "version": 2}
                with pytest.raises(AsleepError, match="lost its weights"):
                    llm.init_weight_transfer_engine({"init_info": {"step": step}})
            llm.update_weights({"update_info": {"version": 2}})
            llm.finish_weight_update()
            with pytest.raises(SendError) as raised:
                pending.wait()
            [result] = raised.value.report.failed.values()
            assert isinstance(result.error, AsleepError)

    with_engine(checkpoint, use, worker_cls=WORKER)
