"""The plugin of `make test-torchrl` puts schemes of sync-core into the place of TorchRL's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

UPSTREAM = Path(__file__).with_name("upstream")
TESTS = """
from torchrl.collectors import _multi_base
from torchrl.weight_update import SharedMemWeightSyncScheme, WeightSyncScheme

from sync_plugin_torchrl import Scheme

class TestSharedMemWeightSyncScheme:
    def test_sharedmem_flow(self):
        SharedMemWeightSyncScheme().shared_transport.unique_weights

def test_a_collector_takes_it_by_default():
    assert issubclass(SharedMemWeightSyncScheme, Scheme)
    assert _multi_base.SharedMemWeightSyncScheme is SharedMemWeightSyncScheme
    assert _multi_base.WeightSyncScheme is WeightSyncScheme

class TestCollector:
    def _in_another_process(self):
        collector.update_policy_weights_()

    def test_updates(self):
        assert self._in_another_process

def test_without_weights():
    raise AssertionError
"""


@pytest.mark.timeout(110)
def test_schemes_are_replaced_and_other_tests_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_weightsync.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "stand_ins"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--disable-warnings", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(UPSTREAM)},
        timeout=100,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 passed, 1 deselected, 1 xfailed" in done.stdout, done.stdout + done.stderr
