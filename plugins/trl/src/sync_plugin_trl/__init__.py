"""Rollout workers for TRL and Hugging Face trainers, updated by sync-core."""

from typing import TYPE_CHECKING, Any

from sync_plugin_trl.callback import SyncCallback
from sync_plugin_trl.rollouts import Completion, Rollouts
from sync_plugin_trl.transfer import SyncTransfer

if TYPE_CHECKING:
    from sync_plugin_trl.async_rollouts import AsyncRollouts

__version__ = "0.1.0"

__all__ = ["AsyncRollouts", "Completion", "Rollouts", "SyncCallback", "SyncTransfer"]


def __getattr__(name: str) -> Any:
    # The only module that imports TRL.
    if name == "AsyncRollouts":
        from sync_plugin_trl.async_rollouts import AsyncRollouts

        return AsyncRollouts
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
