"""Workers that generate for TRL and Hugging Face trainers, kept current by sync-core."""

from sync_plugin_trl.callback import SyncCallback
from sync_plugin_trl.rollouts import Rollouts

__version__ = "0.1.0"

__all__ = ["Rollouts", "SyncCallback"]
