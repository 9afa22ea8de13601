"""Adapters of environments that other distributions bring, found by their entry points."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gymnasium
import pytest

from sync_collector import Collector
from sync_collector.envs.adapt import as_env
from sync_core import RemoteCallError
from sync_tools.main import main

pytestmark = pytest.mark.timeout(60)

# An environment of dm_control's kind: reset() and step() return a time step.
STRANGER = """
from types import SimpleNamespace

import numpy as np

from sync_collector.envs import ArrayEnv, ArraySpec, EnvironmentAdapter


class Suite:
    def reset(self):
        self.count = 0
        return SimpleNamespace(count=0, reward=None, last=False)

    def step(self, action):
        self.count += int(action)
        return SimpleNamespace(count=self.count, reward=1.0, last=self.count >= 3)


class AdaptedSuite(ArrayEnv):
    array_specs = {"count": ArraySpec((), np.dtype(np.float32))}

    def __init__(self, suite):
        self.suite = suite

    def reset_arrays(self, mask=None):
        return {"count": self.suite.reset().count}

    def step_arrays(self, action):
        made = self.suite.step(action)
        return {"count": made.count}, made.reward, made.last, False

    def sample_action(self):
        return np.ones((), np.int64)


class Suites(EnvironmentAdapter):
    def accepts(self, made):
        return isinstance(made, Suite)

    def adapt(self, made, options):
        if options.info_keys:
            raise TypeError("a Suite has no info; leave out info_keys")
        return AdaptedSuite(made)


SUITES = Suites()
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return what installs a distribution with adapters, by their names."""

    def install(name: str, **adapters: str) -> None:
        folder = tmp_path / name
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / "stranger_suite.py").write_text(STRANGER)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{key} = {value}" for key, value in adapters.items()]
        (info / "entry_points.txt").write_text("\n".join(["[sync.environments]", *lines, ""]))
        monkeypatch.syspath_prepend(str(folder))

    return install


def _suite() -> object:
    from stranger_suite import Suite  # type: ignore[import-not-found]

    return Suite()


@pytest.mark.parametrize("scheme", ["none", "shm"])
def test_a_strangers_environment(install: Install, scheme: str) -> None:
    install("sync-suites", suite="stranger_suite:SUITES")
    with Collector(_suite, scheme=scheme, frames_per_batch=6) as collector:
        batch = next(collector)
    assert batch["next", "count"].tolist() == [1, 2, 3, 1, 2, 3]
    assert batch["next", "done"].flatten().tolist() == [False, False, True] * 2
    with pytest.raises(RemoteCallError, match="leave out info_keys"):
        Collector(_suite, scheme="none", frames_per_batch=6, info_keys=["x"])


def test_environments_without_an_adapter(install: Install) -> None:
    install("sync-suites", suite="absent:SUITES", text="stranger_suite:STRANGER")
    broken = "adapter 'suite' of sync-suites 1.0 does not load: .*No module named 'absent'"
    with pytest.raises(TypeError, match=f"no batch_size .*{broken}.*'text' of sync-suites"):
        as_env(_suite())
    assert as_env(gymnasium.make("CartPole-v1")).batch_size == ()


def test_two_adapters_of_one_kind(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("sync-suites", suite="stranger_suite:SUITES", again="stranger_suite:SUITES")
    with pytest.raises(TypeError, match=r"know a Suite: again, suite; .*=again"):
        as_env(_suite())
    monkeypatch.setenv("SYNC_DISABLE", "again")
    assert type(as_env(_suite())).__name__ == "AdaptedSuite"


def test_adapters_are_listed(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("sync-suites", suite="stranger_suite:SUITES", gone="absent:SUITES")
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert "adapters of environments" in listed
    assert "sync-suites" in listed
    assert "gone: does not import: ModuleNotFoundError" in listed
