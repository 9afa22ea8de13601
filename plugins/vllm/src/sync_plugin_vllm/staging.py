"""Stage versions in one rank, and describe the steps that vLLM has no calls for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from vllm.logger import init_logger

from sync_core import OptionError, Receiver, SyncError
from sync_plugin_vllm.ranks import Ranks
from sync_plugin_vllm.sleep import WeightMemory
from sync_plugin_vllm.votes import NotLoadedError

_logger = init_logger(__name__)

StepName: TypeAlias = Literal["check", "updating", "stage", "write", "confirm", "drop", "keep"]


@dataclass(frozen=True, kw_only=True)
class EngineStep:
    """A step that vLLM has no call for, passed to ``init_weight_transfer_engine``.

    Args:
        step: ``"check"`` raises unless all ranks have staged the version; ``"updating"`` raises
            unless a weight update has begun; for the steps of adapters, see
            `sync_plugin_vllm.lora_worker`.
        version: the version.
        name: the adapter's name in the engine, such as ``"policy-v7"``; (keep) the common prefix of
            all versions, such as ``"policy-v"``.
        directory: (write) the directory for its files, which must not exist yet.
        description: (write) the fields of an `AdapterDescription`.
        lora_id: (write) its number in vLLM; 0 if the server chooses it.
        reason: (drop) why vLLM could not load it; empty if another engine failed.
        names: (keep) the adapters that requests may use.
    """

    step: StepName
    version: int = 0
    name: str = ""
    directory: str = ""
    description: Mapping[str, Any] = field(default_factory=dict)
    lora_id: int = 0
    reason: str = ""
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.step not in get_args(StepName):
            raise OptionError(f"a step must be one of {get_args(StepName)}, got {self.step!r}")


class Staging:
    """Stages versions in one rank, so that all ranks load a version or none does.

    Args:
        receiver: the receiver of this rank.
        memory: the state of the rank's weights; versions are refused while they are asleep.
        ranks: the ranks of the engine.
    """

    def __init__(self, receiver: Receiver, memory: WeightMemory, ranks: Ranks) -> None:
        self.receiver = receiver
        self._memory = memory
        self._ranks = ranks
        self._version: int | None = None

    def begin(self) -> None:
        """Stage the newest version."""
        self._version = 0
        self._stage_up_to(1)

    def versions(self, version: int) -> list[int | None]:
        """Return the version that each rank has staged; None for a rank whose weights are asleep.

        Args:
            version: the expected version. A rank that has rejoined may have received an older
                version first.
        """
        self._stage_up_to(version)
        return self._ranks.gather(None if self._memory.asleep else self._version)

    def check(self, version: int) -> None:
        """Raise unless all ranks have staged a version."""
        found = self.versions(version)
        if any(each != version for each in found):
            self.drop()
            if self._memory.asleep:
                raise self._memory.error(self.receiver.worker_id)
            raise SyncError(f"its ranks have staged the versions {found} rather than {version}")

    def drop(self) -> None:
        """Refuse the staged version."""
        message = "staged the version, and was not told to load it"
        self.receiver.reject(NotLoadedError(self.receiver.worker_id, message))

    def _stage_up_to(self, version: int) -> None:
        try:
            while self._version is not None and self._version < version:
                self._version = self.receiver.stage()
                if self._memory.asleep:
                    self.receiver.reject(self._memory.error(self.receiver.worker_id))
        except Exception:
            self._version = None
            _logger.exception("version %d could not be staged", version)
