"""Processes for workers: started in milliseconds where that can be, and told how they ended."""

from sync_core.processes.start import start_process
from sync_core.processes.worker_process import WorkerProcess

__all__ = ["WorkerProcess", "start_process"]
