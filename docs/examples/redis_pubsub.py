"""A scheme over Redis: a version is put there once, and pub/sub wakes its workers.

    redis-server --port 6379 &
    pip install redis
    python docs/examples/redis_pubsub.py redis://127.0.0.1:6379

Keys hold the version that each worker should have, and its bytes. Messages only say that something
has changed, so a message that is lost costs `TICK` seconds, and no version. Redis ends the
subscription of a process that dies, by which the other end notices it. Names begin with a digest
of the sender's token, which itself is not written to Redis; that a client may connect at all is for
Redis's own passwords. A value in Redis has 512 MB at most, and so has a version here.
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
from sync_core import Answer, Payload, TransportContext, hookimpl
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
        #: Hashes: a version to its bytes; a worker to the version that it should have, 0 for none
        #: yet; a worker to the name of the receiver that has its place.
        self.weights, self.wanted, self.owners = (
            f"{folder}:{name}" for name in ("weights", "wanted", "owners")
        )
        #: The channel to all workers, and the one to the sender.
        self.news, self.answers = f"{folder}:news", f"{folder}:answers"
        self._folder = folder

    def own(self, receiver: str) -> str:
        """Return the channel that one receiver alone is subscribed to, as long as it lives."""
        return f"{self._folder}:receiver:{receiver}"

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


class RedisSender(sync_core.SenderTransport):
    """Puts a version once, and reads the answers on its own thread."""

    def __init__(self, context: TransportContext, connection: Connection) -> None:
        self.roster = Roster(context.worker_ids, context.notify)
        self._keys, self._redis = connection, connection.client
        # By worker, the name of its receiver, and a clause about the process of that.
        self._receivers: dict[int, tuple[str, str]] = {}
        self._closed = False
        for worker_id in context.worker_ids:
            self._redis.hset(connection.wanted, str(worker_id), 0)
        self._answers = connection.subscribe(connection.answers)
        self._thread = threading.Thread(target=self._listen, name="sync-redis", daemon=True)
        self._thread.start()

    def address(self, worker_id: int) -> None:
        """Return nothing: the token, which every address has, leads to the keys."""
        del worker_id

    def publish(self, payload: Payload) -> Publication:
        """Put the weights."""
        self._redis.hset(self._keys.weights, str(payload.version), payload.to_bytes())
        return Publication(payload.version, payload.nbytes)

    def offer(self, publication: Publication, worker_ids: Sequence[int]) -> None:
        """Write the version that workers should have, and wake them."""
        with self._redis.pipeline() as commands:  # all of it, or nothing
            for worker_id in worker_ids:
                commands.hset(self._keys.wanted, str(worker_id), publication.version)
            commands.publish(self._keys.news, "")
            commands.execute()

    def forget(self, publication: Publication) -> None:
        """Delete the weights."""
        self._redis.hdel(self._keys.weights, str(publication.version))

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, of which no receiver is known yet."""
        self._redis.hdel(self._keys.owners, str(worker_id))
        self._redis.hset(self._keys.wanted, str(worker_id), 0)
        super().add_worker(worker_id, worker)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker, whose receiver finds that."""
        super().remove_worker(worker_id)
        self._redis.hdel(self._keys.wanted, str(worker_id))
        self._redis.publish(self._keys.news, "")

    def close(self) -> None:
        """Delete every key, and end the thread."""
        if self._closed:
            return
        self._closed = True
        self.roster.close()
        self._redis.delete(self._keys.weights, self._keys.wanted, self._keys.owners)
        self._redis.publish(self._keys.news, "")
        self._redis.publish(self._keys.answers, "null")
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)
        self._redis.close()

    def _listen(self) -> None:
        looked = time.monotonic()
        with self._answers:
            while not self._closed:
                try:
                    message = self._answers.get_message(timeout=TICK)
                    if message is not None:
                        self._hear(json.loads(message["data"]))
                    if time.monotonic() - looked > TICK:
                        looked = time.monotonic()
                        self._look()
                except redis.RedisError as error:
                    for worker_id, (receiver, _) in self._receivers.items():
                        reason = f"cannot be heard, as Redis is gone: {error}"
                        self.roster.lost(worker_id, receiver, reason)
                    return

    def _hear(self, message: dict[str, Any] | None) -> None:
        """Take a message of a receiver; the roster ignores one that has lost its place."""
        if message is None:
            return
        worker_id, receiver = message["worker"], message["receiver"]
        if "answer" in message:
            self.roster.answered(worker_id, receiver, message["answer"])
        elif "left" in message:
            self.roster.lost(worker_id, receiver, message["left"])
        elif self.roster.connected(worker_id, receiver):
            self._receivers[worker_id] = receiver, message["process"]
            self._redis.hset(self._keys.owners, str(worker_id), receiver)
            self._redis.publish(self._keys.own(receiver), "")

    def _look(self) -> None:
        """Find the receivers that have died."""
        for worker_id, (receiver, process) in self._receivers.items():
            if not self._keys.lives(self._keys.own(receiver)):
                self.roster.lost(worker_id, receiver, f"{process} has closed its connection")


class RedisReceiver(sync_core.ReceiverTransport):
    """Reads the version that its worker should have, whenever a message comes."""

    def __init__(self, context: TransportContext, connection: Connection) -> None:
        self._keys, self._redis = connection, connection.client
        self._worker_id = context.worker_id
        self._name = secrets.token_hex(8)
        self._pid = os.getpid()
        self._process = f"its process {self._pid} on {socket.gethostname()}"
        self._seen = 0
        self._woken = False
        self._left = "closed its receiver"
        with self._reaching():
            self._news = connection.subscribe(connection.news, connection.own(self._name))
            try:
                self._tell(process=self._process)
                deadline = time.monotonic() + context.timeout
                while not self._has_place():
                    if time.monotonic() > deadline:
                        raise SenderLostError("the sender does not answer")
                    self._news.get_message(timeout=TICK)
            except BaseException:
                self._news.close()
                self._redis.close()
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
                self._news.get_message(timeout=min(TICK, left))

    def acknowledge(self, answer: Answer) -> None:
        """Send the answer, which counts for this receiver's deliveries only."""
        with self._reaching():
            self._tell(answer=answer.to_message())

    def wake(self) -> None:
        """Let `receive` return, by a message to this receiver."""
        self._woken = True
        with self._reaching():
            self._redis.publish(self._keys.own(self._name), "")

    def leave(self, reason: str) -> None:
        """Have `close` give the reason."""
        self._left = reason

    def close(self) -> None:
        """Say why, and end the subscription; in a process that was forked, do nothing."""
        if os.getpid() != self._pid or self._news is None:
            return
        # If that is not sent, the sender notices the end of the subscription.
        with suppress(redis.RedisError, SenderLostError):
            self._tell(left=f"{self._process} {self._left}")
        self._news.close()
        self._news = None
        self._redis.close()

    def _look(self) -> Payload | None:
        if not self._has_place():
            raise SenderLostError("another receiver was given the same address")
        version = self._redis.hget(self._keys.wanted, str(self._worker_id))
        if version is None or int(version) <= self._seen:
            return None
        began = time.perf_counter()
        data = self._redis.hget(self._keys.weights, version)
        if data is None:
            return None  # a newer one has just taken its place
        self._seen = int(version)
        return Payload.unpack(Block.of_bytes(data), self._seen, since=began)

    def _has_place(self) -> bool:
        """Return whether the sender, which serves the worker, knows this receiver."""
        if not self._redis.hexists(self._keys.wanted, str(self._worker_id)):
            raise SenderLostError("the sender was closed, or the worker removed from it")
        if not self._keys.lives(self._keys.answers):
            raise SenderLostError("the sender's process has closed its connection")
        return bool(
            self._redis.hget(self._keys.owners, str(self._worker_id)) == self._name.encode()
        )

    def _tell(self, **message: Any) -> None:
        message |= {"worker": self._worker_id, "receiver": self._name}
        if not self._redis.publish(self._keys.answers, json.dumps(message)):
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
