"""Compare results among the ranks of one engine, so that all act alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed
from vllm.distributed.parallel_state import get_world_group
from vllm.logger import init_logger

_logger = init_logger(__name__)


class Ranks:
    """Communicates with the other ranks of an engine.

    Args:
        parallel_config: vLLM's parallel configuration.
    """

    def __init__(self, parallel_config: Any) -> None:
        self._config = parallel_config

    @property
    def count(self) -> int:
        """The number of ranks."""
        return int(self._config.world_size_across_dp)

    @property
    def own(self) -> int:
        """The rank of this process."""
        config = self._config
        return int(config.data_parallel_index * config.world_size + config.rank)

    @property
    def of_layers(self) -> tuple[int, int]:
        """This rank among those that share each layer, and their number."""
        ranks = int(self._config.tensor_parallel_size)
        return int(self._config.rank) % ranks, ranks

    @property
    def is_first_of_machine(self) -> bool:
        """True if this rank writes files for all ranks of its machine."""
        return self.count == 1 or bool(get_world_group().local_rank == 0)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(values, value, group=get_world_group().cpu_group)
        return values

    def attempt(self, take: Callable[[], object]) -> tuple[Exception | None, str]:
        """Call a function on each rank, and share the errors.

        Returns:
            This rank's exception, if any, and the exceptions of all ranks as text; empty if none
            failed.
        """
        error: Exception | None = None
        try:
            take()
        except Exception as raised:
            error = raised
        problems = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        return error, "; ".join(f"rank {i}: {text}" for i, text in enumerate(problems) if text)

    @contextmanager
    def raising_once(self) -> Iterator[None]:
        """Let an error that all ranks raise leave only the last rank.

        vLLM reads the ranks' answers in order up to the first error. It would take the unread ones
        for answers to the next call.
        """
        try:
            yield
        except Exception:
            if self.own == self.count - 1:
                raise
            _logger.exception("rank %d failed", self.own)
