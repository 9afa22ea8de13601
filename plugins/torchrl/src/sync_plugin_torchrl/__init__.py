"""Uses sync-core's schemes in TorchRL's collectors."""

from sync_plugin_torchrl.scheme import Scheme

__version__ = "0.1.0"

__all__ = ["Scheme"]
