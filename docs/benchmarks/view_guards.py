"""Measures guards that let a worker write to weights that it only views.

    python docs/benchmarks/view_guards.py | python docs/benchmarks/page.py --record guards

A worker that views a version would write to memory that others read. With a private mapping, the
kernel gives it its own copy of each page that it writes to. Such pages must be found or dropped
before the memory gets another version; otherwise the worker acts with parts of two versions. Each
guard is measured at the point where another process would have written the next version. Prints
medians of processor time in milliseconds, and the worker's private bytes after that.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

MB = 1 << 20
_PAGE = mmap.PAGESIZE
# https://docs.kernel.org/admin-guide/mm/pagemap.html
_PAGEMAP_SCAN = 3 << 30 | 96 << 16 | ord("f") << 8 | 16
_OF_FILE, _PRESENT = 1 << 2, 1 << 3
_REGIONS = 64
_MADV_POPULATE_READ = 22

Array = np.ndarray[Any, np.dtype[np.uint8]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=[10, 400], metavar="MB")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    print("| MB | way | ms | own MB |")
    print("|--:|---|--:|--:|")
    for size in arguments.sizes:
        _compare(size, arguments.rounds)


def _compare(size: int, rounds: int) -> None:
    nbytes = size * MB
    descriptor = os.memfd_create("sync-core-bench")
    os.posix_fallocate(descriptor, 0, nbytes)
    written = _array(mmap.mmap(descriptor, nbytes))
    private = mmap.mmap(
        descriptor, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
    )
    view = _array(private)
    own = np.zeros(nbytes, dtype=np.uint8)
    storage = torch.from_numpy(view).untyped_storage()
    pagemap = os.open("/proc/self/pagemap", os.O_RDONLY)
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(own, view),
        "drop all pages and read them": lambda: _drop(private, view),
        "look at each page (pagemap)": lambda: _written_pages(pagemap, view),
        "look for written pages (PAGEMAP_SCAN)": lambda: _scan(pagemap, view),
        "count the holders of the memory": lambda: torch._C._storage_Use_Count(storage._cdata),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    alone: dict[str, float] = {}
    for number in range(rounds):
        for name, way in ways.items():
            written[:] = number
            _populate(view)
            before = _own_bytes()
            began = time.thread_time()
            way()
            seconds[name].append(time.thread_time() - began)
            alone[name] = (_own_bytes() - before) / MB
            private.madvise(mmap.MADV_DONTNEED)
    view[5 * _PAGE] = 1
    if _scan(pagemap, view) != 1 or _written_pages(pagemap, view) != 1:
        raise RuntimeError("a page that was written to was not found")
    for name in ways:
        has = size if name == "copy" else alone[name]
        print(f"| {size} | {name} | {1e3 * median(seconds[name]):.3f} | {has:.0f} |", flush=True)


def _array(memory: mmap.mmap) -> Array:
    return np.frombuffer(memory, dtype=np.uint8)


def _drop(memory: mmap.mmap, view: Array) -> None:
    memory.madvise(mmap.MADV_DONTNEED)
    _populate(view)


def _populate(view: Array) -> None:
    """Map all pages for reading: MAP_POPULATE would copy each page as if it were written to."""
    address, nbytes = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view))
    if ctypes.CDLL(None).madvise(address, nbytes, _MADV_POPULATE_READ):
        raise OSError("MADV_POPULATE_READ needs Linux 5.14")


def _written_pages(pagemap: int, view: Array) -> int:
    first, count = view.ctypes.data // _PAGE, len(view) // _PAGE
    words = np.frombuffer(os.pread(pagemap, 8 * count, 8 * first), dtype=np.uint64)
    present, of_file = (words >> np.uint64(bit) & np.uint64(1) for bit in (63, 61))
    return int((present & ~of_file & np.uint64(1)).sum())


def _scan(pagemap: int, view: Array) -> int:
    found = (ctypes.c_uint64 * 3 * _REGIONS)()
    begin, inverted, required = view.ctypes.data, _OF_FILE, _OF_FILE | _PRESENT
    places = (begin, begin + len(view), 0, ctypes.addressof(found), _REGIONS, 0)
    # A page that is present and not from a file; the file bit is inverted for the comparison.
    words = (96, 0, *places, inverted, required, 0, required)
    return fcntl.ioctl(pagemap, _PAGEMAP_SCAN, bytearray(struct.pack("12Q", *words)))


def _own_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


if __name__ == "__main__":
    main()
