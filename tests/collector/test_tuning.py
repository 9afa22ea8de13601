"""The command ``sync-core tune-env``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sync_collector.bench.tuning import Setup, suggested
from sync_tools.main import main

pytestmark = pytest.mark.timeout(60)

FACTORIES = """
import gymnasium
from sync_collector.envs import CountingEnv

def nested():
    env = CountingEnv()
    return env

class Ends(CountingEnv):
    def reset(self, td=None, /):
        return super().reset(td).exclude("done", "truncated")

    def step(self, td, /):
        td = super().step(td)
        return td.set("next", td["next"].exclude("done", "truncated"))

def several():
    return gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="vector_entry_point")
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "envs_to_tune.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("factory", "workers"),
    [
        ("Pendulum-v1", ["1", "2"]),
        ("envs_to_tune:nested", ["1"]),
        ("envs_to_tune:Ends", ["1"]),
        ("envs_to_tune:several", ["1"]),
    ],
)
def test_measures_and_suggests(
    factory: str,
    workers: list[str],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries = ["--workers", *workers, "--envs", "1", "2", "--seconds", "0.05"]
    assert main(["tune-env", factory, *tries, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    several = factory.endswith("several")
    assert made["step"]["envs"] == (4 if several else 1)
    # A vector environment is the only one of its worker.
    assert len(made["setups"]) == len(workers) * (1 if several else 2)
    assert all(setup["frames_per_second"] > 0 for setup in made["setups"])
    assert made["best"] in made["setups"]
    assert "same weights" not in caplog.text


def test_prints_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["tune-env", "CartPole-v1", "--workers", "1", "--envs", "2", "--seconds", "0.05"]) == 0
    )
    printed = capsys.readouterr().out
    assert "Collector(make_env, policy, scheme='none', num_workers=1" in printed
    assert "num_workers_per_collector=2" in printed


@pytest.mark.parametrize(
    ("factory", "answer"),
    [
        (
            "absent_module:make",
            "the module 'absent_module' in this folder, or installed, does not import",
        ),
        ("envs_to_tune:absent", "the module 'envs_to_tune' has no function 'absent'"),
    ],
)
def test_a_factory_that_is_not_there(
    factory: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune-env", factory]) == 1
    assert answer in capsys.readouterr().err


def test_the_smallest_of_those_that_are_nearly_as_fast() -> None:
    def setup(workers: int, envs: int, speed: float) -> Setup:
        return Setup(workers=workers, envs=envs, frames_per_second=speed)

    small, wide, most = setup(1, 4, 80.0), setup(2, 4, 95.0), setup(2, 16, 100.0)
    assert suggested([small, most, wide]) is wide
