"""Hugging Face trainers, and a GRPO run of TRL whose completions come from workers."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    EarlyStoppingCallback,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from sync_core import ApplyContext, ModelError, Receiver, RemoteCallError, Sender, hookimpl
from sync_plugin_std import Interval
from sync_plugin_trl import Rollouts, SyncCallback
from sync_testing import Loopback

pytestmark = [pytest.mark.timeout(110), pytest.mark.filterwarnings("ignore")]

WORDS = ["<pad>", "</s>", *"abcdefghijklmnop"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="a"
    )


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )


class Noted(Sender):
    """A sender over loopback whose worker commits at once; it notes the weights of each send."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(Loopback(), model, num_workers=1)
        self.worker: Any = copy.deepcopy(model)
        self.receiver = Receiver(self.address(0), self.worker)
        self.sent: list[Tensor] = []

    def send(self, *args: Any, **kwargs: Any) -> Any:
        pending = self.send_async(*args, **kwargs)
        self.receiver.receive()
        self.sent.append(next(self.worker.parameters()).detach().clone())
        return pending.wait()


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        made = self.layer(x)
        return {"loss": ((made - labels) ** 2).mean(), "logits": made}


@pytest.mark.parametrize(("every", "sends"), [(1, 7), (2, 4), (3, 3), (9, 2)])
def test_a_trainer_sends_after_its_steps(every: int, sends: int, tmp_path: Path) -> None:
    model = Regression()
    rows = [{"x": torch.randn(2), "labels": torch.ones(1)} for _ in range(20)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    with Noted(model) as sender:
        callback = SyncCallback(sender, every=every)
        Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
        # When it begins, after every n of five steps, and at the end.
        assert len(sender.sent) == sends
        assert all(not torch.equal(a, b) for a, b in itertools.pairwise(sender.sent[:-1]))
        assert torch.equal(sender.sent[-1], model.layer.weight)


class TrainsDoubled(torch.optim.SGD):
    """Has twice the weights to act with in the model while it trains."""

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(factor)

    def eval(self) -> None:
        self.scale(0.5)

    def train(self) -> None:
        self.scale(2.0)


def test_the_callback_sends_the_weights_to_act_with(tmp_path: Path) -> None:
    model = Regression()
    rows = [{"x": torch.randn(2), "labels": torch.ones(1)} for _ in range(8)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    optimizer = TrainsDoubled(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with Noted(model) as sender:
        Trainer(
            model,
            arguments,
            train_dataset=rows,
            optimizers=(optimizer, scheduler),
            callbacks=[SyncCallback(sender)],
        ).train()
        assert torch.equal(sender.sent[-1], model.layer.weight / 2)


class Halve(TrainerCallback):
    """Ends training with other weights than those of the last step, as an average of them does."""

    @torch.no_grad()
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].layer.weight.mul_(0.5)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("end", ["best model", "early stop", "callback", "resumed"])
def test_workers_end_with_what_the_trainer_ends_with(end: str, every: int, tmp_path: Path) -> None:
    model, rows = Regression(), [{"x": torch.ones(2), "labels": torch.ones(1)}] * 8
    scores = itertools.chain([3.0, 1.0, 2.0, 5.0], itertools.repeat(6.0))
    stop = end == "early stop"
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=4,
        per_device_train_batch_size=4,
        learning_rate=0.1,
        eval_strategy="epoch",
        save_strategy="epoch",
        metric_for_best_model="score",
        greater_is_better=False,
        load_best_model_at_end=end == "best model",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )

    def train(sender: Noted, **options: Any) -> None:
        callbacks: list[TrainerCallback] = [SyncCallback(sender, every=every)]
        callbacks[:0] = [Halve()] if end == "callback" else []
        callbacks += [EarlyStoppingCallback(1)] if stop else []
        Trainer(
            model,
            arguments,
            train_dataset=rows,
            eval_dataset=rows,
            compute_metrics=lambda _: {"score": next(scores)},
            callbacks=callbacks,
        ).train(**options)

    with Noted(model) as sender:
        train(sender)
        if end == "resumed":
            checkpoint = tmp_path / "checkpoint-2"
            train(sender, resume_from_checkpoint=str(checkpoint))
        assert torch.equal(sender.worker.layer.weight, model.layer.weight)
        assert torch.equal(sender.worker.layer.bias, model.layer.bias)


def test_a_model_that_the_trainer_makes_is_not_the_senders(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    rows = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 8
    make: Any = Regression
    trainer = Trainer(args=arguments, train_dataset=rows, model_init=make)
    model: Any = trainer.model
    with Noted(model) as sender:
        trainer.add_callback(SyncCallback(sender))
        with pytest.raises(ModelError, match=r"shares no parameter .* no model_init="):
            trainer.train()
        assert not sender.sent


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_is_a_number_of_steps(every: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"every is .*; give 1 or more"):
        SyncCallback(None, every=every)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def rollouts(tokenizer: Any) -> Iterator[tuple[LlamaForCausalLM, Rollouts]]:
    model = make_model()
    with Rollouts(model, tokenizer, num_workers=2) as made:
        yield model, made


def greedy(model: LlamaForCausalLM, prompts: list[list[int]], config: Any) -> list[list[int]]:
    made = [model.generate(torch.tensor([p]), generation_config=config)[0] for p in prompts]
    return [ids[len(p) :].tolist() for p, ids in zip(prompts, made, strict=True)]


@pytest.mark.long
def test_workers_generate_what_the_trainers_model_generates(
    rollouts: tuple[LlamaForCausalLM, Rollouts],
) -> None:
    model, workers = rollouts
    prompts = [[2, 3, 4], [5], [6, 7, 8, 9, 10]]
    config = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=1)
    seen = []
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        workers.send()
        completions, versions = workers.generate(prompts, config)
        assert completions == greedy(model, prompts, config)
        assert versions == [workers.version] * 3
        seen.append(completions)
    assert seen[0] != seen[1]
    assert workers.generate([], config) == ([], [])
    # A value that a config leaves out comes from the model.
    config = GenerationConfig(max_new_tokens=6, do_sample=False)
    assert workers.generate(prompts, config)[0] == greedy(model, prompts, config)


class Refusing:
    """Worker 1 fails to apply every version but the first."""

    @hookimpl(wrapper=True)
    def apply_weights(self, context: ApplyContext) -> Generator[None, bool, bool]:
        if context.worker_id == 1 and context.version > 1:
            raise ValueError("not this one")
        return (yield)


@pytest.mark.parametrize("on_failure", ["drop", "quarantine"])
def test_a_worker_without_the_newest_weights_generates_nothing(
    on_failure: Any, tokenizer: Any
) -> None:
    config = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=1)
    options: dict[str, Any] = {"layers": [Refusing()], "on_failure": on_failure}
    with Rollouts(make_model(), tokenizer, scheme="thread", num_workers=2, **options) as workers:
        workers.send()
        assert workers.generate([[2], [3], [4]], config)[1] == [1, 1, 1]
        assert workers.send().updated == (0,)
        assert workers.generate([[2], [3], [4]], config)[1] == [2, 2, 2]


def test_a_send_that_skips_workers_does_not_delay_the_next_completions(tokenizer: Any) -> None:
    config = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=1)
    options: dict[str, Any] = {"layers": [Interval(3)], "timeout": 3600}
    with Rollouts(make_model(), tokenizer, scheme="thread", **options) as workers:
        assert [workers.send().updated for _ in range(3)] == [(0,), (), ()]
        assert workers.generate([[2]], config)[1] == [1]


def test_a_grpo_run(
    rollouts: tuple[LlamaForCausalLM, Rollouts], tokenizer: Any, tmp_path: Path
) -> None:
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    model, workers = rollouts
    first = workers.version
    seen: list[list[int]] = []

    def reward(completion_ids: list[list[int]], version: list[int], **_: Any) -> list[float | None]:
        seen.append(version)
        return [sum(token == 2 for token in tokens) / 8 for tokens in completion_ids]

    arguments = GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a b", "c", "d e f", "g"] * 4}),
        rollout_func=workers,
        callbacks=[SyncCallback(workers)],
    )
    trainer.train()
    # Each batch is made by the weights of the step before.
    assert seen == [[first + 1 + step] * 8 for step in range(4)]
    assert workers.version == first + 6


def test_a_worker_that_cannot_generate_is_named(
    rollouts: tuple[LlamaForCausalLM, Rollouts],
) -> None:
    with pytest.raises(RemoteCallError, match="worker 1"):
        rollouts[1].generate([[2], [len(WORDS) + 5]], GenerationConfig(pad_token_id=0))


def test_a_model_that_does_not_fit_ends_everything(tokenizer: Any) -> None:
    threads = threading.active_count()
    with pytest.raises(RemoteCallError, match="embed_tokens"):
        Rollouts(
            make_model(),
            tokenizer,
            scheme="thread",
            workers="thread",
            make_model=lambda: nn.Linear(2, 2),
        )
    assert threading.active_count() == threads
