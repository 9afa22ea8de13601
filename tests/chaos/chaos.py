"""Every fault on every scheme, then random sequences of them, then readers that look for tears.

    make chaos                                          # all of it: hours
    make chaos ARGS='--schemes shm,mp --cases 20 --sequences 50 --reads 100000'

What is done is kept in a journal, so that a run that was broken off is gone on with; `--fresh`
begins a new one. Each scheme has a process of its own, which is ended when a case hangs. At the
end the tables are printed, and written to `docs/reliability.md`. Ends with code 1 if anything was
not as documented.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from sync_core.testing.chaos import (
    SUBJECTS,
    Outcome,
    Runner,
    Verdict,
    cases_of,
    sample,
    sequence_of,
)
from sync_core.testing.chaos.outcome import Complaint, Journal, table
from sync_core.testing.chaos.plan import Plan
from sync_core.testing.chaos.torn import hunt

_PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
# After so long without an end, a case hangs, and so does the process that runs it, in seconds.
_LIMIT = 240.0
_READ_LIMIT = 4 * 3600.0


def main() -> None:
    """Run, or go on with, what the arguments ask for."""
    arguments = _parse()
    arguments.journal.parent.mkdir(parents=True, exist_ok=True)
    if arguments.child:
        _run_scheme(arguments.child, arguments)
        return
    journal = Journal(arguments.journal)
    if arguments.fresh:
        journal.path.unlink(missing_ok=True)
        _reads_path(arguments).unlink(missing_ok=True)
    for name in arguments.schemes:
        while (code := _run_child(name)) != 0:
            begun = _begun_path(arguments)
            if not begun.exists():
                raise SystemExit(f"the process that tries {name} ended with code {code} at once")
            journal.add(_hung(begun.read_text(), name, code))
            begun.unlink()
    outcomes = [outcome for outcome in journal.read() if outcome.subject in arguments.schemes]
    page = "\n".join(_page(outcomes, arguments))
    _say(page)
    arguments.page.write_text(page)
    wrong = [outcome for outcome in outcomes if not outcome.ok]
    for outcome in wrong:
        _say(f"{outcome.key}: " + "; ".join(f"{c.verdict}: {c.detail}" for c in outcome.complaints))
    sys.exit(bool(wrong))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--schemes", type=lambda text: text.split(","), default=list(SUBJECTS), metavar="A,B"
    )
    parser.add_argument("--cases", type=int, help="so many of each scheme, at random; all")
    parser.add_argument("--sequences", type=int, default=1000, help="of all schemes together")
    parser.add_argument("--reads", type=int, default=10_000_000, help="of each kind; 0 for none")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and the sequences")
    parser.add_argument("--journal", type=Path, default=Path("out/chaos.jsonl"))
    parser.add_argument("--page", type=Path, default=_PAGE, help="what to write")
    parser.add_argument("--fresh", action="store_true", help="forget what was done before")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run_child(name: str) -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--fresh"]
    return subprocess.call([sys.executable, __file__, *arguments, "--child", name])


def _run_scheme(name: str, arguments: argparse.Namespace) -> None:
    journal = Journal(arguments.journal)
    done = {outcome.key for outcome in journal.read()}
    begun = _begun_path(arguments)
    faulthandler.enable()
    with Runner(name) as runner:
        for plan in _plans(name, arguments):
            if plan.key in done:
                continue
            begun.write_text(plan.key)
            faulthandler.dump_traceback_later(_LIMIT, exit=True)
            outcome = runner.run(plan)
            journal.add(outcome)
            begun.unlink()
            _say(f"{outcome.key}: {'ok' if outcome.ok else 'WRONG'}, {outcome.seconds:.1f} s")
    faulthandler.dump_traceback_later(_READ_LIMIT, exit=True)
    _read(name, arguments)
    faulthandler.cancel_dump_traceback_later()


def _plans(name: str, arguments: argparse.Namespace) -> Iterator[Plan]:
    cases = (
        cases_of(name) if arguments.cases is None else sample(name, arguments.seed, arguments.cases)
    )
    yield from map(Plan.of, cases)
    for seed in range(arguments.seed, arguments.seed + arguments.sequences):
        plan = sequence_of(seed, arguments.schemes)
        if plan.subject_name == name:
            yield plan


def _read(name: str, arguments: argparse.Namespace) -> None:
    subject = SUBJECTS[name]
    if not subject.shares or not arguments.reads:
        return
    path = _reads_path(arguments)
    rows = json.loads(path.read_text()) if path.exists() else {}
    for kind, zero_copy, kill_every in (
        ("copy", False, None),
        ("zero-copy", True, None),
        ("copy, readers killed", False, 5.0),
        ("zero-copy, readers killed", True, 5.0),
    ):
        key = f"{name} | {kind}"
        if key in rows or (kill_every is not None and not subject.processes):
            continue
        count = arguments.reads if kill_every is None else arguments.reads // 10
        seen = hunt(subject, reads=count, zero_copy=zero_copy, kill_every=kill_every)
        rows[key] = asdict(seen)
        path.write_text(json.dumps(rows))
        _say(f"{key}: {seen}")


def _hung(key: str, name: str, code: int) -> Outcome:
    what = Complaint(Verdict.HANG, f"no end within {_LIMIT:g} s, or a crash (exit code {code})")
    return Outcome(key, name, ("hang or crash",), _LIMIT, (what,))


def _page(outcomes: list[Outcome], arguments: argparse.Namespace) -> Iterator[str]:
    wrong = sum(not outcome.ok for outcome in outcomes)
    yield "# Reliability\n"
    yield "Written by `make chaos`; see [how faults are injected](how-to/faults.md).\n"
    yield (
        f"{len(outcomes)} runs, {wrong} of them not as documented. In each run, three workers get "
        "versions before, during and after a fault, and are looked at: every send ends within its "
        "deadline, and reports what became of each worker; whoever is not hurt has the new version "
        "whole; whoever is hurt has the old or the new one whole, or is gone; the next send works; "
        "who takes the place of one that was killed comes up to date; nothing is left open.\n"
    )
    yield table(outcomes)
    path = _reads_path(arguments)
    if path.exists():
        yield "Readers in tight loops, while the trainer publishes as fast as it can:\n"
        yield _reads_table(json.loads(path.read_text()).items())


def _reads_table(rows: Iterable[tuple[str, dict[str, int]]]) -> str:
    heads = ("reads", "torn", "backwards", "versions", "killed")
    lines = [
        "| scheme | way | " + " | ".join(heads) + " |",
        "| --- | --- |" + " ---: |" * len(heads),
    ]
    lines += [f"| {key} | " + " | ".join(f"{row[h]:,}" for h in heads) + " |" for key, row in rows]
    return "\n".join(lines) + "\n"


def _begun_path(arguments: argparse.Namespace) -> Path:
    path: Path = arguments.journal.with_suffix(".begun")
    return path


def _reads_path(arguments: argparse.Namespace) -> Path:
    path: Path = arguments.journal.with_suffix(".reads.json")
    return path


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
