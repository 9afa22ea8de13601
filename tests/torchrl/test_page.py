"""The program of the page about TorchRL works as pasted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "torchrl.md"


@pytest.mark.timeout(115)
def test_the_program_of_the_page(tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert program is not None
    script = tmp_path / "program.py"
    script.write_text(program[1])
    done = subprocess.run(
        [sys.executable, script], timeout=110, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
