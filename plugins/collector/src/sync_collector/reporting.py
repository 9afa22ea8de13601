"""Logs a collector's statistics, and shows them in a progress bar."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from sync_collector.delivery import CollectorStats
from sync_collector.evaluation import Evaluation

#: Logs values by name, with the number of frames as the step.
Log: TypeAlias = Callable[[Mapping[str, float], int], Any]

# The shortest time between two drawings of the bar, in seconds, as for rich's own bars.
_REDRAW = 0.1

_NAMES = {
    "collect/frames_per_second": "frames_per_second",
    "collect/lag": "lag",
    "episode/count": "episodes",
    "episode/length": "episode_length",
    "episode/reward": "episode_reward",
    "policy/version": "version",
    "sync/seconds": "sync_seconds",
}


def log_function(log_to: Any) -> Log:
    """Return the function that logs to a TensorBoard writer, a W&B run or a callback.

    Args:
        log_to: an object with ``add_scalar(name, value, step)``, such as TensorBoard's
            ``SummaryWriter``, or with ``log(values, step=step)``, such as a run of W&B; or a
            function of values and step.

    Raises:
        TypeError: an object of another kind.

    Example:
        >>> log_function(print)({"episode/reward": 1.0}, 100)
        {'episode/reward': 1.0} 100
    """
    # A class has the methods of its instances, and calling it would make one.
    if not isinstance(log_to, type):
        if callable(getattr(log_to, "add_scalar", None)):
            return lambda values, step: _add_scalars(log_to, values, step)
        if callable(getattr(log_to, "log", None)):
            return lambda values, step: log_to.log(dict(values), step=step)
        if callable(log_to):
            function: Log = log_to
            return function
    raise TypeError(
        f"log_to is {log_to!r}; give a torch.utils.tensorboard.SummaryWriter, a run of "
        "wandb.init(), or a function log(values, step)"
    )


def _add_scalars(writer: Any, values: Mapping[str, float], step: int) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, step)


def values_of(stats: CollectorStats) -> dict[str, float]:
    """Return the logged values of statistics, with episode means once an episode has ended.

    Example:
        >>> sorted(values_of(CollectorStats(frames=4)))[:3]
        ['collect/frames_per_second', 'collect/lag', 'episode/count']
    """
    values = {name: getattr(stats, field) for name, field in _NAMES.items()}
    return {name: value for name, value in values.items() if not math.isnan(value)}


class StatsLogger:
    """Logs and shows the statistics of a collector, as requested.

    Args:
        log_to: see `log_function`; None to log nothing.
        progress: show a `ProgressBar`.
        total_frames: see `ProgressBar`.
    """

    def __init__(self, log_to: Any, *, progress: bool, total_frames: int) -> None:
        self._log = None if log_to is None else log_function(log_to)
        self._bar = ProgressBar(total_frames) if progress else None

    @property
    def enabled(self) -> bool:
        """Return whether there is anything to report to."""
        return self._log is not None or self._bar is not None

    def report(self, stats: CollectorStats) -> None:
        """Log and show the statistics."""
        self.log(values_of(stats), stats.frames)
        if self._bar is not None:
            self._bar.show(stats)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values, if a logger was given."""
        if self._log is not None:
            self._log(values, step)

    def log_evaluation(self, result: Evaluation, step: int) -> None:
        """Log the means of an evaluation."""
        self.log(
            {"evaluation/reward": result.mean_reward, "evaluation/length": result.mean_length}, step
        )

    def close(self) -> None:
        """Close the progress bar."""
        if self._bar is not None:
            self._bar.close()


class ProgressBar:
    """A bar in the terminal with frames, frames per second, episodes and versions.

    It is drawn when a batch is delivered, without a thread.

    Args:
        total_frames: the number of frames of a full bar; -1 for a bar without an end.

    Raises:
        ImportError: rich is not installed.
    """

    def __init__(self, total_frames: int) -> None:
        try:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError as error:
            raise ImportError(
                "progress=True needs rich; type: pip install 'sync-collector[progress]'"
            ) from error
        self._bar = Progress(
            BarColumn(bar_width=16),
            TextColumn(
                "{task.completed:>9,.0f} frames  {task.fields[stats].frames_per_second:,.0f}/s  "
                "reward {task.fields[stats].episode_reward:.1f}  "
                "length {task.fields[stats].episode_length:.1f}  "
                "version {task.fields[stats].version}  lag {task.fields[stats].lag}  "
                "sync {task.fields[sync_ms]:.2f} ms"
            ),
            TimeElapsedColumn(),
            auto_refresh=False,
        )
        total = None if total_frames < 0 else total_frames
        self._task = self._bar.add_task("", total=total, stats=CollectorStats(), sync_ms=0.0)
        self._drawn = -math.inf

    def show(self, stats: CollectorStats) -> None:
        """Show the statistics after a batch."""
        now = time.monotonic()
        due = now - self._drawn >= _REDRAW
        # Not drawn before the first batch, so that earlier output stays as it is.
        self._bar.start()
        self._bar.update(
            self._task,
            completed=stats.frames,
            stats=stats,
            sync_ms=1e3 * stats.sync_seconds,
            refresh=due,
        )
        if due:
            self._drawn = now

    def close(self) -> None:
        """Draw the last state, and release the terminal."""
        if self._drawn > -math.inf:
            self._bar.stop()
