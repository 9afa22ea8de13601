"""A worker that passes versions on to others, chunk by chunk, and keeps no model."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from dataclasses import replace
from typing import Any, NoReturn, Self

from sync_core import (
    Address,
    Answer,
    Delivery,
    IndirectEndpoint,
    SenderLostError,
    SyncError,
    WorkerError,
    registry,
)
from sync_core.checks import check_count
from sync_core.errors import AddressError
from sync_core.transports import release_with
from sync_plugin_scale.relays.chunks import Chunked
from sync_plugin_scale.relays.receiver import ChunkedReceiver
from sync_plugin_scale.relays.sender import ChunkedSender

_log = logging.getLogger("sync_core")
# How long a relay waits for a chunk before it waits again, in seconds; `close` wakes it.
_WAITING = 3600.0
# How long closing waits for a chunk that is being passed on, in seconds; an estimate.
_PATIENCE = 5.0


class Relay:
    """Receives versions as one worker, and sends each chunk on while the next one comes.

    With a relay on each host, a version crosses the link between two hosts once, whatever number of
    workers there are. Relays can be in a row, or form a tree. The sender counts the relay as one
    worker, which has committed a version when all those that it serves have. It needs no model, and
    memory for two versions.

    Args:
        address: that of one worker of a sender with a scheme `Chunked`, or of another relay.
        num_workers: how many workers, or relays, it serves.
        **options: options of the scheme for these, instead of the sender's: such as ``host=``.

    Raises:
        AddressError: the sender does not send chunks.
        SenderLostError: the sender is gone.

    Example:
        >>> import torch
        >>> from sync_core import Receiver, Sender
        >>> policy, model = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> with Sender("chunked::thread", policy, num_workers=1) as sender:
        ...     with Relay(sender.address(0), num_workers=1) as relay:
        ...         with Receiver(relay.address(0), model) as receiver:
        ...             pending = sender.send_async()
        ...             receiver.receive(), pending.wait().updated
        (1, (0,))
    """

    def __init__(self, address: Address, *, num_workers: int, **options: Any) -> None:
        count = check_count(num_workers, "num_workers")
        scheme = None
        if isinstance(address, Address):
            scheme = registry.find(registry.SCHEMES, address.scheme).object
        if not isinstance(scheme, Chunked):
            raise AddressError(
                f"a relay needs the address of a sender that sends chunks, got {address!r:.200}; "
                "type Sender(Chunked('dist', mb=4), …)"
            )
        if isinstance(address.endpoint, IndirectEndpoint):
            raise AddressError(
                "a relay needs the address of one worker, got that which the workers of a pool "
                "share; type Relay(sender.address(sender.add_worker()), num_workers=…)"
            )
        context = address.transport_context(scheme.name, address.timeout)
        # Another sender, since its workers and those of the trainer share no secret.
        self._context = replace(
            context,
            side="sender",
            token=secrets.token_hex(16),
            secret=secrets.token_hex(32),
            options={**address.options, **options},
            worker_ids=tuple(range(count)),
            worker_id=-1,
            endpoint=None,
        )
        self._address = address
        self._upstream = ChunkedReceiver(context, scheme)
        try:
            self._downstream = ChunkedSender(self._context, scheme)
        except BaseException:
            self._upstream.close()
            raise
        self._worker_ids = tuple(range(count))
        state = _Passing(self._upstream, self._downstream, self._worker_ids)
        self._thread = threading.Thread(target=state.run, name="sync-relay", daemon=True)
        self._thread.start()
        self._close = release_with(self, state.close, self._thread)
        self._process = os.getpid()

    def address(self, worker_id: int) -> Address:
        """The address of one of the relay's workers, for a `Receiver` or another relay."""
        if worker_id not in self._worker_ids:
            raise ValueError(f"there is no worker {worker_id}; workers are {self._worker_ids}")
        return replace(
            self._address,
            worker_id=worker_id,
            endpoint=self._downstream.address(worker_id),
            token=self._context.worker_token(worker_id),
            sender_token=self._context.token,
            options=dict(self._context.options),
        )

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the sender is gone, or the relay was closed; False where the time is over.

        For a process that does nothing else.
        """
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Leave the sender; the relay's workers learn that theirs is gone."""
        if os.getpid() == self._process:
            self._close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Relay stays in the process that made it; pickle relay.address(worker_id)"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Passing:
    """Passes chunks on, in the relay's thread.

    Args:
        upstream: where they come from.
        downstream: where they go.
        worker_ids: the relay's workers.
    """

    def __init__(
        self, upstream: ChunkedReceiver, downstream: ChunkedSender, worker_ids: tuple[int, ...]
    ) -> None:
        self._upstream = upstream
        self._downstream = downstream
        self._worker_ids = worker_ids
        self._closed = False

    def run(self) -> None:
        """Pass chunks on until the sender is gone or the relay is closed."""
        try:
            while not self._closed:
                self._pass_one()
        except SenderLostError as error:
            if not self._closed:
                _log.info("a relay ends: %s", error)
        except Exception:
            _log.exception("a relay ends")
        finally:
            self._downstream.close()

    def close(self, thread: threading.Thread) -> None:
        """End the thread, and both transports."""
        self._closed = True
        self._upstream.wake()
        if thread is not threading.current_thread():
            thread.join(_PATIENCE)
        self._upstream.leave("closed its relay")
        self._upstream.close()
        self._downstream.close()

    def _pass_one(self) -> None:
        chunk = self._upstream.next_chunk(_WAITING)
        if chunk is None:
            return
        version = self._upstream.keep(chunk)
        if chunk.index < version.count - 1:
            self._downstream.send_ahead(version, chunk.index + 1, self._worker_ids)
        else:
            _Answering(self._upstream, self._downstream.send_packed(version, self._worker_ids))


class _Answering:
    """Answers for a version that has come once all of the relay's workers have answered.

    Args:
        upstream: where the answer goes.
        deliveries: one for each of the workers.
    """

    def __init__(self, upstream: ChunkedReceiver, deliveries: dict[int, Delivery]) -> None:
        self._upstream = upstream
        self._deliveries = deliveries
        self._answered = threading.Lock()
        for delivery in deliveries.values():
            delivery.watch(self._look)

    def _look(self, delivery: Delivery, error: WorkerError | None) -> None:
        del error
        if not all(each.ended for each in self._deliveries.values()):
            return
        if not self._answered.acquire(blocking=False):
            return
        failed = [each.error for each in self._deliveries.values() if each.error is not None]
        answer = Answer(version=delivery.version)
        if failed:
            causes = "; ".join(str(error).partition("\n")[0] for error in failed)
            answer = Answer.refusal(delivery.version, SyncError(f"of a relay's workers, {causes}"))
        try:
            self._upstream.acknowledge(answer)
        except SenderLostError:
            _log.info("the sender of a relay is gone before version %d", delivery.version)
