"""Tells of every send: a line of the standard log (``sync_core``, ``key=value``), and reporters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from sync_core.report import SendReport

_logger = logging.getLogger("sync_core")


def tell(report: SendReport, reporters: Iterable[Callable[[SendReport], object]]) -> None:
    """Log a send that has ended, and call whoever wants to know of it."""
    log_send(report)
    for reporter in reporters:
        try:
            reporter(report)
        except Exception:
            _logger.exception("%r raised about the report of version %d", reporter, report.version)


def log_send(report: SendReport) -> None:
    """Log what became of a send: INFO when it went well, WARNING when a worker failed.

    The same values are attributes of the record, each with ``sync_`` before its name. Of phases
    that each worker has, it is the longest; ``deliver_seconds`` is left out where no worker's clock
    is known to be this one.
    """
    failures = [str(r.error).partition("\n")[0] for r in report.workers.values() if r.error]
    level = logging.WARNING if failures else logging.INFO
    if not _logger.isEnabledFor(level):
        return
    values = _fields(report)
    text = " ".join(f"{name}={_written(value)}" for name, value in values.items())
    if failures:
        text += f" errors={'; '.join(failures)!r}"
    extra = {f"sync_{name}": value for name, value in values.items()}
    _logger.log(level, "send %s", text, extra=extra | {"sync_errors": failures})


def _fields(report: SendReport) -> dict[str, str | int | float]:
    """A report as single values."""
    workers = report.workers.values()
    delivered = [r.deliver_seconds for r in workers if r.deliver_seconds is not None]
    return {
        "scheme": report.scheme,
        "model_id": report.model_id,
        "version": report.version,
        "workers": len(workers),
        "updated": len(report.updated),
        "skipped": len(report.skipped),
        "failed": len(report.failed),
        "dropped": len(report.dropped),
        "quarantined": len(report.quarantined),
        "restarted": len(report.restarted),
        "nbytes": report.nbytes,
        "seconds": report.seconds,
        "prepare_seconds": report.prepare_seconds,
        "publish_seconds": report.publish_seconds,
        "pack_seconds": report.pack_seconds,
        **({"deliver_seconds": max(delivered)} if delivered else {}),
        "stage_seconds": max((r.stage_seconds for r in workers), default=0.0),
        "commit_seconds": max((r.commit_seconds for r in workers), default=0.0),
        "acknowledge_seconds": max((r.acknowledge_seconds for r in workers), default=0.0),
        "pause_seconds": max((r.pause_seconds for r in workers), default=0.0),
    }


def _written(value: str | float) -> str:
    return f"{value:.6f}" if isinstance(value, float) else str(value)
