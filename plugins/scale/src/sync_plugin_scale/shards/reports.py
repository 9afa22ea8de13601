"""One report of a version that several ranks have sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import distributed

from sync_core import SendReport, WorkerResult
from sync_core.errors import WorkerError


def gather_reports(report: SendReport, group: Any = None) -> SendReport | None:
    """Return one report of what all ranks have sent, on the first rank; None on the others.

    A collective of ``torch.distributed``, for all ranks, once `Sender.send` has returned. Where
    that raised `SendError`, give its ``report``.

    Args:
        report: of this rank.
        group: the process group of the ranks; None for the default one.

    Raises:
        ValueError: the ranks have sent different versions.
    """
    is_first = distributed.get_rank(group) == 0
    gathered: list[Any] | None = [None] * distributed.get_world_size(group) if is_first else None
    distributed.gather_object(report, gathered, group=group, group_dst=0)
    return None if gathered is None else merge_reports(gathered)


def merge_reports(reports: Sequence[SendReport]) -> SendReport:
    """Return one report of those of all ranks: bytes added, times of the slowest rank.

    Args:
        reports: in the order of the ranks.

    Raises:
        ValueError: the ranks have sent different versions.
    """
    first = reports[0]
    for rank, report in enumerate(reports):
        if report.version != first.version:
            raise ValueError(
                f"rank 0 sent version {first.version}, and rank {rank} version {report.version}; "
                "every rank has to call send() equally often, or with the same version="
            )
    worker_ids = sorted({worker_id for report in reports for worker_id in report.workers})
    return replace(
        first,
        seconds=max(report.seconds for report in reports),
        prepare_seconds=max(report.prepare_seconds for report in reports),
        publish_seconds=max(report.publish_seconds for report in reports),
        pack_seconds=max(report.pack_seconds for report in reports),
        workers={worker_id: _merged(worker_id, reports) for worker_id in worker_ids},
        no_worker_left=any(report.no_worker_left for report in reports),
    )


def _merged(worker_id: int, reports: Sequence[SendReport]) -> WorkerResult:
    results = [
        (rank, report.workers[worker_id])
        for rank, report in enumerate(reports)
        if worker_id in report.workers
    ]
    # A failure that a rank raises is not hidden by what another has done about the worker.
    rank, kept = min(results, key=lambda item: _order(item[1]))
    error = kept.error
    # A rank that serves the worker no longer has sent it nothing.
    versions = {result.version for _, result in results}
    is_whole = len(versions) == 1 and len(results) == len(reports)
    if isinstance(error, WorkerError):
        error = type(error)(worker_id, f"rank {rank}: {error.message}")
    delivered = [r.deliver_seconds for _, r in results if r.deliver_seconds is not None]
    return replace(
        kept,
        version=kept.version if is_whole else None,
        error=error,
        returned=any(result.returned for _, result in results),
        nbytes=sum(result.nbytes for _, result in results),
        seconds=max(result.seconds for _, result in results),
        stage_seconds=max(result.stage_seconds for _, result in results),
        commit_seconds=max(result.commit_seconds for _, result in results),
        pause_seconds=max(result.pause_seconds for _, result in results),
        acknowledge_seconds=max(result.acknowledge_seconds for _, result in results),
        deliver_seconds=max(delivered) if len(delivered) == len(results) else None,
    )


def _order(result: WorkerResult) -> int:
    """Sort failures first, then what was done about a worker, then success."""
    if result.error is not None:
        return 0 if result.remedy is None else 1
    return 3 if result.remedy is None else 2
