"""The options of incremental versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sync_core.errors import OptionError
from sync_core.registry import Plugin
from sync_core.weights.patch import Compression, zstd


@dataclass(frozen=True, slots=True)
class Increments:
    """Options of increments: ``Sender(…, increments=Increments(below=0.1))``.

    Args:
        below: an increment travels where it takes less than this share of a whole version's bytes.
        whole_every: send a whole version to every worker after so many versions; None for never.
        compress: ``"zstd"`` compresses increments; needs ``pip install "sync-core[zstd]"``, here
            and in the workers.
        auto: compare a version with the one before only where that takes less time than sending
            it whole, by measurement; see the how-to page.

    Raises:
        OptionError: a value that is out of range, or zstandard is missing.

    Example:
        >>> Increments(below=2)
        Traceback (most recent call last):
        ...
        sync_core.errors.OptionError: below must be a number between 0 and 1, got 2
    """

    below: float = 0.3
    whole_every: int | None = None
    compress: Compression | None = None
    auto: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.below, bool) or not isinstance(self.below, int | float):
            raise OptionError(f"below must be a number between 0 and 1, got {self.below!r}")
        if not 0 < self.below <= 1:
            raise OptionError(f"below must be a number between 0 and 1, got {self.below!r}")
        every = self.whole_every
        if every is not None and (type(every) is not int or every < 1):
            raise OptionError(f"whole_every must be an integer >= 1 or None, got {every!r}")
        if self.compress not in (None, "zstd"):
            raise OptionError(f"compress must be 'zstd' or None, got {self.compress!r}")
        if self.compress is not None:
            zstd()
        if not isinstance(self.auto, bool):
            raise OptionError(f"auto must be True or False, got {self.auto!r}")

    @classmethod
    def of(cls, given: Increments | bool | Literal["auto"] | None) -> Increments | None:
        """Return the options that the argument ``increments`` of `Sender` stands for.

        Raises:
            OptionError: it is not one.
        """
        if isinstance(given, Increments):
            return given
        if given is True:
            return cls()
        if given == "auto":
            return cls(auto=True)
        if given is False or given is None:
            return None
        raise OptionError(f"increments must be True, False, 'auto' or Increments(…), got {given!r}")


def check_of_use(scheme: Plugin) -> None:
    """Raise `OptionError` for a scheme over which increments would save nothing."""
    if "same_object" in scheme.capabilities:
        raise OptionError(
            f"{scheme.describe()} moves nothing, so that there is nothing to leave out; leave out "
            "increments="
        )
    if "cross_process" not in scheme.capabilities:
        raise OptionError(
            f"{scheme.describe()} does not leave this process (it does not declare the capability "
            "'cross_process'), where comparing two versions costs more than copying one; leave "
            "out increments="
        )
