"""Very many sends, small and large: do memory, descriptors, threads and sockets stay as they are?

    make long-life                                      # 100,000 small sends, 200 of 400 MB
    make long-life ARGS='--schemes shm --small 5000 --large 10 --large-mb 100'

Ends with code 1 if something grew.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import astuple, fields

from chaos_kit import SUBJECTS
from chaos_kit.life import Holding, grown, live

_SMALL_BYTES = 65_536


def main() -> None:
    """Let every scheme live long, and say what it held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--schemes", type=lambda text: text.split(","), default=list(SUBJECTS), metavar="A,B"
    )
    parser.add_argument("--small", type=int, default=100_000, help="sends of 64 KiB")
    parser.add_argument("--large", type=int, default=200, help="large sends")
    parser.add_argument("--large-mb", type=int, default=400)
    arguments = parser.parse_args()
    complaints = []
    for name in arguments.schemes:
        sizes = ((arguments.small, _SMALL_BYTES), (arguments.large, arguments.large_mb * 10**6))
        for sends, nbytes in sizes:
            if not sends:
                continue
            begin = time.monotonic()
            _say(f"{name}, {sends} sends of {nbytes} bytes")
            _say("  ".join(f"{field.name:>11}" for field in fields(Holding)))
            points = []
            for point in live(SUBJECTS[name], sends=sends, nbytes=nbytes):
                points.append(point)
                _say("  ".join(f"{value:>11}" for value in astuple(point)))
            complaints += [f"{name}, {nbytes} bytes: {what}" for what in grown(points)]
            _say(f"{(time.monotonic() - begin) / sends * 1e3:.2f} ms for a send\n")
    _say("\n".join(complaints) or "flat")
    sys.exit(bool(complaints))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
