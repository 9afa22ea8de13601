"""A layer that changes nothing, and is told what became of every send."""

from __future__ import annotations

from abc import ABC, abstractmethod

from sync_core.report import SendReport


class Reporter(ABC):
    """A layer that is called with the report at the end of every send, as ``on_report`` is.

    It need not have any of the hooks. One without stays with its sender, and need not pickle.

    Example:
        >>> class Pauses(Reporter):
        ...     longest = 0.0
        ...     def __call__(self, report):
        ...         pauses = [result.pause_seconds for result in report.workers.values()]
        ...         self.longest = max([self.longest, *pauses])
        >>> with Sender("none", torch.nn.Linear(4, 2), num_workers=1, layers=[Pauses()]) as sender:
        ...     sender.send().updated
        (0,)
    """

    @abstractmethod
    def __call__(self, report: SendReport) -> object:
        """Take a report; what is raised is logged, and changes nothing."""
