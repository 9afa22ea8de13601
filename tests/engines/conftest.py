"""Engines of a tiny Llama; their tests are left out where vLLM is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.engines.engines import Server, make_llama

# These need no vLLM: they read its sources, and skip where there are none.
READ_SOURCES = ("test_vllm_signatures.py",)
NEED_VLLM = [
    path.name
    for path in Path(__file__).parent.glob("*.py")
    if path.name == "sleeping.py"
    or (path.name.startswith("test_") and path.name not in READ_SOURCES)
]
collect_ignore = [] if find_spec("vllm") else NEED_VLLM


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that engines are started with."""
    path = tmp_path_factory.mktemp("llama")
    make_llama(0).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for the tests of a file."""
    server = Server(checkpoint, tmp_path_factory.mktemp("server") / "log")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()
