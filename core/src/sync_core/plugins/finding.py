"""What a finding of ``sync-core doctor`` is: one thing that is amiss, and what to type."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that stops no command, and will be felt; one line in the output of doctor.

    Args:
        about: what it is about, such as ``"/dev/shm"``.
        problem: what is wrong.
        remedy: what to type, or to do.

    Example:
        >>> print(Finding("/mnt/run", "is read-only", "type: mount -o remount,rw /mnt/run"))
        /mnt/run: is read-only; type: mount -o remount,rw /mnt/run
    """

    about: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.about}: {self.problem}; {self.remedy}"
