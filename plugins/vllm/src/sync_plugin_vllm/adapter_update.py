"""The trainer's side of adapters: loads each version under its own name, and unloads the others."""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sync_core import OptionError
from sync_plugin_vllm.adapter_model import AdapterDescription
from sync_plugin_vllm.clients import Client

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
#: What undoing a failed load may take, also after the deadline, in seconds; estimate.
_UNDOING = 5.0


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that an engine has loaded.

    Args:
        name: such as ``"policy-v7"``.
        lora_id: its number in vLLM; a server chooses another one.
        directory: where its files are, on the engine's machine.
    """

    name: str
    lora_id: int
    directory: str


@dataclass(slots=True)
class AdapterSlot:
    """The adapters of one name in one engine.

    Args:
        client: the engine.
        name: what the names of all versions begin with, such as ``"policy"``.
        parent: the directory of the engine's machine in which adapters are written.
    """

    client: Client
    name: str
    parent: str
    #: The adapter that requests use; None before the first.
    current: LoadedAdapter | None = None
    #: Names of adapters before it, which requests in progress may use.
    before: list[str] = field(default_factory=list)

    def load(
        self, version: int, description: AdapterDescription, left: Callable[[], float]
    ) -> None:
        """Load a version that all ranks have staged; the current one remains until `retire`.

        Args:
            version: the version.
            description: of the adapter, as the trainer sent it.
            left: returns the seconds until the deadline.

        Raises:
            Exception: the engine has not loaded it, and keeps what it has.
        """
        name, unique = f"{self.name}-v{version}", secrets.token_hex(4)
        directory = str(Path(self.parent) / f"{name}-{unique}")
        # Other than the small numbers that users give to adapters of their own.
        new = LoadedAdapter(name, (1 << 30) | (int(unique, 16) >> 2), directory)
        self.client.step(
            left(),
            step="write",
            version=version,
            name=name,
            directory=directory,
            description=asdict(description),
        )
        try:
            self.client.add_adapter(name, new.lora_id, directory, left())
        except Exception as error:
            self.client.step(_UNDOING, step="drop", reason=f"{type(error).__name__}: {error}")
            raise
        lora_id = 0 if self.client.names_adapters else new.lora_id
        try:
            self.client.step(left(), step="confirm", version=version, lora_id=lora_id)
        except Exception:
            but = "" if self.current is None else self.current.name
            self.client.forget_adapters(f"{self.name}-v", but, _UNDOING)
            raise
        if self.current is not None:
            self.before.append(self.current.name)
        self.current = new

    def retire(self, timeout: float) -> None:
        """Unload the versions before the current one, but for those that requests may use.

        A server refuses further requests for them at once. It may have accepted some that its
        metrics do not show yet, so their files remain until the next send.

        Args:
            timeout: of each call of the engine, in seconds.
        """
        assert self.current is not None
        current, prefix = self.current.name, f"{self.name}-v"
        self.client.forget_adapters(prefix, current, timeout)
        late = self.before[-1:] if self.client.names_adapters else []
        used = {*late, *self.client.adapters_in_use(self.before, timeout)}
        self.before = [name for name in self.before if name in used]
        self.client.step(timeout, step="keep", name=prefix, names=[current, *self.before])


def check_name(name: Any) -> str:
    """Return the name of an adapter.

    Raises:
        OptionError: not a text that can be a part of a name in vLLM, and of a path.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise OptionError(
            f"adapter must be a name of letters, digits, '.', '_' and '-', such as 'policy', got "
            f"{name!r}"
        )
    return name


def check_directory(directory: str | None) -> str:
    """Return the directory in which engines write adapters.

    Raises:
        OptionError: not the absolute path of one.
    """
    if directory is None:
        return tempfile.gettempdir()
    if not isinstance(directory, str) or not Path(directory).is_absolute():
        raise OptionError(
            "adapter_directory must be an absolute path on the machines of the engines, got "
            f"{directory!r}"
        )
    return directory


def request_for(slot: AdapterSlot) -> Any:
    """Return vLLM's ``LoRARequest`` for the adapter of an engine; see `VllmTarget.lora_request`."""
    if slot.client.names_adapters:
        raise OptionError(
            f'requests to {slot.client.name} have the name of an adapter in the field "model": '
            "type target.engines[0].adapter"
        )
    if slot.current is None:
        raise OptionError(f"{slot.client.name} has no adapter yet; type target.send()")
    from vllm.lora.request import LoRARequest

    return LoRARequest(slot.current.name, slot.current.lora_id, slot.current.directory)
