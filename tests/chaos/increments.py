"""1,000 random orders of sends, misses, deaths and damage over each scheme with increments.

    make increments
    make increments ARGS='--schemes dist --orders 50 --seed 1000'

Ends with code 1 at the first worker that counts as current and differs from the trainer.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from functools import partial
from typing import Any

from chaos_kit.increment_orders import run_order

_OPTIONS: dict[str, dict[str, Any]] = {
    "dist": {"shared_memory": False},
    "file": {"poll": 0.001},
    "shm": {},
    "mp": {},
}


def main() -> None:
    """Run the orders, and print how long they took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--schemes", type=lambda text: text.split(","), default=list(_OPTIONS), metavar="A,B"
    )
    parser.add_argument("--orders", type=int, default=1000, help="orders over each scheme")
    parser.add_argument("--seed", type=int, default=0, help="of the first order")
    arguments = parser.parse_args()
    # Workers miss sends on purpose.
    logging.getLogger("sync_core").setLevel(logging.ERROR)
    for scheme in arguments.schemes:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            options = dict(_OPTIONS[scheme])
            if scheme == "file":
                options["directory"] = directory
            for seed in range(arguments.seed, arguments.seed + arguments.orders):
                run_order(seed, partial(str, scheme), options)
        seconds = time.monotonic() - begin
        sys.stdout.write(f"{scheme}: {arguments.orders} orders in {seconds:.0f} s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
