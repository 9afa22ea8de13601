"""The standard schemes, worker groups and layers of sync-core."""

__version__ = "0.1.0"
