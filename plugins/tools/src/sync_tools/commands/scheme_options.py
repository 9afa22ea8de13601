"""Parses a scheme's options on a command line: ``--slots 4``, ``--host=10.0.0.1``."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from sync_core.hooks import read_option

# The arguments of `Sender` that users may set on the command line.
_ALLOWED = {"options", "timeout"}


def parse_scheme_options(rest: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Parse the arguments that a command does not know as options of a scheme.

    Args:
        rest: ``--name value`` pairs, or ``--name=value``.
        parser: reports other arguments, and exits.
    """
    parts = [part for given in rest for part in _split(given)]
    names, values = parts[::2], parts[1::2]
    if len(parts) % 2 or not all(name.startswith("--") for name in names):
        parser.error(f"options of the scheme are --name value pairs, not {' '.join(rest)!r}")
    options = {
        name.removeprefix("--").replace("-", "_"): read_option(value)
        for name, value in zip(names, values, strict=True)
    }
    if options:
        # Imported here: it loads torch, which commands without options do not need.
        from sync_core import Sender

        for name in options.keys() & signature(Sender.__init__).parameters.keys() - _ALLOWED:
            parser.error(f"--{name} is not an option of a scheme")
    return options


def format_scheme_options(options: Mapping[str, Any]) -> str:
    """Return the options as typed on a command line, each after a space, for messages.

    Example:
        >>> format_scheme_options({"slots": 4, "host": "10.0.0.1"})
        ' --slots 4 --host 10.0.0.1'
    """
    return "".join(
        f" --{name.replace('_', '-')} {shlex.quote(_format(value))}"
        for name, value in options.items()
    )


def _split(given: str) -> list[str]:
    """Split a ``name=value`` argument into name and value."""
    return given.split("=", 1) if given.startswith("--") else [given]


def _format(value: Any) -> str:
    is_text = isinstance(value, str) and read_option(value) == value
    return str(value) if is_text else repr(value)
