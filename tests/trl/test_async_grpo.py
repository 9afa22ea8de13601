"""TRL's `AsyncGRPOTrainer` with our workers and any scheme, on the CPU."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.trl.test_trl import make_model, tokenizer
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM

from sync_core import ModelError, OptionError, Receiver, SyncError
from sync_plugin_trl import Rollouts, SyncTransfer

# That its interface may change is said on the page.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
async_grpo: Any = importlib.import_module("trl.experimental.async_grpo")
packing: Any = importlib.import_module("trl.experimental.async_grpo.packing")
AsyncRollouts: Any = importlib.import_module("sync_plugin_trl").AsyncRollouts

pytestmark = [pytest.mark.timeout(110), pytest.mark.filterwarnings("ignore")]

__all__ = ["tokenizer"]

SAMPLING = GenerationConfig(max_new_tokens=6, do_sample=True, pad_token_id=0, eos_token_id=1)


class PlainAttention:
    """Computes the same as the kernel of TRL's trainer, which needs a GPU."""

    @staticmethod
    def flash_attn_varlen_func(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor,
        key_starts: Tensor,
        *_: Any,
        softmax_scale: float,
        **options: Any,
    ) -> Tensor:
        del options
        parts = []
        for begin, end, key_begin, key_end in zip(
            starts, starts[1:], key_starts, key_starts[1:], strict=False
        ):
            q, k, v = (
                x.transpose(0, 1)
                for x in (query[begin:end], key[key_begin:key_end], value[key_begin:key_end])
            )
            scores = q @ k.repeat_interleave(len(q) // len(k), 0).mT * softmax_scale
            # The last query sees all keys.
            hidden = torch.ones(scores.shape[-2:]).triu(1 + scores.shape[-1] - scores.shape[-2])
            scores = scores.masked_fill(hidden.bool(), -torch.inf)
            made = scores.softmax(-1) @ v.repeat_interleave(len(q) // len(v), 0)
            parts.append(made.transpose(0, 1))
        return torch.cat(parts)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL 1.16 looks for a GPU in two places."""
    monkeypatch.setattr(packing, "_flash_attn", PlainAttention)
    monkeypatch.setattr(async_grpo.async_grpo_trainer, "get_peak_flops_per_device", lambda *_: 1e12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> str:
    path = str(tmp_path_factory.mktemp("policy"))
    make_model().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def make_trainer(
    folder: str, tokenizer: Any, rollout_worker: Any, transfer: Any, output: Path, **options: Any
) -> Any:
    arguments: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-2,
        "token_budget": 256,
        "max_staleness": 4,
        "dtype": "float32",
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    return async_grpo.AsyncGRPOTrainer(
        folder,
        reward_funcs=[lambda **_: [0.0]],
        args=async_grpo.AsyncGRPOConfig(str(output), **{**arguments, **options}),
        train_dataset=Dataset.from_dict({"prompt": ["a b", "c"]}),
        processing_class=tokenizer,
        rollout_worker=rollout_worker,
        weight_transfer=transfer,
    )


ROWS = [{"prompt": "a b", "target": 2}, {"prompt": "c d e", "target": 3}]


def reward(completion_ids: list[list[int]], target: list[int], **_: Any) -> list[float | None]:
    return [float(tokens.count(t)) for tokens, t in zip(completion_ids, target, strict=True)]


class Kept(AsyncRollouts):  # type: ignore[misc]
    """Keeps what the trainer gets."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.samples: list[Any] = []
        put = self.rollout_buffer.put

        def keep(sample: Any) -> None:
            self.samples.append(sample)
            put(sample)

        self.rollout_buffer.put = keep


def held(model: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.named_parameters()}


@pytest.mark.long
@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("kill", [False, True], ids=["all live", "one is killed"])
def test_a_run_whose_samples_come_from_two_workers(
    folder: str, tokenizer: Any, tmp_path: Path, kill: bool
) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    with Rollouts(model, tokenizer, num_workers=2, on_failure="drop") as rollouts:
        worker = Kept(rollouts, ROWS, reward, SAMPLING, num_generations=4, max_samples=8)
        trainer = make_trainer(folder, tokenizer, worker, SyncTransfer(rollouts), tmp_path)
        killed: list[int] = []
        if kill:
            update = worker.update_model_version

            def update_and_kill(version: int) -> None:
                update(version)
                if version == 3:
                    os.kill(killed.pop(), signal.SIGKILL)

            worker.update_model_version = update_and_kill
            killed.append(rollouts._group.call(1, lambda _: os.getpid()).result(10))
        trainer.train()
        # Before the first step, and after each of four.
        assert trainer.model_version == rollouts.version == 5
        versions = [sample.model_version for sample in worker.samples]
        assert versions == sorted(versions)
        assert versions[0] == 1
        assert not worker._thread.is_alive()
        # The workers have what the trainer ends with, and it has learned.
        sent = held(trainer.model)
        assert any(not torch.equal(sent[n], p) for n, p in held(model).items())
        alive = [0] if kill else [0, 1]
        for worker_id in alive:
            got = rollouts._group.call(worker_id, lambda made: held(made._model)).result(30)
            assert all(torch.equal(got[name], tensor) for name, tensor in sent.items())
        for sample in worker.samples:
            made = sample.completion_mask == 1
            assert (sample.old_log_probs[made] < 0).all()
            assert (sample.old_log_probs[~made] == 0).all()


def test_log_probs_are_those_of_the_weights_that_sampled(tokenizer: Any) -> None:
    model = make_model()
    config = GenerationConfig(
        max_new_tokens=5, do_sample=True, temperature=0.7, top_k=4, pad_token_id=0, eos_token_id=1
    )
    with Rollouts(model, tokenizer, scheme="thread", num_workers=2, workers="thread") as rollouts:
        rollouts.send()
        prompts = [[2, 3], [4], [5, 6, 7]]
        for prompt, made in zip(prompts, rollouts.sample(prompts, config), strict=True):
            ids = torch.tensor([prompt + made.tokens])
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt) - 1 : -1]
            expected = (logits / 0.7).log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
            assert torch.tensor(made.log_probs) == pytest.approx(expected, abs=1e-4)
            assert made.version == 1
        assert rollouts.sample([], config) == []


def test_advantages_are_those_of_the_group(tokenizer: Any) -> None:
    def some(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None, 1.0, 3.0, 1.0]

    def chat(completions: list[Any], **_: Any) -> list[float | None]:
        assert all(message["role"] == "assistant" for (message,) in completions)
        return [None, 0.0, 0.0, 0.0]

    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    rewards: list[Any] = [some, chat]
    rows = [{"prompt": [{"role": "user", "content": "a b"}]}]
    with Rollouts(make_model(), tokenizer, scheme="thread", workers="thread") as rollouts:
        rollouts.send()
        worker = AsyncRollouts(rollouts, rows, rewards, SAMPLING, num_generations=4)
        worker.start()
        worker.update_model_version(7)
        samples = [worker.rollout_buffer.get(timeout=60) for _ in range(4)]
        worker.stop()
    none, low, high, _ = (sample.advantage for sample in samples)
    assert none == 0
    assert (low, high) == pytest.approx((-(0.5**0.5), 2**0.5))
    assert {sample.group_id for sample in samples} == {0}


def test_a_reward_that_raises_ends_the_training(tokenizer: Any) -> None:
    def broken(**_: Any) -> list[float | None]:
        raise ZeroDivisionError("no reward")

    with Rollouts(make_model(), tokenizer, scheme="thread", workers="thread") as rollouts:
        rollouts.send()
        worker = AsyncRollouts(rollouts, ROWS, broken, SAMPLING, num_generations=2)
        worker.check_health(60)
        with pytest.raises(SyncError, match="no sample has come for"):
            worker.check_health(-1)
        worker.start()
        worker._thread.join(60)
        with pytest.raises(SyncError, match="no reward"):
            worker.check_health(60)
        worker.stop()


def test_what_the_trainer_does_not_stream_travels_as_the_model_has_it() -> None:
    model, copy = make_model(), make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0)
    streamed = [
        (name, torch.full_like(parameter, 3.0))
        for name, parameter in model.named_parameters()
        if "norm" not in name
    ]
    transfer = SyncTransfer("shm", model, num_workers=1, timeout=30)
    receiver = Receiver(transfer.sender.address(0), copy)  # type: ignore[attr-defined]
    receiving = threading.Thread(target=receiver.receive)
    receiving.start()
    transfer.init_weight_transfer()
    transfer.pause()
    transfer.send_weights(iter(streamed))
    transfer.resume()
    receiving.join(30)
    for name, parameter in copy.named_parameters():
        assert parameter.unique().tolist() == [2.0 if "norm" in name else 3.0]

    def breaks() -> Iterator[tuple[str, Tensor]]:
        yield streamed[0]
        raise RuntimeError("the gather failed")

    with pytest.raises(ModelError, match="the gather failed"):
        transfer.send_weights(breaks())
    with pytest.raises(ModelError, match="which the sender's model has not"):
        transfer.send_weights(iter([("other", torch.zeros(1))]))
    receiver.close()
    transfer.destroy()


def test_bad_arguments() -> None:
    with pytest.raises(OptionError, match="a scheme needs a model"):
        SyncTransfer("shm")
    transfer = SyncTransfer("thread", make_model(), num_workers=0)
    with pytest.raises(OptionError, match="give it alone"):
        SyncTransfer(transfer.sender, num_workers=2)
    transfer.destroy()
    with pytest.raises(ValueError, match="no rows"):
        AsyncRollouts(None, [], reward, SAMPLING)
