"""A tiny Llama, vLLM engines of it, and the tokens that both make."""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]
import pytest
import torch

#: Read by vLLM when it is imported, also in the processes that it starts.
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_PLUGINS="sync_core",
    VLLM_USAGE_SOURCE="tests",
    VLLM_NO_USAGE_STATS="1",
    VLLM_WORKER_MULTIPROC_METHOD="spawn",
)

#: How an engine of the tiny Llama is made; more would only take time.
OPTIONS = dict(
    skip_tokenizer_init=True,
    dtype="bfloat16",
    enforce_eager=True,
    max_model_len=64,
    max_num_seqs=2,
    gpu_memory_utilization=0.1,
)
PROMPT = [1, 5, 9, 33, 77, 120]
NEW_TOKENS = 8
SIZES = dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
T = TypeVar("T")


def make_llama(seed: int) -> Any:
    """A Llama of 2 layers with other weights for each seed."""
    return make_model("Llama", seed)


def make_model(family: str, seed: int, **options: Any) -> Any:
    """A model of 2 layers, of a family such as ``"Llama"``, with other weights for each seed."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**(SIZES | options))
    model: Any = getattr(transformers, f"{family}ForCausalLM")(config)
    return model.to(torch.bfloat16).eval()


def with_engine(checkpoint: Path, use: Callable[[Any], T], **options: Any) -> T:
    """Call a function with an engine in this process, which ends afterwards."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    gc.collect()  # an engine that ends later would end the process groups of this one
    config = WeightTransferConfig(backend="sync_core")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = LLM(str(checkpoint), weight_transfer_config=config, **(OPTIONS | options))
    try:
        return use(llm)
    finally:
        llm.shutdown_weight_transfer_engine()
        del llm
        gc.collect()


def logprobs(llm: Any) -> list[float]:
    """Log-probabilities of the prompt, by an engine."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    [request] = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    found = zip(request.prompt_logprobs[1:], PROMPT[1:], strict=True)
    return [of[token].logprob for of, token in found]


def reference_logprobs(model: Any, prompt: Sequence[int] = PROMPT) -> list[float]:
    """Log-probabilities of a prompt, by Hugging Face's own model."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].float()
    found: list[float] = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    return found


def change(model: Any) -> None:
    """Change all weights, as a step of an optimiser would."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def greedy(model: Any) -> list[int]:
    """The tokens that Hugging Face's own model makes."""
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    tokens: list[int] = ids[0, len(PROMPT) :].tolist()
    return tokens


def check_output(output: tuple[list[int], list[str]], model: Any, version: object) -> None:
    """Fail unless an engine's tokens are those of a model, attributed to one version.

    Where the model's two best tokens are as good but for two roundings of bfloat16, which kernels
    for other processors make elsewhere, either will do. Another version's tokens are worse by far.

    Args:
        output: of `generated`.
        model: Hugging Face's own, with the weights that the engine should have.
        version: the version that the engine should name.
    """
    tokens, versions = output
    assert versions == [str(version)]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].float()
    worse = logits.max(-1).values - logits[range(len(tokens)), tokens]
    allowed = 2 * torch.finfo(torch.bfloat16).eps * logits.abs().max()
    assert bool((worse <= allowed).all()), f"{tokens} instead of {greedy(model)}: {worse.tolist()}"


def generated(llm: Any, adapter: Any = None) -> tuple[list[int], list[str]]:
    """The tokens that an engine makes, and the versions that it attributes them to.

    Args:
        llm: the engine.
        adapter: a ``LoRARequest``.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False)
    prompt = [{"prompt_token_ids": PROMPT}]
    [request] = llm.generate(prompt, params, use_tqdm=False, lora_request=adapter)
    [output] = request.outputs
    return list(output.token_ids), [span.version for span in output.weight_versions]


def shared_memory(processes: Iterable[Any]) -> set[Path]:
    """Return the files of shared memory that processes and their descendants have mapped."""
    mapped: set[str] = set()
    for process in processes:
        for each in (process, *process.children(recursive=True)):
            # A process may end meanwhile.
            with suppress(FileNotFoundError, ProcessLookupError):
                lines = Path(f"/proc/{each.pid}/maps").read_text().splitlines()
                mapped |= {line.split()[4] for line in lines if " /dev/shm/" in line}
    # By their inodes, since a semaphore is mapped before it gets its name.
    return {path for path in Path("/dev/shm").iterdir() if str(path.stat().st_ino) in mapped}


def remove(left: Iterable[Path]) -> None:
    """Remove files of shared memory, which vLLM's processes leave when they are killed."""
    for path in left:
        path.unlink(missing_ok=True)


#: The page whose commands and code the tests run.
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "vllm.md"


def blocks(language: str) -> list[str]:
    """The code blocks of the page."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


class Server:
    """A server of the page, in its own process group.

    Args:
        checkpoint: of the model.
        log: where its output goes.
        block: which of the commands of the page starts it.
    """

    def __init__(self, checkpoint: Path, log: Path, block: int = 0) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = shlex.split(blocks("bash")[block].replace("\\\n", " "))
        start = command.index("python")
        variables, words = command[:start], command[start + 1 :]
        replaced = {"8000": str(port), words[words.index("--model") + 1]: str(checkpoint)}
        # Smaller and faster than without; a tokenizer is not needed.
        options = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in OPTIONS.items()
            if name != "skip_tokenizer_init"
        ]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *(replaced.get(word, word) for word in words), *options],
                env=os.environ | dict(variable.split("=") for variable in variables),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until it answers, or has ended."""
        while self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except OSError:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(0.5)
            else:
                return
        raise RuntimeError(f"the server has ended: {self.log.read_text()[-3000:]}")

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """The status, and what came back."""
        request = urllib.request.Request(
            f"{self.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def get(self, path: str) -> Any:
        """Return the answer of the server."""
        with urllib.request.urlopen(f"{self.url}/{path}", timeout=60) as reply:
            return json.loads(reply.read())

    def generated(self, model: str | None = None) -> tuple[list[int], list[str]]:
        """See `generated`; ``model`` is the name of an adapter."""
        params = {"temperature": 0, "max_tokens": NEW_TOKENS}
        body = {"token_ids": PROMPT, "sampling_params": params, "model": model}
        status, reply = self.post("inference/v1/generate", body)
        assert status == 200, reply
        [choice] = reply["choices"]
        return choice["token_ids"], [span["version"] for span in choice["weight_versions"]]

    def kill(self) -> None:
        """Kill the server's process group, and remove the shared memory that is left."""
        left: set[Path] = set()
        if self.process.poll() is None:
            left = shared_memory([psutil.Process(self.process.pid)])
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        remove(left)
