"""Which clock this process reads, so that two processes know whether theirs is the same one."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@cache
def clock_id() -> str | None:
    """What processes have in common whose `time.perf_counter` counts from the same moment.

    On Linux that clock is ``CLOCK_MONOTONIC``: one for all processes of a host, but for those in
    another time namespace (https://man7.org/linux/man-pages/man7/time_namespaces.7.html). None on
    other systems, where nothing says which processes share theirs.

    Example:
        >>> clock_id() == clock_id()
        True
    """
    try:
        boot = _BOOT.read_text().strip()
    except OSError:
        return None
    namespace = ""
    with suppress(OSError):  # there is one for all before Linux 5.6
        namespace = str(Path("/proc/self/ns/time").readlink())
    kind = time.get_clock_info("perf_counter").implementation
    # A digest, as a host's boot id is nobody else's business.
    return hashlib.sha256(f"{boot} {namespace} {kind}".encode()).hexdigest()[:16]
