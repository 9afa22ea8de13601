"""Delivers weights to the rollout workers of verl by any scheme of sync-core.

Name this package in verl's ``rollout.checkpoint_engine.custom_backend_module``. verl then imports
it in each process and finds the checkpoint engine ``"sync_core"`` (`SyncCoreEngine`).
"""

from importlib.util import find_spec

from sync_plugin_verl.engine import SyncCoreEngine
from sync_plugin_verl.rollout import StepError

__version__ = "0.1.0"

__all__ = ["StepError", "SyncCoreEngine", "register"]


def register() -> None:
    """Register the checkpoint engine ``"sync_core"`` with verl; importing the package does this.

    Raises:
        ImportError: verl is not installed, or cannot be imported.
    """
    try:
        from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
    except ImportError as error:
        raise ImportError(
            f"sync_plugin_verl cannot import verl ({error}); type pip install "
            '"sync-plugin-verl[verl]" in the environment of the trainer and of the rollouts'
        ) from error
    CheckpointEngine.register(SyncCoreEngine)
    CheckpointEngineRegistry.register("sync_core")(SyncCoreEngine)


if find_spec("verl") is not None:
    register()
