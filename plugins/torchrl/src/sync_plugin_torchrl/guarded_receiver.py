"""A worker's receiver that commits versions on its own thread, between forward passes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from sync_core import Address, ClosedError, Receiver, SenderLostError, WorkerTimeoutError

_log = logging.getLogger("sync_core")
# How long closing waits for a commit in progress, in seconds; the same as in TorchRL's schemes.
_PATIENCE = 5.0


class GuardedReceiver:
    """Keeps a model up to date, and commits nothing during its forward passes.

    A thread stages the newest version, and commits it at once if the model is idle. Otherwise the
    next forward pass first commits it, so a worker that acts without a pause is updated too.

    Args:
        address: the result of `sync_core.Sender.address` for this worker.
        model: the model to update: a module whose forward passes are guarded, or anything else that
            `sync_core.Receiver` accepts.
        timeout: how long to wait for the first version, in seconds.
        on_commit: called with each version after its commit, before it is acknowledged.

    Raises:
        SyncError: the model does not fit, the sender is gone, or the first version did not arrive
            in time.
    """

    def __init__(
        self,
        address: Address,
        model: Any,
        *,
        timeout: float,
        on_commit: Callable[[int], object],
    ) -> None:
        # Held by forward passes and by commits.
        self._in_use = threading.RLock()
        self._staged = False
        self._model = model
        self._hooks = ExitStack()
        self._receiver = Receiver(address, model, timeout=timeout, on_commit=on_commit)
        self._thread = threading.Thread(target=self._keep_current, name="sync-torchrl", daemon=True)
        try:
            if self._receiver.receive() is None:
                raise WorkerTimeoutError(
                    address.worker_id,
                    f"got no weights of {address.model_id!r} within {timeout:g} s; does the "
                    "trainer call connect() of its scheme?",
                )
        except BaseException:
            self._receiver.close()
            raise
        self._guard(model)
        self._thread.start()

    def replace_model(self, model: Any) -> None:
        """Commit to another object from now on, and copy the current weights to it.

        Raises:
            LayoutMismatchError: the object does not fit the sender's model.
        """
        with self._in_use:
            self._receiver.register_model(model)
            self._receiver.apply_weights(self._model)
            self._model = model
            self._guard(model)

    def apply_weights(self, weights: Any) -> None:
        """Commit the given weights; see `sync_core.Receiver.apply_weights`."""
        with self._in_use:
            self._receiver.apply_weights(weights)

    def close(self) -> None:
        """Close the receiver; the model keeps its weights."""
        self._receiver.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)
        self._hooks.close()

    def _guard(self, model: Any) -> None:
        """Make the model's forward passes exclude commits."""
        if not isinstance(model, nn.Module):
            return

        # Functions instead of methods, since a copy of the model must share them.
        def begin(*_: Any) -> None:
            self._in_use.acquire()
            if self._staged:
                self._commit()

        def end(*_: Any) -> None:
            self._in_use.release()

        self._hooks.callback(model.register_forward_pre_hook(begin).remove)
        self._hooks.callback(model.register_forward_hook(end, always_call=True).remove)

    def _keep_current(self) -> None:
        while True:
            try:
                if self._receiver.stage() is None:
                    continue
            except (ClosedError, SenderLostError) as error:
                _log.info("torchrl worker stopped receiving reason=%s", error)
                return
            except Exception:
                _log.exception("torchrl worker could not receive a version")
                continue
            self._staged = True
            with self._in_use:
                if self._staged:
                    self._commit()

    def _commit(self) -> None:
        """Commit the staged version; the caller holds the lock."""
        self._staged = False
        try:
            self._receiver.load()
            self._receiver.confirm()
        except Exception as error:
            # The sender reports the error; the worker continues with its current weights.
            self._receiver.reject(error)
            _log.exception("torchrl worker could not commit a version")
