"""A scheme over Redis: a version is put there once, and pub/sub wakes its workers.

    redis-server --port 6379 &
    pip install redis
    python docs/examples/redis_pubsub.py redis://127.0.0.1:6379

Keys hold the version that each worker should have, and its bytes. Messages only say that something
has changed, so a message that is lost costs `TICK` seconds, and no version. Redis ends the
subscription of a process that dies, by which the other end notices it. Names begin with a digest
of the sender's token, which itself is not written to Redis; that a client may connect at all is for
Redis's own passwords. A Redis string holds 512 MB at most, and so does a version here.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import redis
import torch

import sync_core
from sync_core import Answer, Delivery, Payload, TransportContext, hookimpl
from sync_core.errors import SenderLostError
from sync_core.transports import Block, Publication, Roster

#: Seconds between two looks at the other end, while no message comes.
TICK = 0.5


@dataclass(frozen=True)
class RedisOptions:
    """Options of the scheme.

    Args:
        url: of the server, as ``redis.Redis.from_url`` takes it.
    """

    url: str = "redis://127.0.0.1:6379"


class RedisScheme:
    """Weights go through a Redis server that both sides reach."""

    capabilities = frozenset({"broadcast", "cross_host", "cross_process", "late_join", "pull"})

    @hookimpl
    def create_transport(
        self, context: TransportContext
    ) -> sync_core.SenderTransport | sync_core.ReceiverTransport:
        """Return the sender's or a receiver's side."""
        connection = Connection(context)
        return (
            RedisReceiver(context, connection)
            if context.side == "receiver"
            else RedisSender(context, connection)
        )


class Connection:
    """The keys and channels of one sender."""

    def __init__(self, context: TransportContext) -> None:
        options = context.parse_options(RedisOptions)
        self.client = redis.Redis.from_url(
            options.url, socket_timeout=context.timeout, socket_connect_timeout=context.timeout
        )
        folder = f"sync-{hashlib.sha256(context.token.encode()).hexdigest()[:32]}"
        #: A hash: worker id to the version that it should have, 0 for none yet.
        self.wanted = f"{folder}:wanted"
        #: A hash: worker id to the receiver that has its place.
        self.owners = f"{folder}:owners"
        #: The channel to all workers, and the one to the sender.
        self.news = f"{folder}:news"
        self.answers = f"{folder}:answers"
        self._folder = folder

    def weights(self, version: int) -> str:
        """Return the key of a version's bytes."""
        return f"{self._folder}:weights:{version}"

    def own(self, owner: str) -> str:
        """Return the channel that one receiver alone is subscribed to, as long as it lives."""
        return f"{self._folder}:receiver:{owner}"

    def lives(self, channel: str) -> bool:
        """Return whether a process is subscribed to a channel."""
        return bool(self.client.pubsub_numsub(channel)[0][1])

    def subscribe(self, *channels: str) -> Any:
        """Return a subscription that has begun."""
        subscription = self.client.pubsub()
        subscription.subscribe(*channels)
        for _ in channels:
            if subscription.get_message(timeout=10.0) is None:
                raise redis.TimeoutError("Redis confirms no subscription")
        known = weakref.ref(subscription.connection)

        def close_copy() -> None:
            # Else a child that outlives this process keeps the subscription, and hides its death.
            if (connection := known()) is not None:
                connection.disconnect()

        os.register_at_fork(after_in_child=close_copy)
        return subscription


@dataclass(frozen=True)
class Owner:
    """The receiver that has a worker's place: its name, and a clause about its process."""

    name: str
    process: str


class RedisSender(sync_core.SenderTransport):
    """Puts a version once, and reads the answers on its own thread."""

    def __init__(self, context: TransportContext, connection: Connection) -> None:
        self._redis = connection
        self._roster = Roster(context.worker_ids, context.notify)
        self._owners: dict[int, Owner] = {}
        self._kept: set[int] = set()
        # Reentrant, as the garbage collector may close the transport in a thread that holds it.
        self._lock = threading.RLock()
        self._closed = False
        self._write()
        self._subscription = connection.subscribe(connection.answers)
        self._thread = threading.Thread(target=self._listen, name="sync-redis", daemon=True)
        self._thread.start()

    def address(self, worker_id: int) -> None:
        """Return nothing: the token, which every address has, leads to the keys."""
        del worker_id

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Put the weights, then the version that each worker should have."""
        self._redis.client.set(self._redis.weights(payload.version), payload.to_bytes())
        with self._lock:
            self._kept.add(payload.version)
            self._roster.expect(i for i in worker_ids if self._succeeded(i))
            publication = Publication(payload.version, payload.nbytes)
            deliveries = self._roster.publish(publication, worker_ids)
            self._write()
        return deliveries

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, which wants the newest version that went to all."""
        del worker
        with self._lock:
            self._roster.add(worker_id)
            self._redis.client.hdel(self._redis.owners, str(worker_id))
            self._write()

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker, whose receiver finds that."""
        with self._lock:
            self._roster.remove(worker_id)
            self._owners.pop(worker_id, None)
            self._redis.client.hdel(self._redis.wanted, str(worker_id))
            self._redis.client.publish(self._redis.news, "")

    def close(self) -> None:
        """Remove every key, and end the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._roster.close()
            keys = [self._redis.weights(version) for version in self._kept]
            self._redis.client.delete(self._redis.wanted, self._redis.owners, *keys)
            self._redis.client.publish(self._redis.news, "")
            self._redis.client.publish(self._redis.answers, "null")
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)
        self._redis.client.close()

    def _write(self) -> None:
        """Write what each worker should have, wake them, and remove versions no worker wants."""
        owed = {i: self._roster.wanted(i) for i in self._roster.worker_ids}
        wanted = {str(i): each.version if each else 0 for i, each in owed.items()}
        needed = {publication.version for publication in self._roster.owed()}
        with self._redis.client.pipeline() as commands:  # all of it, or nothing
            if wanted:
                commands.hset(self._redis.wanted, mapping=wanted)
            for version in self._kept - needed:
                commands.delete(self._redis.weights(version))
            commands.publish(self._redis.news, "")
            commands.execute()
        self._kept &= needed

    def _listen(self) -> None:
        looked = time.monotonic()
        with self._subscription:
            while not self._closed:
                try:
                    message = self._subscription.get_message(timeout=TICK)
                    if message is not None:
                        self._hear(json.loads(message["data"]))
                    if time.monotonic() - looked > TICK:
                        looked = time.monotonic()
                        self._look()
                except redis.RedisError as error:
                    with self._lock:
                        for worker_id, owner in self._owners.items():
                            reason = f"cannot be heard, as Redis is gone: {error}"
                            self._roster.lost(worker_id, owner.name, reason)
                    return

    def _hear(self, message: dict[str, Any] | None) -> None:
        """Take a message of a receiver; one that has lost its place is not heard."""
        with self._lock:
            if message is None or message["worker"] not in self._roster.worker_ids:
                return
            worker_id, owner = message["worker"], message["owner"]
            if message["kind"] == "connected":
                # It finds the version that is on its way by the key, and answers for it.
                self._owners[worker_id] = Owner(owner, message["process"])
                self._roster.connected(worker_id, owner)
            elif message["kind"] == "answer":
                self._roster.answered(worker_id, owner, message["answer"])
            elif (known := self._owners.get(worker_id)) and not self._succeeded(worker_id):
                self._roster.lost(worker_id, owner, f"{known.process} {message['reason']}")

    def _look(self) -> None:
        """Find the receivers that have died."""
        with self._lock:
            for worker_id, owner in self._owners.items():
                alive = self._redis.lives(self._redis.own(owner.name))
                if not alive and not self._succeeded(worker_id):
                    reason = f"{owner.process} has closed its connection"
                    self._roster.lost(worker_id, owner.name, reason)

    def _succeeded(self, worker_id: int) -> bool:
        """Return whether another receiver has the place, whose first message is on its way."""
        owner = self._redis.client.hget(self._redis.owners, str(worker_id))
        known = self._owners.get(worker_id)
        if owner is None or (known is not None and owner.decode() == known.name):
            return False
        return self._redis.lives(self._redis.own(owner.decode()))


class RedisReceiver(sync_core.ReceiverTransport):
    """Reads the version that its worker should have, whenever a message comes."""

    def __init__(self, context: TransportContext, connection: Connection) -> None:
        self._redis = connection
        self._worker_id = context.worker_id
        self._owner = secrets.token_hex(8)
        self._process = os.getpid()
        self._seen = 0
        self._woken = False
        self._left = "closed its receiver"
        with self._reaching():
            own = connection.own(self._owner)
            self._subscription = connection.subscribe(connection.news, own)
            try:
                if connection.client.hexists(connection.wanted, str(self._worker_id)):
                    connection.client.hset(connection.owners, str(self._worker_id), self._owner)
                self._wanted()  # raises where there is no such sender
                process = f"its process {os.getpid()} on {socket.gethostname()}"
                self._tell("connected", process=process)
            except BaseException:
                self._subscription.close()
                connection.client.close()
                raise

    def receive(self, timeout: float) -> Payload | None:
        """Return the newest version that this worker has not seen."""
        deadline = time.monotonic() + timeout
        with self._reaching():
            while True:
                payload = self._look()
                left = deadline - time.monotonic()
                if payload is not None or left <= 0 or self._woken:
                    return payload
                self._subscription.get_message(timeout=min(TICK, left))

    def acknowledge(self, answer: Answer) -> None:
        """Send the answer, which counts for this receiver's deliveries only."""
        with self._reaching():
            self._tell("answer", version=answer.version, answer=answer.to_message())

    def wake(self) -> None:
        """Let `receive` return, by a message to this receiver."""
        self._woken = True
        with self._reaching():
            self._redis.client.publish(self._redis.own(self._owner), "")

    def leave(self, reason: str) -> None:
        """Have `close` give the reason."""
        self._left = reason

    def close(self) -> None:
        """Say why, and end the subscription; in a process that was forked, do nothing."""
        if os.getpid() != self._process or self._subscription is None:
            return
        # If that is not sent, the sender notices the end of the subscription.
        with suppress(redis.RedisError, SenderLostError):
            self._tell("left", reason=self._left)
        self._subscription.close()
        self._subscription = None
        self._redis.client.close()

    def _look(self) -> Payload | None:
        version = self._wanted()
        if version <= self._seen:
            return None
        began = time.perf_counter()
        data = self._redis.client.get(self._redis.weights(version))
        if data is None:
            return None  # a newer one has just taken its place
        self._seen = version
        return Payload.unpack(Block.of_bytes(data), version, since=began)

    def _wanted(self) -> int:
        """Return the version that this worker should have, if the sender still serves it."""
        worker = str(self._worker_id)
        wanted = self._redis.client.hget(self._redis.wanted, worker)
        owner = self._redis.client.hget(self._redis.owners, worker)
        if wanted is None:
            raise SenderLostError("the sender was closed, or the worker removed from it")
        if owner != self._owner.encode():
            raise SenderLostError("another receiver was given the same address")
        if not self._redis.lives(self._redis.answers):
            raise SenderLostError("the sender's process has closed its connection")
        return int(wanted)

    def _tell(self, kind: str, **message: Any) -> None:
        message |= {"kind": kind, "worker": self._worker_id, "owner": self._owner}
        if not self._redis.client.publish(self._redis.answers, json.dumps(message)):
            raise SenderLostError("the sender was closed, or its process has ended")

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except redis.RedisError as error:
            raise SenderLostError(f"Redis cannot be reached: {error}") from error


def work(address: sync_core.Address, versions: int) -> None:
    """Take part as a worker, until it has the last version."""
    policy = torch.nn.Linear(4, 2)
    with sync_core.Receiver(address, policy) as receiver:
        while receiver.version < versions:
            receiver.receive(timeout=30.0)
        print(
            f"worker {address.worker_id}: version {receiver.version}, bias {policy.bias.tolist()}"
        )


def main(url: str) -> None:
    """Send three versions to two processes."""
    policy = torch.nn.Linear(4, 2)
    processes = multiprocessing.get_context("spawn")
    with sync_core.Sender(RedisScheme(), policy, num_workers=2, url=url) as sender:
        workers = [processes.Process(target=work, args=(sender.address(i), 3)) for i in range(2)]
        for worker in workers:
            worker.start()
        for step in range(3):
            with torch.no_grad():
                policy.bias.fill_(step)
            report = sender.send()
            print(f"version {report.version}: workers {report.updated}")
        for worker in workers:
            worker.join(30.0)


if __name__ == "__main__":
    main(*sys.argv[1:] or ["redis://127.0.0.1:6379"])
