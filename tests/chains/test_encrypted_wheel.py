"""A wrapping scheme in a stranger's wheel passes the suite, alone and in a chain."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "encrypted.py"
PROJECT = """
[build-system]
requires = ["flit_core>=3.11,<5"]
build-backend = "flit_core.buildapi"

[project]
name = "encrypted"
version = "1.0"
description = "Encrypts what travels."
dependencies = ["sync-core>=0.1,<0.4", "cryptography"]

[project.entry-points."sync.schemes"]
encrypted = "encrypted:Encrypted"
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    shutil.copy(EXAMPLE, source)
    (source / "pyproject.toml").write_text(PROJECT)
    pip = (sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check")
    wheel = ("wheel", "--no-deps", "--no-build-isolation", "-w", str(source), str(source))
    subprocess.run([*pip, *wheel], check=True)
    (made,) = source.glob("*.whl")
    install = ("install", "--no-deps", "--no-index", "--target", str(folder), str(made))
    subprocess.run([*pip, *install], check=True)
    return folder


@pytest.mark.parametrize(
    "scheme", ["encrypted::shm", "encrypted::dist", "increments::encrypted::dist"]
)
def test_it_passes_the_suite(installed: Path, tmp_path: Path, scheme: str) -> None:
    suite = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "sync_testing.suite")
    done = subprocess.run(
        [sys.executable, *suite, "--scheme", scheme],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed), "SYNC_KEY": secrets.token_hex(32)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert len(EXAMPLE.read_text().splitlines()) < 120
