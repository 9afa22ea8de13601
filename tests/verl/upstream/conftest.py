"""verl on this machine's processors; without verl, the tests are left out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if find_spec("verl") else ["*.py"]

# Before verl is imported, here and in each worker.
os.environ["VERL_USE_EXTERNAL_MODULES"] = "sync_cpu_platform"
os.environ["VERL_PLATFORM"] = "cpu"
# Its FSDP engine, which is registered for GPUs.
os.environ["VERL_ENGINE_DEVICE"] = "cuda"
os.environ["PYTHONPATH"] = str(Path(__file__).parent)
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    import ray

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
