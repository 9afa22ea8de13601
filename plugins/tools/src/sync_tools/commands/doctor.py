"""``sync-core doctor``: tries whether each installed scheme delivers weights on this machine.

`sync_tools.commands.findings` checks the environment of the schemes. Schemes with a method
``findings`` report problems of their own.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any, Literal

from importlib_metadata import EntryPoint

from sync_core import registry
from sync_core.errors import PluginError, PluginNotFoundError
from sync_core.hooks import Finding
from sync_core.printable import printable
from sync_core.registry import owner_of
from sync_core.wrapping import SEPARATOR
from sync_plugin_std.workers import WorkerProcess, start_process
from sync_tools.commands.findings import check_imports, check_machine, check_plugins
from sync_tools.commands.listing import wraps_another
from sync_tools.commands.scheme_options import format_scheme_options, parse_scheme_options
from sync_tools.tables import print_line, print_table

#: The model (of `sync_tools.bench`), the number of workers and the number of sends in each trial.
MODEL = "small"
WORKERS = 2
VERSIONS = 5
#: Seconds after the deadline until a scheme that ignores its deadline is killed.
GRACE = 5.0
# Seconds for an interpreter to import torch, which are not the scheme's.
_START = 120.0
_MAIN = "sync_tools.commands.trial:answer"
_COLOURS = {"ok": "green", "failed": "red", "skipped": "yellow"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of trying a scheme.

    Args:
        verdict: ``"skipped"`` if it needs something that only the user can give.
        milliseconds: of the median send; None if it is not ok.
        problem: what is wrong, and what to type; None if it is ok.
    """

    verdict: Literal["ok", "failed", "skipped"]
    milliseconds: float | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A scheme and its outcome.

    Args:
        name: its name.
        distribution: the distribution that installs it.
        version: the version of the distribution.
        verdict: ``"ok"``, ``"failed"``, or ``"skipped"`` if it needs something that only the user
            can provide.
        milliseconds: the milliseconds of the median send; None if the verdict is not ok.
        problem: what is wrong, and what to type; None if it is ok.
    """

    name: str
    distribution: str | None
    version: str | None
    verdict: str
    milliseconds: float | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial of a scheme with options, up to a deadline in seconds."""

    scheme: str
    timeout: float
    options: Mapping[str, Any]

    @property
    def typed(self) -> str:
        """The scheme and its options as typed on a command line."""
        return f"{self.scheme}{format_scheme_options(self.options)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        f"Sends {VERSIONS} versions of a small model to {WORKERS} workers by each scheme, and "
        "checks on the workers what arrived. Then it names problems around them, with a remedy "
        "each. Further --name value pairs are options of the scheme, where one is named. "
        "The exit status is 1 if a scheme failed."
    )
    parser.add_argument(
        "schemes", nargs="*", metavar="SCHEME", help="only these, without loading others"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="SECONDS", help="for each scheme (30)"
    )
    parser.set_defaults(run=_run)


def diagnose(
    entry: EntryPoint,
    timeout: float,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    scheme: str | None = None,
) -> tuple[Diagnosis, list[Finding]]:
    """Try a scheme in its own process, and kill everything that it started afterwards.

    A plugin may hang despite its deadline, crash, or change global state such as
    torch.distributed's default group. The next trial must not be affected.

    Args:
        entry: the scheme's entry point; it is not loaded in this process.
        timeout: deadline in seconds.
        options: the scheme's options.
        scheme: the chain of names, such as ``"increments::dist"``, if the scheme wraps another.

    Returns:
        The outcome, and the scheme's own findings.
    """
    name = scheme or entry.name
    ours, theirs = multiprocessing.Pipe()
    with ours:
        with theirs:
            process = start_process(_MAIN, name, str(timeout), fds=[theirs.fileno()])
        try:
            outcome, findings = _await(ours, process, Trial(name, timeout, options))
        finally:
            # The scheme has its own process group, so this kills everything that it started and
            # left.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.exited(GRACE)
    return Diagnosis(name, *owner_of(entry), **asdict(outcome)), findings


def _await(
    connection: Connection, process: WorkerProcess, trial: Trial
) -> tuple[Outcome, list[Finding]]:
    findings: list[Finding] = []
    limit = trial.timeout + GRACE
    try:
        connection.send(dict(trial.options))
        _receive(connection, _START)
        # Loading the scheme counts to the start of the process, not to the trial.
        findings = _receive(connection, limit)
        return _receive(connection, limit), findings
    except TimeoutError:
        return Outcome("failed", problem=_hung(trial)), findings
    except (EOFError, ConnectionError):
        process.exited(GRACE)
        return Outcome("failed", problem=_died(trial, process.returncode)), findings


def _receive(connection: Connection, limit: float) -> Any:
    if not connection.poll(limit):
        raise TimeoutError
    return connection.recv()


def _hung(trial: Trial) -> str:
    return (
        f"hung for more than {trial.timeout:g} s and was ended; if it is only slow, type: "
        f"sync-core doctor {trial.typed} --timeout {math.ceil(4 * trial.timeout)}"
    )


def _died(trial: Trial, code: int | None) -> str:
    how = "hung up" if code is None else f"exited with code {code}"
    if code is not None and code < 0:
        how = f"was killed by signal {-code}"
    return (
        f"the process that tried it {how}; to see where, type: "
        f"python -X faulthandler -m sync_core bench {trial.typed} --model {MODEL}"
    )


def _run(arguments: argparse.Namespace, rest: list[str], parser: argparse.ArgumentParser) -> int:
    options = parse_scheme_options(rest, parser)
    if options and len(arguments.schemes) != 1:
        parser.error("options of a scheme follow its name: sync-core doctor shm --slots 4")
    if not 0 < arguments.timeout < math.inf:
        parser.error("--timeout is a number of seconds above 0")
    diagnoses, findings = [], []
    for scheme, entry in _entries(arguments.schemes).items():
        with _progress(f"trying {printable(scheme)}"):
            diagnosis, found = diagnose(entry, arguments.timeout, options, scheme=scheme)
        diagnoses.append(diagnosis)
        findings += found
    # Schemes of one distribution may have the same findings.
    findings = [*dict.fromkeys(findings), *_findings(whole=not arguments.schemes)]
    if arguments.json:
        told = {
            "schemes": [asdict(each) for each in diagnoses],
            "findings": [asdict(each) for each in findings],
        }
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        print_diagnoses(diagnoses)
        for finding in findings:
            print_line(str(finding), "yellow")
    return int(any(each.verdict == "failed" for each in diagnoses))


def _findings(*, whole: bool) -> list[Finding]:
    found = [*check_machine(), *check_plugins()]
    return [*found, *check_imports()] if whole else found


def _entries(names: list[str]) -> dict[str, EntryPoint]:
    """Return the schemes to try; wrapping schemes only if they are named in a chain."""
    if names:
        outer = {name: name.partition(SEPARATOR)[0] for name in names}
        return {n: registry.entry_point(registry.SCHEMES, outer[n]) for n in outer}
    entries = registry.installed(registry.SCHEMES)
    if not entries:
        raise PluginNotFoundError("no scheme is installed; type: pip install sync-plugin-std")
    return {entry.name: entry for entry in entries if not _wraps(entry)}


def _wraps(entry: EntryPoint) -> bool:
    try:
        return wraps_another(registry.load(registry.SCHEMES, entry))
    except PluginError:
        return False  # the trial reports the error


@contextmanager
def _progress(text: str) -> Iterator[None]:
    """Show a line in the terminal while the block runs, even if the output is redirected."""
    shown = sys.stderr.isatty()
    if shown:
        sys.stderr.write(text)
        sys.stderr.flush()
    try:
        yield
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def print_diagnoses(diagnoses: list[Diagnosis]) -> None:
    """Print a row for each scheme."""
    # Distribution and version share a column, to leave room for the sentence.
    print_table(
        ("scheme", "distribution", "verdict", "ms", "what is wrong"),
        [
            (
                each.name,
                f"{each.distribution} {each.version}",
                each.verdict,
                None if each.milliseconds is None else f"{each.milliseconds:.2f}",
                each.problem,
            )
            for each in diagnoses
        ],
        right={"ms"},
        whole={"scheme", "distribution", "verdict", "ms"},
        colours=[_COLOURS[each.verdict] for each in diagnoses],
    )
