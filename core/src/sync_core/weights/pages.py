"""Private memory in large pages, which is copied to faster than memory in small ones."""

from __future__ import annotations

import mmap
import sys


def allocate(nbytes: int) -> mmap.mmap:
    """Zeroed memory of this process alone, a child of `os.fork` gets a copy of its own."""
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
