"""Commits what several receivers were sent: all of it, or nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack

from sync_core import Receiver, SyncError


def receive_together(
    receivers: Mapping[str, Receiver], versions: Mapping[str, int], timeout: float
) -> bool:
    """Wait for a version of each of some models, and commit them all.

    Nothing is written before everything is here. If one cannot be loaded, those before it get
    their old weights back, unless they are loaded by their scheme itself, and every sender is
    told.

    Args:
        receivers: by the name of their model.
        versions: what to commit, by the name of the model.
        timeout: seconds to wait for all of it.

    Returns:
        Whether the models have these versions, all of them. False where one of them was
        overtaken: what belongs together with the newer one is still to be asked for.

    Raises:
        SyncError: something did not arrive in time, or could not be committed.
        SenderLostError: a sender is gone.
    """
    chosen = {name: receivers[name] for name in versions}
    deadline = time.monotonic() + timeout
    for name, receiver in chosen.items():
        while receiver.staged < versions[name]:
            if receiver.stage(max(0.0, deadline - time.monotonic())) is None:
                raise SyncError(
                    f"version {versions[name]} of {name!r} did not arrive within {timeout:g} s, "
                    f"so none of {list(versions)} was committed"
                )
    if any(receiver.staged > versions[name] for name, receiver in chosen.items()):
        return False
    try:
        with ExitStack() as stack:
            for receiver in chosen.values():
                if len(chosen) > 1:
                    stack.enter_context(_Undo(receiver))
                receiver.load()
    except BaseException as error:
        for receiver in chosen.values():
            receiver.reject(error)
        raise
    with ExitStack() as stack:
        # All are confirmed, even if what one of them calls after a commit raises.
        for receiver in reversed(chosen.values()):
            stack.callback(receiver.confirm)
    return True


class _Undo:
    """Gives a model back the weights that it had at the beginning of a block that fails."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def __enter__(self) -> None:
        self._before = self._receiver.snapshot()

    def __exit__(self, *exc_info: object) -> None:
        if exc_info[0] is not None and self._before is not None:
            self._receiver.apply_weights(self._before)
