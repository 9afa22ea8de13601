"""A trainer that is killed leaves neither workers nor what their environments have started."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil  # type: ignore[import-untyped]
import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(110)]

SCRIPT = """
import gymnasium, subprocess, sys, torch
from sync_collector import Collector

class Policy(torch.nn.Linear):
    def forward(self, observation):
        return torch.nn.functional.one_hot(super().forward(observation).argmax(-1), 2)

class Simulated(gymnasium.Wrapper):
    def __init__(self, env):
        super().__init__(env)
        self.simulator = subprocess.Popen(["sleep", "100"])
    def close(self):
        self.simulator.kill()
        super().close()

def make():
    return gymnasium.make_vec("CartPole-v1", 2, "async", wrappers=[Simulated])

collector = Collector(make, Policy(4, 2), scheme=sys.argv[1], num_workers=2, frames_per_batch=100)
for batch in collector:
    collector.update_policy_weights_()
    print("ready", flush=True)
"""


@pytest.mark.parametrize("scheme", ["shm", "mp"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_trainer_leaves_no_process(scheme: str, number: signal.Signals) -> None:
    command = [sys.executable, "-c", SCRIPT, scheme]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline()
        started = psutil.Process(trainer.pid).children(recursive=True)
        trainer.send_signal(number)
        trainer.wait(10)
    # Two workers, each with two environments in processes, each with a simulator; and the process
    # that forks workers, which ends once they have.
    assert len(started) >= 2 + 4 + 4
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive
