"""The protocol as a model that Spin searches: docs/spec/protocol.pml and two-phase.pml.

Every order of steps is searched for the bounds below. Mistakes are planted in the models, one line
each, to show that each promise can be violated, and that the search finds it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[2] / "docs" / "spec"
# A search takes seconds; a busy machine may need many times as long.
SECONDS = 300.0

needs_spin = pytest.mark.skipif(
    not (shutil.which("spin") and shutil.which("gcc")),
    reason="needs the model checker Spin and a C compiler: apt-get install spin gcc",
)
pytestmark = needs_spin


def search(folder: Path, model: str, **bounds: int) -> tuple[str, int]:
    """Search all states of a model.

    Args:
        folder: an empty folder for what Spin makes.
        model: in Promela.
        bounds: the numbers that the model defines, such as `VERSIONS`.

    Returns:
        The promise that does not hold, empty if all do, and the number of states.
    """
    (folder / "model.pml").write_text(model)
    defines = [f"-D{name}={value}" for name, value in bounds.items()]
    made = _run(folder, "spin", *defines, "-a", "model.pml")
    assert "error" not in made.lower(), made
    _run(folder, "gcc", "-O1", "-w", "-DSAFETY", "-o", "pan", "pan.c")
    output = _run(folder, "./pan", "-m100000")
    assert "max search depth too small" not in output, output
    errors = re.search(r"errors: (\d+)", output)
    states = re.search(r"(\d+) states, stored", output)
    assert errors, output
    assert states, output
    violated = re.search(r"assertion violated (\w+) ", output)
    assert bool(violated) is (errors[1] != "0"), output
    return violated[1] if violated else "", int(states[1])


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(
    ("name", "versions", "faults", "states"),
    [
        ("protocol", 3, 1, 100_000),
        ("two-phase", 2, 1, 100_000),
        ("two-phase", 1, 2, 10_000),
    ],
)
def test_every_order_of_steps(
    name: str, versions: int, faults: int, states: int, tmp_path: Path
) -> None:
    model = (MODELS / f"{name}.pml").read_text()
    violated, searched = search(tmp_path, model, VERSIONS=versions, FAULTS=faults)
    assert violated == ""
    assert searched > states


PROTOCOL = {
    "a missed version counts": ("version == status[w].wanted ->", "version ->", "honest_answers"),
    "answers of a replaced receiver count": (
        "its_life == status[w].life && version",
        "version",
        "honest_answers",
    ),
    "an answer before the commit": (
        "receiver[w].half == 2 && next(committed, w, receiver[w].first) -> step; commit(w)",
        (
            "receiver[w].half == 1 && !receiver[w].owes && nfull(answers[w]) -> "
            "answers[w]!receiver[w].life, receiver[w].first }\n"
            "  :: atomic { receiver[w].half == 2 -> commit(w)"
        ),
        "honest_answers",
    ),
    "a new receiver counts as the old one": (
        "(status[w].wanted > receiver[w].held -> behind : current)",
        "(receiver[w].life > 1 -> current : behind)",
        "honest_answers",
    ),
    "a slot that is read is written to": (
        "#define is_free(s) (s < SLOTS && s != newest_slot && !is_read(s))",
        "#define is_free(s) (s < SLOTS && s != newest_slot)",
        "whole_versions",
    ),
    "the newest slot is written to": (
        "#define is_free(s) (s < SLOTS && s != newest_slot && !is_read(s))",
        "#define is_free(s) (s < SLOTS && !is_read(s))",
        "whole_versions",
    ),
    "an offer before the version is written": (
        "choose_slot(); slot[writes].first = newest + 1 }",
        "choose_slot(); slot[writes].first = newest + 1; newest_slot = writes }",
        "whole_versions",
    ),
    "any version is taken": (
        "!receiver[w].owes && status[w].wanted > receiver[w].held -> stage_first(w)",
        "!receiver[w].owes && status[w].wanted -> stage_first(w)",
        "forward_only",
    ),
    "no deadline": (
        "pending && next(reported, 0, newest) -> step; give_up(0); give_up(1); pending = false",
        "false -> give_up(0); give_up(1); pending = false",
        "sends_end",
    ),
    "versions only during a send": (
        "!receiver[w].owes && status[w].wanted > receiver[w].held -> stage_first(w)",
        (
            "!receiver[w].owes && status[w].open && status[w].wanted > receiver[w].held -> "
            "stage_first(w)"
        ),
        "up_to_date",
    ),
    "two slots too few": ("#define SLOTS (WORKERS + 2)", "#define SLOTS 2", "next_send_works"),
}

TWO_PHASE = {
    "a commit before all said yes": (
        "does == staging && staged == BOTH -> decide(true)",
        "does == staging && staged -> decide(true)",
        "all_said_yes",
    ),
    "a commit at the deadline": (
        "does == staging -> decide(false) }          /* the deadline",
        "does == staging -> decide(true) }          /* the deadline",
        "all_said_yes",
    ),
    "a yes is not withdrawn": (
        "word[w] = no; staged = staged & ~bit(w); failed = failed | bit(w)\n  :: said == committed",
        "word[w] = no\n  :: said == committed",
        "all_said_yes",
    ),
    "a dead worker's yes counts": (
        "word[w] = no; staged = staged & ~bit(w); failed = failed | bit(w)\n  :: else -> ended",
        "word[w] = no\n  :: else -> ended",
        "all_said_yes",
    ),
    "a commit while staging": (
        "what == stage -> worker[w].staged = which",
        "what == stage -> do_commit(w, which)",
        "as_decided",
    ),
    "a commit when the wait is over": (
        "up[w]!refused, worker[w].staged; forget_staged(w) }\n  :: atomic { is_staged(w) && !lives",
        "do_commit(w, worker[w].staged) }\n  :: atomic { is_staged(w) && !lives",
        "as_decided",
    ),
    "a commit when the sender is gone": (
        "empty(down[w]) -> forget_staged(w) }",
        "empty(down[w]) -> do_commit(w, worker[w].staged) }",
        "as_decided",
    ),
    "a version that was given up goes to a late worker": (
        "if\n  :: does != staging -> alone[w] = newest",
        "if\n  :: true -> alone[w] = version",
        "as_decided",
    ),
    "a version is committed twice": (
        "alone[w] > worker[w].held -> do_commit(w, alone[w])",
        "alone[w] -> do_commit(w, alone[w])",
        "forward_only",
    ),
    "no wait for a decision": (
        "is_staged(w) && worker[w].over ->  ",
        "is_staged(w) && worker[w].said ->  ",
        "waits_long_enough",
    ),
    "no deadline after the decision": (
        "lives && does == settling -> does = idle",
        "false -> does = idle",
        "sends_end",
    ),
    "a worker that lacks it is not sent it again": (
        "said == lacks && which == newest -> send_alone(w)",
        "said == lacks && which == newest -> skip",
        "everywhere",
    ),
    "a version on its way replaces what a worker lacks": (
        "newest != version && !(lack & bit(w)) -> down[w]!drop, version",
        "newest != version -> down[w]!drop, version",
        "everywhere",
    ),
}

MISTAKES = [
    pytest.param(model, *mistake, id=f"{model}: {title}")
    for model, mistakes in (("protocol", PROTOCOL), ("two-phase", TWO_PHASE))
    for title, mistake in mistakes.items()
]


@pytest.mark.parametrize(("name", "line", "instead", "violates"), MISTAKES)
def test_mistakes_are_found(
    name: str, line: str, instead: str, violates: str, tmp_path: Path
) -> None:
    model = (MODELS / f"{name}.pml").read_text()
    assert model.count(line) == 1
    violated, _ = search(tmp_path, model.replace(line, instead))
    assert violated == violates
