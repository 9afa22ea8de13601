"""The receivers of a process that senders call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sync_core import Address, Answer, Payload, Receiver, SenderLostError
from sync_plugin_std.calls.calling import DeliveryOutcome, DeliveryRequest, HandedTransport


class CalledReceiver:
    """The receiver for one model, for the sender that called last.

    Subclass it where models are found, or versions arrive, in another way.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.token = ""
        self.receiver: Receiver | None = None
        self.inbox = HandedTransport()
        # Given to the sender with the receiver's first outcome.
        self._joined: Any = None
        self._replaced: set[str] = set()

    def find_model(self, request: DeliveryRequest, context: Any) -> tuple[Any, Any]:
        """Return the arguments ``model`` and ``context`` of `Receiver`.

        Args:
            request: the sender's request.
            context: what `CalledReceivers.deliver` was given.
        """
        return {name: name for name in request.models} or request.model_id, context

    def connect(self, address: Address) -> Address:
        """Return the address for `Receiver`, whose endpoint is the inbox."""
        self.inbox = HandedTransport()
        return replace(address, endpoint=self.inbox)

    def joined(self, address: Address) -> Any:
        """Return the argument of `CallingTransport.joined` for a new receiver; True by default.

        Args:
            address: the sender's, as `connect` was given it.
        """
        del address
        return True

    def commit(self, receiver: Receiver, request: DeliveryRequest, content: Any) -> None:
        """Commit the version that was brought, unless the model has it."""
        if receiver.delivered < request.version:
            self.inbox.put(self.unpack(request, content))
            receiver.receive(0)

    def unpack(self, request: DeliveryRequest, content: Any) -> Payload:
        """Return the payload that a call brought: by default what `Payload.to_bytes` made."""
        return Payload.from_bytes(content, request.version)

    def answer(self, version: int) -> Answer | None:
        """Return the answer about a version, if the receiver has given one."""
        answer = self.inbox.answer
        return answer if answer is not None and answer.version == version else None

    def committed(self, version: int) -> DeliveryOutcome:
        """Return the outcome of a call after which the model has the version."""
        return DeliveryOutcome((self.answer(version) or Answer(version=version)).to_message())

    def is_replaced(self, request: DeliveryRequest) -> bool:
        """Return whether a sender has lost its place to one that is still there."""
        if request.token in self._replaced and self.sender_is_gone():
            self.end()
        return request.token in self._replaced

    def sender_is_gone(self) -> bool:
        """Return whether the sender that took over is known to be gone; False by default."""
        return False

    def replaced_by(self, reason: str) -> None:
        """Note that another sender takes over, before the receiver is closed.

        Args:
            reason: a sentence that says so.
        """
        del reason
        self._replaced.add(self.token)

    def deliver(self, request: DeliveryRequest, context: Any, content: Any) -> DeliveryOutcome:
        """Commit a version; the lock is held."""
        if self.receiver is None or self.token != request.token:
            if request.address is None:
                return DeliveryOutcome(known=False)
            if self.token not in ("", request.token):
                self.replaced_by(taken_over(request))
            self.close()
            self.inbox = HandedTransport()
            # Before what may raise: the sender that takes over gives the place back when it closes.
            self.token = request.token
            model, where = self.find_model(request, context)
            self.receiver = Receiver(self.connect(request.address), model, context=where)
            self._joined = self.joined(request.address)
        try:
            self.commit(self.receiver, request, content)
        except SenderLostError:
            self.close()
            raise
        return self.introduced(self.committed(request.version))

    def introduced(self, outcome: DeliveryOutcome) -> DeliveryOutcome:
        """Return an outcome that notifies the sender of a new receiver, once."""
        joined, self._joined = self._joined, None
        return outcome if joined is None else replace(outcome, joined=joined)

    def close(self) -> None:
        """Close the receiver; the model keeps what it has, in its own memory."""
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = None

    def end(self) -> None:
        """Release the sender; the one before it may return."""
        self.close()
        self.token = ""
        self._joined = None
        self._replaced.clear()


def taken_over(request: DeliveryRequest) -> str:
    """Return the sentence for a sender that has lost its place to another one."""
    where = " and ".join(request.models) or request.model_id
    return f"another sender has taken over {where!r} here; close one of them"


class CalledReceivers:
    """The receivers of this process, one for each model that senders of `CallingTransport` update.

    Args:
        kind: the class of the receivers.

    Example:
        >>> receivers = CalledReceivers()
        >>> receivers.deliver(DeliveryRequest(token="c0ffee", model_id="policy", version=1)).known
        False
    """

    def __init__(self, kind: type[CalledReceiver] = CalledReceiver) -> None:
        self._kind = kind
        self._kept: dict[tuple[object, ...], CalledReceiver] = {}

    def deliver(
        self, request: DeliveryRequest, content: Any = None, *, context: Any = None, where: str = ""
    ) -> DeliveryOutcome:
        """Commit a version to a model of this process, or release a sender that has no more.

        The model keeps what it has, in its own memory.

        Args:
            request: the sender's request.
            content: what `CallingTransport.publish` made.
            context: the object in which the model is looked up.
            where: a clause such as ``"in RPC worker 'left'"``, for errors.

        Returns:
            The outcome, to be returned to the sender.
        """
        with self._locked(request) as kept:
            if not request.version:
                if kept.token in ("", request.token):
                    kept.end()
                    self._kept.pop(_key(request), None)
                return DeliveryOutcome(known=False)
            if kept.is_replaced(request):
                answer = Answer(version=request.version, error=taken_over(request))
            else:
                try:
                    return kept.deliver(request, context, content)
                except Exception as error:
                    given = kept.answer(request.version)
                    answer = given or Answer.refusal(request.version, error)
            if where:
                answer = replace(answer, error=f"{where}: {answer.error}")
            return kept.introduced(DeliveryOutcome(answer.to_message()))

    @contextmanager
    def _locked(self, request: DeliveryRequest) -> Iterator[CalledReceiver]:
        while True:
            kept = self._kept.setdefault(_key(request), self._kind())
            with kept.lock:
                # It may have been forgotten before this thread had the lock.
                if self._kept.get(_key(request)) is kept:
                    yield kept
                    return


def _key(request: DeliveryRequest) -> tuple[object, ...]:
    return (str(request.place), request.models or request.model_id)
