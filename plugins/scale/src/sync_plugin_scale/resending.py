"""The request of a worker for a version once more, and the numbers of payloads."""

from __future__ import annotations

#: The request of a worker that has dropped a version, or lacks parts of it; see `Answer.request`.
AGAIN = "again"
# The payloads whose numbers are kept, for answers that come late.
_KEPT = 1024


class PayloadNumbers:
    """The numbers under which a scheme's payloads travel, and the version that each one carries.

    A number is the version itself until a version takes more than one payload.

    Example:
        >>> numbers = PayloadNumbers()
        >>> numbers.take(version=7), numbers.take(version=7), numbers.version_of(8)
        (7, 8, 7)
    """

    def __init__(self) -> None:
        self._newest = 0
        self._versions: dict[int, int] = {}

    def take(self, version: int) -> int:
        """Return the number of the next payload.

        Args:
            version: the version that it carries; 0 for none.
        """
        self._newest = max(self._newest + 1, version)
        self._versions[self._newest] = version
        if len(self._versions) > _KEPT:
            del self._versions[next(iter(self._versions))]
        return self._newest

    def version_of(self, number: int) -> int:
        """Return the version that a payload carried; 0 for none, or one that is long past."""
        return self._versions.get(number, 0)
