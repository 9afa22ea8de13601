"""Write the directories from which vLLM loads adapters.

vLLM loads an adapter from a directory, and loads it again when a request needs an adapter that has
left its cache. So each version of an adapter keeps its directory until no request can use it.

A killed process leaves its directories behind. Each directory has a file that its process locks, so
that the next process which writes there can remove the directories of dead ones.
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
    """Writes adapter directories, and removes them when the process ends, if not earlier."""

    def __init__(self) -> None:
        #: By directory: the descriptor of its lock file.
        self._locks: dict[Path, int] = {}
        self._end = weakref.finalize(self, _remove_all, self._locks, os.getpid())

    def write(
        self,
        directory: Path,
        tensors: Mapping[str, Tensor],
        description: AdapterDescription,
        ranks: Mapping[str, int],
    ) -> None:
        """Write an adapter to a directory.

        Args:
            directory: the directory, which must not exist yet.
            tensors: the tensors, by their names in the trainer's model.
            description: the description of the adapter.
            ranks: the LoRA rank of each module.

        Raises:
            OptionError: the directory's name is not that of an adapter's version, or its parent is
                missing.
        """
        if not directory.is_absolute() or not _DIRECTORY.fullmatch(directory.name):
            raise OptionError(f"an adapter cannot be written to {str(directory)!r}")
        if not directory.parent.is_dir():
            raise OptionError(
                f"{str(directory.parent)!r} is not a directory of the engine's machine; type "
                "VllmTarget(…, adapter_directory=…)"
            )
        _remove_stale(directory.parent)
        # Renamed once it is complete and locked: other processes ignore this name.
        made = Path(tempfile.mkdtemp(prefix=".adapter-", dir=directory.parent))
        with ExitStack() as undone:
            undone.callback(shutil.rmtree, made, ignore_errors=True)
            lock = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            undone.callback(os.close, lock)
            os.write(lock, _boot())
            with suppress(OSError):  # without locks, other processes do not remove it
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
        """Remove a directory that this process has written."""
        if (lock := self._locks.pop(directory, None)) is not None:
            # Something else, such as a cleaner of /tmp, may have removed it.
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _remove_stale(parent: Path) -> None:
    """Remove the directories of dead processes of this machine."""
    for directory in parent.iterdir():
        if not _DIRECTORY.fullmatch(directory.name):
            continue
        # Skip directories without this file and locked ones.
        with suppress(OSError):
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # On some file systems, locks are not visible to other machines.
                if os.read(lock, 100) == _boot():
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)


def _boot() -> bytes:
    """Return an id of this machine that changes with each boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()


def _remove_all(locks: Mapping[Path, int], process: int) -> None:
    if os.getpid() == process:  # not in a forked process
        for directory in locks:
            shutil.rmtree(directory, ignore_errors=True)
