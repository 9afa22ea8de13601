"""The examples of algorithms learn, for some seconds; docs/how-to/algorithms.md has whole runs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
# A return that random actions do not reach, and frames that suffice for it by far.
CASES = {
    "ppo_discrete": (50.0, 60_000),
    "ppo_continuous": (-1020.0, 60_000),
    "dqn": (45.0, 40_000),
    "sac": (-700.0, 8_000),
    "impala": (60.0, 200_000),
    "ppo_recurrent": (0.4, 60_000),
    "ppo_images": (0.1, 60_000),
    "two_agents": (3.4, 30_000),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let the tests after this one have the threads and the random state from before it."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_it_learns(name: str) -> None:
    path = EXAMPLES / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    goal, frames = CASES[name]
    # In this process, where the same seed gives the same run.
    assert module.run("none", frames, goal, seed=0)
    assert len(path.read_text(encoding="utf-8").splitlines()) < 150


@pytest.mark.timeout(300)
def test_it_learns_with_worker_processes() -> None:
    command = [sys.executable, str(EXAMPLES / "ppo_recurrent.py"), "--goal", "0.4"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
