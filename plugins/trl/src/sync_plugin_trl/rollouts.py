"""Workers that generate completions, and commit the trainer's weights between two calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from sync_core import Address, Receiver, Sender, SendReport, SyncError, WorkerLostError
from sync_core.checks import check_count, check_seconds
from sync_core.transports import release_with
from sync_plugin_std.workers import choose_group, gather

Tokens = list[int]


@dataclass(frozen=True)
class Completion:
    """A completion of a prompt.

    Args:
        tokens: the token ids.
        log_probs: the log-probabilities of the tokens under the weights that generated them, at the
            sampling temperature, before filters such as top-k.
        version: the version of these weights.
    """

    tokens: Tokens
    log_probs: list[float]
    version: int


class Rollouts:
    """A ``rollout_func`` of `trl.GRPOTrainer`: generates completions with copies of the model.

    Calls of a worker run one after the other, so it never commits a version during
    ``model.generate``.

    Args:
        model: the trainer's model, a causal language model of transformers.
        tokenizer: its tokenizer.
        scheme: the name of an installed scheme, or a plugin object.
        num_workers: the number of workers.
        workers: the name of a worker group; None for the one that fits the scheme.
        make_model: makes the model of each worker; None for the trainer's architecture and dtype.
        seed: the workers sample with ``seed``, ``seed + 1``, … .
        timeout: deadline of every send, and of starting and stopping workers, in seconds.
        generate_timeout: deadline of `generate`, in seconds.
        worker_options: options of the worker group.
        **options: other arguments of `sync_core.Sender`, such as ``layers`` and ``on_failure``,
            and options of the scheme.

    Raises:
        PluginError: the scheme or the worker group cannot be found or used.
        RemoteCallError: a worker could not make its model, or the model does not fit the trainer's.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        scheme: Any = "shm",
        num_workers: int = 1,
        workers: Any = None,
        make_model: Callable[[], Any] | None = None,
        seed: int = 0,
        timeout: float = 60.0,
        generate_timeout: float = 600.0,
        worker_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_count(num_workers, "num_workers")
        self._tokenizer = tokenizer
        make = make_model or partial(
            AutoModelForCausalLM.from_config, model.config, dtype=model.dtype
        )
        group = choose_group([scheme], workers)
        self._generate_timeout = check_seconds(generate_timeout)
        # The workers that died during a generation.
        self._gone: set[int] = set()
        self._sender = Sender(scheme, model, num_workers=num_workers, timeout=timeout, **options)
        self._close = release_with(self, self._sender.close)
        try:
            self._group = group(
                lambda worker_id: _Generator(make, seed + worker_id),
                num_workers,
                timeout=timeout,
                **(worker_options or {}),
            )
        except BaseException:
            self._close()
            raise
        try:
            calls = {
                worker_id: self._group.call(
                    worker_id, _Generator.connect, self._sender.address(worker_id)
                )
                for worker_id in self._group.worker_ids
            }
            gather(calls, timeout, "connect to the trainer")
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """The newest version sent; 0 before the first."""
        return self._sender.version

    @property
    def model(self) -> Any:
        """The trainer's model."""
        return self._sender.model

    def send(self, weights: Any = None) -> SendReport:
        """Send weights, and wait until every worker has committed them.

        Args:
            weights: the weights, as for `sync_core.Sender.send`; None for the trainer's model.

        Raises:
            SendError: some workers failed; the others have the new version.
        """
        pending = self._sender.send_async(weights)
        try:
            for worker_id in pending.worker_ids:
                # The failures are in the report.
                self._group.call(worker_id, _Generator.receive, pending.version)
            report = pending.wait()
        except BaseException as error:
            pending.interrupt(error)
            raise
        self._gone.difference_update(report.updated)
        return report

    def generate(
        self, prompts: Sequence[Tokens], config: GenerationConfig
    ) -> tuple[list[Tokens], list[int]]:
        """Return a completion of each prompt, and the version of the weights that generated it.

        Workers that the sender has dropped or quarantined generate nothing.

        Args:
            prompts: token ids, without padding; the workers share them.
            config: as for ``model.generate``.

        Raises:
            SyncError: no worker is left.
            RemoteCallError: a worker raised.
            WorkerLostError: a worker died.
            WorkerTimeoutError: a worker did not return in time.
        """
        results = self._share(_Generator.generate, prompts, config)
        completions = [tokens for made, _ in results for tokens in made]
        versions = [version for made, version in results for _ in made]
        return completions, versions

    def sample(self, prompts: Sequence[Tokens], config: GenerationConfig) -> list[Completion]:
        """Return a completion of each prompt, with the log-probabilities of its tokens.

        A dead worker gets no more prompts, unless a later version reaches it again.

        Args:
            prompts: as for `generate`.
            config: as for ``model.generate``.

        Raises:
            SyncError: no worker is left; other errors are those of `generate`.
        """
        return [each for made in self._share(_Generator.sample, prompts, config) for each in made]

    def _share(
        self, function: Callable[..., Any], prompts: Sequence[Tokens], config: GenerationConfig
    ) -> list[Any]:
        """Divide the prompts among the workers that have the trainer's weights."""
        statuses = self._sender.workers
        ids = [
            i
            for i, status in statuses.items()
            if status.state != "quarantined" and i not in self._gone
        ]
        if not ids:
            raise SyncError(
                "no worker has the trainer's weights: all have died, were dropped, or are in "
                "quarantine; make new Rollouts, or leave out on_failure= to end at the first "
                "failure"
            )
        ends = [i * len(prompts) // len(ids) for i in range(len(ids) + 1)]
        calls = {
            worker_id: self._group.call(worker_id, function, prompts[begin:end], config)
            for worker_id, begin, end in zip(ids, ends, ends[1:], strict=False)
        }
        try:
            return gather(calls, self._generate_timeout, "generate")
        except WorkerLostError as error:
            self._gone.add(error.worker_id)
            raise

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Implement the ``rollout_func`` of `trl.GRPOTrainer`.

        Reward functions get the version of each completion as ``version``.
        """
        ids = [self.encode(prompt) for prompt in prompts]
        completions, versions = self.generate(ids, trainer.generation_config)
        # The trainer computes the log-probabilities, as for its own model.generate.
        return {
            "prompt_ids": ids,
            "completion_ids": completions,
            "logprobs": None,
            "version": versions,
        }

    def close(self) -> None:
        """Stop the workers, and close the sender."""
        try:
            self._group.stop()
        finally:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def encode(self, prompt: Any) -> Tokens:
        """Return the token ids of a prompt, which is text or chat messages."""
        if isinstance(prompt, str):
            tokens: Tokens = self._tokenizer(prompt)["input_ids"]
        else:
            tokens = self._tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_dict=True
            )["input_ids"]
        return tokens

    def decode(self, tokens: Tokens) -> str:
        """Return the text of token ids, without special tokens."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


class _Generator:
    """Generates with the model of one worker."""

    def __init__(self, make_model: Callable[[], Any], seed: int) -> None:
        torch.manual_seed(seed)
        self._model = make_model().eval()

    def connect(self, address: Address) -> None:
        self._receiver = Receiver(address, self._model)

    def receive(self, version: int) -> None:
        # An earlier call may have received this version, and no newer one may come.
        if max(self._receiver.version, self._receiver.refused) < version:
            self._receiver.receive()

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Tokens], config: GenerationConfig
    ) -> tuple[list[Tokens], int]:
        if not prompts:
            return [], self._receiver.version
        made, width, ends = self._complete(prompts, config)
        return [_until(row, ends) for row in made[:, width:].tolist()], self._receiver.version

    @torch.no_grad()
    def sample(self, prompts: Sequence[Tokens], config: GenerationConfig) -> list[Completion]:
        if not prompts:
            return []
        made, width, ends = self._complete(
            prompts, config, return_dict_in_generate=True, output_logits=True
        )
        heat = config.temperature or 1.0
        # One row per step, and one column per prompt.
        chosen = made.sequences[:, width:].T
        log_probs = torch.stack(
            [
                (logits.float() / heat).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
                for logits, tokens in zip(made.logits, chosen, strict=True)
            ],
            dim=1,
        ).tolist()
        version = self._receiver.version
        rows = [_until(row, ends) for row in chosen.T.tolist()]
        return [
            Completion(row, probs[: len(row)], version)
            for row, probs in zip(rows, log_probs, strict=True)
        ]

    def _complete(
        self, prompts: Sequence[Tokens], config: GenerationConfig, **options: Any
    ) -> tuple[Any, int, set[int]]:
        """Return the generated tokens, the width of the prompts, and the end-of-text tokens."""
        width = max(map(len, prompts))
        # The same defaults as in model.generate.
        usual = self._model.generation_config
        pad = usual.pad_token_id if config.pad_token_id is None else config.pad_token_id
        ends = usual.eos_token_id if config.eos_token_id is None else config.eos_token_id
        # The mask hides the padding of a row.
        ids = torch.full((len(prompts), width), pad or 0, device=self._model.device)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        made = self._model.generate(
            input_ids=ids, attention_mask=mask, generation_config=config, **options
        )
        return made, width, {ends} if isinstance(ends, int) else {*(ends or ())}

    def close(self) -> None:
        """Close the receiver; the worker group calls this when the worker ends."""
        self._receiver.close()


def _until(tokens: Tokens, ends: set[int]) -> Tokens:
    """Return the tokens up to and including the first end-of-text token."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)
