"""Several senders whose weights are one version."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from sync_core import (
    Delivery,
    ModelError,
    PendingSend,
    Sender,
    SendReport,
    WorkerError,
    WorkerResult,
)
from sync_core.checks import check_seconds, normalize


class SendGroup:
    """Sends the models of several senders as one version.

    A worker is updated when it has committed the version of every sender that serves it: it should
    commit them by `receive_together`, all or none. A worker that one sender skips
    is skipped by all of them. Each sender counts its own versions; see `versions`.

    Args:
        senders: by name. The mapping is read at every send, so that senders may be added to it.

    Example:
        >>> import torch
        >>> from sync_core import Receiver
        >>> from sync_plugin_std import receive_together
        >>> models = {"actor": torch.nn.Linear(4, 2), "critic": torch.nn.Linear(4, 1)}
        >>> copies = {"actor": torch.nn.Linear(4, 2), "critic": torch.nn.Linear(4, 1)}
        >>> group = SendGroup({n: Sender("thread", m, num_workers=1) for n, m in models.items()})
        >>> receivers = {n: Receiver(group.senders[n].address(0), m) for n, m in copies.items()}
        >>> pending = group.send_async()
        >>> receive_together(receivers, group.versions, timeout=10.0)
        True
        >>> pending.wait().updated
        (0,)
        >>> group.close()
    """

    def __init__(self, senders: Mapping[Any, Sender]) -> None:
        self.senders = senders
        self._pending: PendingSend | None = None
        self._parts: Sequence[PendingSend] = ()

    @property
    def versions(self) -> dict[Any, int]:
        """The newest version of each sender, by name."""
        return {name: sender.version for name, sender in self.senders.items()}

    def send(
        self,
        weights: Mapping[Any, Any] | None = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> SendReport:
        """Send weights of several senders, and wait until every worker has committed all of them.

        Nothing is sent before the weights of all have been read and checked.

        Args:
            weights: by the name of their sender, or None for that sender's model; other senders
                send nothing. None for the models of all senders.
            worker_ids: one worker or several; None for all. Each sender sends to those that it
                serves.
            timeout: deadline of the weights of each sender, and then of all workers, in seconds;
                None for the longest of the senders' own.

        Returns:
            One result for each worker, with the version of the first sender that is named. The
            ``on_report`` of each sender gets that sender's own report.

        Raises:
            SendError: some workers failed; the others have all of the version.
            PendingSendError: another send of one of the senders is pending.
            LayoutMismatchError: some weights do not fit their model; nothing was sent.
            UnknownWorkerError: no sender serves such a worker; nothing was sent.
        """
        begun: list[PendingSend] = []
        try:
            return self._start(weights, worker_ids, timeout, begun).wait()
        except BaseException as error:
            _interrupt(begun, error)
            raise

    def send_async(
        self,
        weights: Mapping[Any, Any] | None = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> PendingSend:
        """Like `send`, but do not wait. The weights were read when this returns."""
        begun: list[PendingSend] = []
        try:
            return self._start(weights, worker_ids, timeout, begun)
        except BaseException as error:
            _interrupt(begun, error)
            raise

    def _start(
        self,
        weights: Mapping[Any, Any] | None,
        worker_ids: int | Iterable[int] | None,
        timeout: float | None,
        begun: list[PendingSend],
    ) -> PendingSend:
        # The caller ends what is in ``begun``, whenever this is interrupted.
        started = time.perf_counter()
        chosen = self._chosen(weights)
        if len(chosen) == 1:
            ((sender, given),) = chosen.values()
            return sender.begin(given, worker_ids, timeout, begun)
        longest = max(sender.timeout for sender, _ in chosen.values())
        seconds = longest if timeout is None else check_seconds(timeout)
        # Ctrl-C may have ended the send before, and not all of its parts.
        if self._pending is not None and self._pending.ended:
            for send in self._parts:
                send.abandon()
        serves = {name: sender.all_worker_ids() for name, (sender, _) in chosen.items()}
        ids = normalize(worker_ids, sorted({i for own in serves.values() for i in own}))
        for sender, given in chosen.values():
            sender.check(given)
        skipped: set[int] = set()
        for name, (sender, _) in chosen.items():
            addressed = [i for i in ids if i in serves[name]]
            skipped |= {*addressed}.difference(sender.due(addressed))
        for name, (sender, given) in chosen.items():
            due = [i for i in ids if i in serves[name] and i not in skipped]
            every = worker_ids is None and not skipped
            sender.begin(given, None if every else due, timeout, begun, counted=True)
        self._parts = tuple(begun)
        self._pending = _together(
            self._parts, skipped=sorted(skipped), started=started, timeout=seconds
        )
        return self._pending

    def close(self) -> None:
        """Close all senders."""
        with ExitStack() as stack:
            for sender in self.senders.values():
                stack.callback(sender.close)

    def _chosen(self, weights: Mapping[Any, Any] | None) -> dict[Any, tuple[Sender, Any]]:
        given = dict.fromkeys(self.senders) if weights is None else weights
        if not given:
            raise ModelError("nothing to send: the group has no senders, or none is named")
        unknown = [name for name in given if name not in self.senders]
        if unknown:
            raise ModelError(
                f"the group has no sender {unknown[0]!r}; its senders are {list(self.senders)}"
            )
        return {name: (self.senders[name], each) for name, each in given.items()}


class _JointDelivery(Delivery):
    """The deliveries of several senders to one worker, which end as one.

    Args:
        version: the version of the group.
        parts: the delivery of each sender that serves the worker.
    """

    def __init__(self, worker_id: int, version: int, parts: Sequence[Delivery]) -> None:
        super().__init__(worker_id, version, sum(part.nbytes for part in parts))
        self._parts = parts
        for part in parts:
            part.watch(self._look)

    def fail(self, error: WorkerError) -> None:
        for part in self._parts:
            part.fail(error)
        super().fail(error)

    def _look(self, part: Delivery, error: WorkerError | None) -> None:
        del part, error
        if all(part.ended for part in self._parts):
            errors = [part.error for part in self._parts if part.error is not None]
            self._end(errors[0] if errors else None, None)


def _together(
    sends: Sequence[PendingSend], *, skipped: Sequence[int], started: float, timeout: float
) -> PendingSend:
    """Return the sends of several senders as one."""
    parts: dict[int, list[Delivery]] = {}
    for send in sends:
        for worker_id, delivery in send.deliveries.items():
            parts.setdefault(worker_id, []).append(delivery)
    version = sends[0].version
    return PendingSend(
        version,
        {i: _JointDelivery(i, version, parts[i]) for i in sorted(parts)},
        skipped,
        started=started,
        timeout=timeout,
        offered=time.perf_counter(),
        wait=partial(_wait, sends),
        unwaited={i: why for send in sends for i, why in send.unwaited.items()},
        finish=partial(_finish, sends),
    )


def _wait(sends: Sequence[PendingSend], joint: Sequence[Delivery], seconds: float) -> None:
    """Wait for deliveries as the transport of each sender does."""
    limit = time.perf_counter() + seconds
    waited = {delivery.worker_id for delivery in joint}
    for send in sends:
        deliveries = [delivery for i, delivery in send.deliveries.items() if i in waited]
        send.wait_for(deliveries, max(0.0, limit - time.perf_counter()))


def _finish(sends: Sequence[PendingSend], report: SendReport, *, waited: bool) -> SendReport:
    """End the send of each sender, and return their reports as one."""
    reports: list[SendReport] = []
    with ExitStack() as stack:
        # The others are ended too, if what is called at the end of one of them raises.
        for send in reversed(sends):
            stack.callback(_put, reports, partial(send.end, waited=waited))
    workers = {
        i: _merged([each.workers[i] for each in reports if i in each.workers], report, result)
        for i, result in report.workers.items()
    }
    return replace(
        report,
        workers=workers,
        scheme="+".join(dict.fromkeys(each.scheme for each in reports)),
        model_id="+".join(each.model_id for each in reports),
        prepare_seconds=sum(each.prepare_seconds for each in reports),
        publish_seconds=sum(each.publish_seconds for each in reports),
        pack_seconds=sum(each.pack_seconds for each in reports),
        unchanged=_unchanged([each.unchanged for each in reports]),
        no_worker_left=any(each.no_worker_left for each in reports),
    )


def _interrupt(begun: Sequence[PendingSend], error: BaseException) -> None:
    for pending in begun:
        pending.interrupt(error)


def _unchanged(parts: Sequence[bool | None]) -> bool | None:
    if False in parts:
        return False
    return None if None in parts else True


def _put(reports: list[SendReport], end: Callable[[], SendReport]) -> None:
    reports.append(end())


def _merged(parts: Sequence[WorkerResult], report: SendReport, joint: WorkerResult) -> WorkerResult:
    """Return the result of a worker, of which each sender has one."""
    if not parts or joint.skipped:
        return joint
    # A failure without a remedy comes first, since the send raises it.
    failures = [part for part in parts if part.error is not None]
    worst = min(failures, key=lambda part: part.remedy is not None, default=None)
    remedies = [part.remedy for part in parts if part.remedy is not None]
    whole = all(part.version is not None for part in parts)
    return WorkerResult(
        version=report.version if whole else None,
        seconds=max(joint.seconds, *(part.seconds for part in parts)),
        nbytes=sum(part.nbytes for part in parts),
        error=None if worst is None else worst.error,
        remedy=worst.remedy if worst is not None else next(iter(remedies), None),
        returned=any(part.returned for part in parts),
        stage_seconds=max(part.stage_seconds for part in parts),
        commit_seconds=sum(part.commit_seconds for part in parts),
        deliver_seconds=max(
            (part.deliver_seconds for part in parts if part.deliver_seconds is not None),
            default=None,
        ),
        acknowledge_seconds=max(part.acknowledge_seconds for part in parts),
        pause_seconds=sum(part.pause_seconds for part in parts),
        changed=max(part.changed for part in parts),
    )
