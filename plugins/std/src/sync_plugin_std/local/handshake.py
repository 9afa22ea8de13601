"""The proof of both ends of a connection that they know the token, which they do not send.

Each end sends a nonce, and answers that of the other by an HMAC of both with the token. The sender
proves it first, so a process that listens where a sender has been learns nothing that is of use
elsewhere, and is refused. The token is that worker's alone, so another worker is refused as well.

========  ============================  ==========================================================
from      message                       meaning
========  ============================  ==========================================================
worker    ``hello``, worker, pid,       the first message of a connection; pids names what counts
          pids, nonce                   processes there (the namespace), and may be left out
sender    ``challenge``, nonce, proof,  it knows the token; does the worker? Its process, as above
          pid, pids
worker    ``proof``, proof              it does; a message of the scheme, ``welcome``, follows
========  ============================  ==========================================================

What follows is not authenticated: the connection is, by its beginning.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from sync_core.errors import SenderLostError
from sync_plugin_std.local.channel import MAX_MESSAGE, Channel, Message, open_process

#: The size of the longest message before both ends have proved that they know the token.
MAX_HELLO = 4096
_NONCE_NBYTES = 32
_UPGRADE = (
    "the worker has an older sync-core than the trainer; type "
    "pip install --upgrade sync-core there, and the same for its plugins"
)
_OLDER_SENDER = (
    "the trainer has an older sync-core than this worker; then type "
    "pip install --upgrade sync-core there, and the same for its plugins"
)


@dataclass(frozen=True, slots=True)
class Greeting:
    """The hello of a worker, and what the sender has answered.

    Args:
        worker_id: the worker that it says it is.
        pid: its process.
        nonces: of the worker and of the sender.
        pids: the namespace of its process number, where it says that.
    """

    worker_id: int
    pid: int
    nonces: tuple[str, str]
    pids: object = None

    @classmethod
    def of(cls, message: Message) -> Greeting:
        """Return the greeting that a first message begins.

        Raises:
            ConnectionError: the message is not a hello, or from an older version.
            LookupError, TypeError: it lacks something.
        """
        if message["type"] != "hello":
            raise ConnectionError("it does not say hello")
        if "nonce" not in message:
            raise ConnectionError(f"it wants to show its token, and not to prove it; {_UPGRADE}")
        worker_id, pid, nonce = message["worker"], message["pid"], message["nonce"]
        if type(worker_id) is not int or type(pid) is not int or type(nonce) is not str:
            raise TypeError(f"{message!r:.200} is not a hello")
        if len(nonce) != 2 * _NONCE_NBYTES:
            raise TypeError(f"a nonce has {2 * _NONCE_NBYTES} digits, got {nonce!r:.80}")
        nonces = nonce, secrets.token_hex(_NONCE_NBYTES)
        return cls(worker_id, pid, nonces, message.get("pids"))

    def challenge(self, token: str) -> Message:
        """Return the sender's answer."""
        proof = self._prove(token, "sender")
        process = {"pid": os.getpid(), "pids": _pids()}
        return {"type": "challenge", "nonce": self.nonces[1], "proof": proof, **process}

    def response(self, token: str) -> Message:
        """Return the worker's answer to that."""
        return {"type": "proof", "proof": self._prove(token, "worker")}

    def proves(self, token: str, side: str, message: Message) -> bool:
        """Return whether a message holds the proof of a side."""
        given = message.get("proof")
        return type(given) is str and hmac.compare_digest(
            given.encode(errors="replace"), self._prove(token, side).encode()
        )

    def _prove(self, token: str, side: str) -> str:
        text = "\n".join(("sync-core", side, str(self.worker_id), str(self.pid), *self.nonces))
        return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def _pids() -> str | None:
    """Return the kernel and its namespace that count this process; None on other systems."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def watch_process(channel: Channel, pid: object = None, pids: object = None) -> None:
    """Have a connection end with the process on its other side, if that is on this machine.

    Otherwise it ends with the last process that has the other end of it, which may be another: one
    that was forked meanwhile, or the trainer. A side that gives a false number can only lose its
    own connection by that. Nothing is watched over a network, on systems without descriptors of
    processes, and where the number says nothing.

    Args:
        channel: the connection.
        pid: the number that the other side gives, once it has proved that it knows the token. What
            the kernel says comes first.
        pids: what counts it; see `_pids`.

    Raises:
        ConnectionError: there is no such process any more.
    """
    number = channel.peer_process()
    if (
        number is None
        and type(pid) is int
        and channel.on_this_machine
        and pids == _pids() is not None
    ):
        number = pid
    process = open_process(number) if channel.process is None else None
    if process is not None:
        channel.watch(process)


def shake_hands(channel: Channel, token: str, worker_id: int, timeout: float) -> None:
    """Prove to a `ServingTransport` that this worker knows the token, once that has proved it.

    Args:
        channel: the connection, of which nothing was used yet.
        token: the secret of the address.
        worker_id: the worker that this is.
        timeout: for the sender's answer, in seconds.

    Raises:
        SenderLostError: the sender is gone or silent, or what listens there is not the sender.
    """
    nonce, pid = secrets.token_hex(_NONCE_NBYTES), os.getpid()
    channel.limit = MAX_HELLO
    try:
        # A process that the sender has forked may hold its listener open.
        watch_process(channel)
        hello = {"type": "hello", "worker": worker_id, "pid": pid, "pids": _pids(), "nonce": nonce}
        channel.send(hello)
        message = channel.receive(timeout)
    except ConnectionError as error:
        raise SenderLostError(
            f"the sender hung up before it had proved that it knows the token ({error}): it is "
            f"gone, or {_OLDER_SENDER}"
        ) from error
    if message is None:
        raise SenderLostError(f"the sender did not answer within {timeout:g} s")
    if message.get("type") == "gone":
        raise SenderLostError(str(message.get("reason")))
    greeting = Greeting(worker_id, pid, (nonce, str(message.get("nonce"))))
    if message.get("type") != "challenge" or not greeting.proves(token, "sender", message):
        raise SenderLostError(
            "what listens at the sender's address does not know its token: another process has "
            "the place of a sender that is gone, or the address is of another sender; type "
            "sender.address(worker_id) in the trainer for a new one"
        )
    try:
        watch_process(channel, message.get("pid"), message.get("pids"))
        channel.send(greeting.response(token))
    except ConnectionError as error:
        raise SenderLostError(f"the sender is gone: {error}") from error
    channel.limit = MAX_MESSAGE
