"""Which layers and worker groups do not load, found out in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sync_core.plugins.finding import Finding

# Like worker processes, this one finds whatever only the sys.path of its parent leads to.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[1:]; from sync_core.cli import main; "
    "sys.exit(main(['list', '--json']))"
)
# What a plugin prints when it is imported comes before it.
_LIST = "\n["


def find(timeout: float = 120.0) -> Iterator[Finding]:
    """Those that do not load; of a scheme, trying it says so.

    Args:
        timeout: seconds for importing every plugin that is installed.
    """
    try:
        listed = _list(timeout)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        how = "hangs" if isinstance(error, subprocess.TimeoutExpired) else "ends the process"
        yield Finding(
            "plugins",
            f"importing all that are installed {how}",
            "to see which, type: python -X faulthandler -X importtime -m sync_core list",
        )
        return
    _, _, text = f"\n{listed}".rpartition(_LIST)
    for plugin in json.loads(f"[{text}"):
        # Two that claim one name are told apart by their metadata already.
        if plugin["error"] and plugin["kind"] != "schemes" and not plugin["conflicts"]:
            problem, _, remedy = plugin["error"].splitlines()[0].partition("; type: ")
            owner = plugin["distribution"]
            usual = f"pip install -U {owner}, or leave it out: SYNC_DISABLE={owner}"
            yield Finding(plugin["name"], problem, f"type: {remedy or usual}")


def _list(timeout: float) -> str:
    path = [str(Path(folder).absolute()) for folder in sys.path]
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT, *path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            listed, _ = process.communicate(timeout=timeout)
        finally:
            # What a plugin starts when it is imported would keep the pipe open.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, "list")
    return listed
