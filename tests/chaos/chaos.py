"""Every fault on every scheme, then random sequences of them, then readers that look for tears.

    make chaos ARGS='--jobs 3'                          # all of it: hours on two cores
    make chaos ARGS='--schemes shm,mp --cases 20 --sequences 50 --reads 100000'

Finished cases are kept in a journal, so that an interrupted run continues; `--fresh`
begins a new one. Cases mostly wait for deadlines, so that `--jobs` processes, each with a share of
them, take little longer than one with its own; the readers have the machine to themselves. A
process is ended when a case hangs, and the next one continues. Then the tables are printed, and
written to `docs/fault-matrix.md`. Ends with code 1 if anything was not as documented.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from chaos_kit import SUBJECTS, Outcome, Runner, Verdict, cases_of, sample, sequence_of
from chaos_kit.outcome import Complaint, Journal
from chaos_kit.page import page_of
from chaos_kit.plan import Plan
from chaos_kit.torn import hunt

_PAGE = Path(__file__).parents[2] / "docs" / "fault-matrix.md"
# After so long without an end, a case hangs, and so does the process that runs it, in seconds.
_LIMIT = 240.0
_READ_LIMIT = 4 * 3600.0


def main() -> None:
    """Run, or continue with, what the arguments ask for."""
    arguments = _parse()
    arguments.journal.parent.mkdir(parents=True, exist_ok=True)
    if arguments.histories:
        arguments.histories.mkdir(parents=True, exist_ok=True)
    if arguments.child:
        name, share = arguments.child
        # That workers fail is what is asked for.
        logging.disable(logging.WARNING)
        if share == "reads":
            _read(name, arguments)
        else:
            _try(name, int(share), arguments)
        return
    if arguments.fresh:
        arguments.journal.unlink(missing_ok=True)
        _reads_path(arguments).unlink(missing_ok=True)
    _run_all(arguments)
    outcomes = [o for o in Journal(arguments.journal).read() if o.subject in arguments.schemes]
    page = page_of(outcomes, _reads(arguments))
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
    parser.add_argument("--sequences", type=int, default=1000, help="of all schemes that there are")
    parser.add_argument("--reads", type=int, default=10_000_000, help="of each kind; 0 for none")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and the sequences")
    parser.add_argument("--jobs", type=int, default=1, help="so many processes at a time")
    parser.add_argument("--journal", type=Path, default=Path("out/chaos.jsonl"))
    parser.add_argument("--page", type=Path, default=_PAGE, help="what to write")
    parser.add_argument("--histories", type=Path, help="a folder that keeps one of each run")
    parser.add_argument("--fresh", action="store_true", help="forget what was done before")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run_all(arguments: argparse.Namespace) -> None:
    # One whose workers only one process can have takes longest; the others run meanwhile.
    shares = [
        (name, share)
        for name in sorted(arguments.schemes, key=lambda name: not SUBJECTS[name].alone)
        for share in range(1 if SUBJECTS[name].alone else arguments.jobs)
    ]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for done in [pool.submit(_run_share, *each, arguments) for each in shares]:
            done.result()
    for name in arguments.schemes:
        if SUBJECTS[name].shares and arguments.reads and (code := _run_child(name, "reads")) != 0:
            raise SystemExit(f"the readers of {name} ended with code {code}")


def _run_share(name: str, share: int, arguments: argparse.Namespace) -> None:
    """Run cases of a scheme, in another process when one has hung."""
    begun = _begun_path(arguments, name, share)
    begun.unlink(missing_ok=True)
    while (code := _run_child(name, str(share))) != 0:
        if not begun.exists():
            raise SystemExit(f"the process that tries {name} ended with code {code} at once")
        Journal(arguments.journal).add(_hung(begun.read_text(), name, code))
        begun.unlink()


def _run_child(name: str, share: str) -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--fresh"]
    return subprocess.call([sys.executable, __file__, *arguments, "--child", name, share])


def _try(name: str, share: int, arguments: argparse.Namespace) -> None:
    journal = Journal(arguments.journal)
    done = {outcome.key for outcome in journal.read()}
    begun = _begun_path(arguments, name, share)
    jobs = 1 if SUBJECTS[name].alone else arguments.jobs
    faulthandler.enable()
    with Runner(name, arguments.histories) as runner:
        for plan in islice(_plans(name, arguments), share, None, jobs):
            if plan.key in done:
                continue
            begun.write_text(plan.key)
            faulthandler.dump_traceback_later(_LIMIT, exit=True)
            outcome = runner.run(plan)
            journal.add(outcome)
            begun.unlink()
            _say(f"{outcome.key}: {'ok' if outcome.ok else 'WRONG'}, {outcome.seconds:.1f} s")
    faulthandler.cancel_dump_traceback_later()


def _plans(name: str, arguments: argparse.Namespace) -> Iterator[Plan]:
    cases = (
        cases_of(name) if arguments.cases is None else sample(name, arguments.seed, arguments.cases)
    )
    yield from map(Plan.of, cases)
    for seed in range(arguments.seed, arguments.seed + arguments.sequences):
        plan = sequence_of(seed, list(SUBJECTS))
        if plan.subject_name == name:
            yield plan


def _read(name: str, arguments: argparse.Namespace) -> None:
    subject = SUBJECTS[name]
    rows = _reads(arguments)
    can_kill = subject.processes
    faulthandler.dump_traceback_later(_READ_LIMIT, exit=True)
    for kind, zero_copy, kill_every in (
        ("copy", False, None),
        ("zero-copy", True, None),
        ("copy, readers killed", False, 1.0),
        ("zero-copy, readers killed", True, 1.0),
    ):
        key = f"{name} | {kind}"
        if key in rows or (kill_every is not None and not can_kill):
            continue
        count = arguments.reads if kill_every is None else arguments.reads // 10
        seen = hunt(subject, reads=count, zero_copy=zero_copy, kill_every=kill_every)
        rows[key] = asdict(seen)
        _reads_path(arguments).write_text(json.dumps(rows))
        _say(f"{key}: {seen}")
    faulthandler.cancel_dump_traceback_later()


def _hung(key: str, name: str, code: int) -> Outcome:
    what = Complaint(Verdict.HANG, f"no end within {_LIMIT:g} s, or a crash (exit code {code})")
    return Outcome(key, name, ("hang or crash",), _LIMIT, (what,))


def _begun_path(arguments: argparse.Namespace, name: str, share: int) -> Path:
    path: Path = arguments.journal.with_suffix(f".{name}.{share}.begun")
    return path


def _reads_path(arguments: argparse.Namespace) -> Path:
    path: Path = arguments.journal.with_suffix(".reads.json")
    return path


def _reads(arguments: argparse.Namespace) -> dict[str, dict[str, int]]:
    path = _reads_path(arguments)
    rows: dict[str, dict[str, int]] = json.loads(path.read_text()) if path.exists() else {}
    return rows


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
