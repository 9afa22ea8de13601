"""The code blocks of the page on vLLM, run with a tiny model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.engines.engines import PROMPT, Server, blocks, change, check_output, make_llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sync_core import Sender
from sync_plugin_vllm import VllmTarget

pytestmark = pytest.mark.timeout(600)


def python_block(number: int, **replaced: str) -> str:
    """A block of the page; each text that is replaced must be in it."""
    code = blocks("python")[number]
    for old, new in replaced.items():
        assert old in code
        code = code.replace(old, new)
    return code


def run_block(code: str, **names: Any) -> dict[str, Any]:
    """Run a block that makes a sender, and close that."""
    namespace: dict[str, Any] = dict(Sender=Sender, VllmTarget=VllmTarget, **names)
    try:
        exec(compile(code, "vllm.md", "exec"), namespace)
    finally:
        if "sender" in namespace:
            namespace["sender"].close()
    return namespace


def test_the_first_block_prints_the_version_of_its_output(tmp_path: Path) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    make_llama(0).save_pretrained(tmp_path)
    # Several tokens: on some processors vLLM's build ends by SIGILL where a prompt has one.
    letters = models.WordLevel({**dict(zip("Helo", PROMPT, strict=False)), "?": 0}, unk_token="?")
    tokenizer = Tokenizer(letters)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path)

    script = tmp_path / "script.py"
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    eager = {
        name: str(tmp_path),
        'dtype="bfloat16", weight': 'dtype="bfloat16", enforce_eager=True, weight',
    }
    script.write_text(python_block(0, **eager))
    done = subprocess.run(
        [sys.executable, script], check=False, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = done.stdout.splitlines()[-1]
    assert printed.startswith("1 ")
    assert "version='1'" in printed


def test_a_trainer_sends_to_servers(server: Server) -> None:
    model = make_llama(7)
    code = python_block(
        1,
        **{
            '"http://10.0.0.7:8000", "http://10.0.0.8:8000"': f'"{server.url}"',
            "10.0.0.5": "127.0.0.1",
            "range(100)": "range(2)",
        },
    )
    [engine] = run_block(code, model=model, train=change)["target"].engines
    assert (engine.state, engine.version) == ("current", 2)
    check_output(server.generated(), model, "2")


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


# The first gathers the model, the second sends each rank's parts.
@pytest.mark.parametrize("block", [2, 3])
@pytest.mark.usefixtures("group")
def test_a_sharded_trainer_sends_to_a_server(server: Server, block: int) -> None:
    import torch

    model = make_llama(8)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    replaced = {
        "10.0.0.5": "127.0.0.1",
        "http://10.0.0.7:8000": server.url,
        "range(100)": "range(2)",
    }
    run_block(python_block(block, **replaced), model=model, torch=torch, train=lambda _: None)
    check_output(server.generated(), make_llama(8), "2")


def test_a_trainer_of_vllms_interface_sends_to_a_server(server: Server) -> None:
    model = make_llama(9)
    replaced = {
        "10.0.0.5": "127.0.0.1",
        "http://10.0.0.7:8000": server.url,
        "range(100)": "range(2)",
    }
    run_block(python_block(4, **replaced), model=model, rank=0, train=change)
    check_output(server.generated(), model, "3")
