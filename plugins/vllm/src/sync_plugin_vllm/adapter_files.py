"""The directories in which vLLM finds adapters.

vLLM reads an adapter from a directory, and reads it again whenever requests need one that its cache
has dropped. So each version of an adapter has a directory, from before it is loaded until no
request can use it.

A process that is killed leaves its directories. Each has a file that its process locks, so that the
next one to write there removes those of processes that have ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from sync_core import OptionError
from sync_plugin_vllm.adapter_model import AdapterDescription, peft_config

_DIRECTORY = re.compile(r"[A-Za-z0-9][\w.-]*-v[0-9]+-[0-9a-f]{8}")
_LOCK = "lock"


class AdapterFiles:
    """Writes directories, and removes them, at the latest when the process ends."""

    def __init__(self) -> None:
        #: By directory, the descriptor of its file that is locked.
        self._locks: dict[Path, int] = {}
        self._end = weakref.finalize(self, _remove_all, self._locks, os.getpid())

    def write(
        self,
        directory: Path,
        tensors: Mapping[str, Tensor],
        description: AdapterDescription,
        ranks: Mapping[str, int],
    ) -> None:
        """Write an adapter.

        Args:
            directory: a directory that does not exist.
            tensors: by their names in the trainer's model.
            description: of the adapter.
            ranks: by module.

        Raises:
            OptionError: the directory has no name of an adapter's version, or no parent.
        """
        if not directory.is_absolute() or not _DIRECTORY.fullmatch(directory.name):
            raise OptionError(f"an adapter cannot be written to {str(directory)!r}")
        if not directory.parent.is_dir():
            raise OptionError(
                f"{str(directory.parent)!r} is not a directory of the engine's machine; type "
                "VllmTarget(…, adapter_directory=…)"
            )
        _remove_stale(directory.parent)
        # Others look at a directory once it has its name, and is locked.
        made = Path(tempfile.mkdtemp(prefix=".adapter-", dir=directory.parent))
        with ExitStack() as undone:
            undone.callback(shutil.rmtree, made, ignore_errors=True)
            lock = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            undone.callback(os.close, lock)
            os.write(lock, _boot())
            with suppress(OSError):  # a file system without locks: it is not removed by others
                fcntl.flock(lock, fcntl.LOCK_EX)
            made.rename(directory)
            undone.pop_all()
        self._locks[directory] = lock
        names = {n: n.replace(f".{description.adapter}.weight", ".weight") for n in tensors}
        save_file(
            {names[name]: tensor for name, tensor in tensors.items()},
            directory / "adapter_model.safetensors",
        )
        config = json.dumps(peft_config(ranks, description.scaling), indent=1)
        (directory / "adapter_config.json").write_text(config)

    def remove(self, directory: Path) -> None:
        """Remove a directory, if this process has written it."""
        if (lock := self._locks.pop(directory, None)) is not None:
            # Others may have removed it, as what cleans /tmp does.
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _remove_stale(parent: Path) -> None:
    """Remove directories of processes on this machine that have ended."""
    for directory in parent.iterdir():
        if not _DIRECTORY.fullmatch(directory.name):
            continue
        # It has no such file, or a process has locked it.
        with suppress(OSError):
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Some file systems keep the locks of each machine apart.
                if os.read(lock, 100) == _boot():
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)


def _boot() -> bytes:
    """Return what tells this machine from others, until it is started again."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()


def _remove_all(locks: Mapping[Path, int], process: int) -> None:
    if os.getpid() == process:  # not forked from the rank's
        for directory in locks:
            shutil.rmtree(directory, ignore_errors=True)
