"""Measurements of collectors: ``sync-core bench collector`` and ``sync-core tune-env``."""

from sync_tools import Command

__all__ = ["TUNE_ENV"]

TUNE_ENV = Command(
    "measures an environment, and suggests how many workers, with how many environments each",
    f"{__name__}.tuning",
)
