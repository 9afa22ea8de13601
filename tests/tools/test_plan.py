"""`sync-core plan`, and its cost model against the figures of the benchmarks and of the pages."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sync_tools.commands.plan import WAYS, Estimate, Job, estimates, seconds_text, shards, size_text
from sync_tools.main import main

DOCS = Path(__file__).parents[2] / "docs"
#: Bytes of the models of the benchmarks.
MODELS = {"small": 26e3, "medium": 10e6, "many": 8e6, "large": 400e6}


def seconds_of(job: Job) -> dict[str, str]:
    return {estimate.way: seconds_text(estimate) for estimate in estimates(job)}


def newest(table: str) -> list[list[str]]:
    lines = (DOCS / "benchmarks" / "results.jsonl").read_text().splitlines()
    runs = [run for run in map(json.loads, lines) if run["table"] == table]
    rows: list[list[str]] = max(runs, key=lambda run: run["date"])["rows"]
    return rows


def measured() -> list[tuple[str, str, float]]:
    """The rows of the benchmarks: model, command, milliseconds; 4 workers on 2 cores."""
    found = []
    for row in newest("local"):
        model = row[0].partition(":")[0]
        if row[1] != "mp" and model != "many":
            way = f'Sender("shm", …{", zero_copy=True" * ("zero" in row[1])})'
            found.append((model, way, float(row[2])))
    for model, copy, _, views, *_ in newest("ray"):
        if model == "large":
            found += [(model, 'Sender("ray", …)', float(copy))]
            found += [(model, 'Sender("ray", …, zero_copy=True)', float(views))]
    return found


@pytest.mark.parametrize(("model", "way", "milliseconds"), measured())
def test_the_model_is_near_what_was_measured(model: str, way: str, milliseconds: float) -> None:
    job = Job(nbytes=MODELS[model], workers=4, cores=2)
    (estimate,) = (each for each in estimates(job) if each.way == way)
    assert 0.5 < 1e3 * estimate.seconds / milliseconds < 2


def test_costs_grow_with_what_is_sent_and_with_workers() -> None:
    def total(**job: float) -> dict[str, float]:
        found = estimates(Job(**{"nbytes": 1e9, "workers": 8, "nodes": 2, "cores": 4} | job))  # type: ignore[arg-type]
        return {estimate.way: estimate.most_seconds for estimate in found}

    base = total()
    assert base
    for more in ({"nbytes": 2e9}, {"workers": 16}, {"gbit": 5.0}):
        assert all(seconds > base[way] for way, seconds in total(**more).items()), more


def test_memory_shared_by_a_machine_is_for_one_machine() -> None:
    assert not any("shm" in way for way in seconds_of(Job(nbytes=1e9, workers=4, nodes=2)))
    assert any("shm" in way for way in seconds_of(Job(nbytes=1e9, workers=4)))
    assert all(list(way(Job(nbytes=1.0, workers=2, nodes=2))) for way in WAYS[1:3])


def test_the_command_prints_what_the_model_says(capsys: Any) -> None:
    command = "plan --params 7e9 --dtype bf16 --workers 16 --nodes 2 --gbit 100"
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    job = Job(nbytes=14e9, workers=16, nodes=2, gbit=100.0)
    for estimate in estimates(job):
        line = next(line for line in printed.splitlines() if estimate.way in line)
        assert seconds_text(estimate) in line
        assert size_text(estimate.trainer_gb) in line
    sharded = next(shards(replace(job, ranks=8)))
    assert f"{sharded.way} takes {seconds_text(sharded)} s: add --ranks 8" in printed
    assert main(["plan", "--params", "7e9", "--workers", "8"]) == 0
    assert "--ranks" not in capsys.readouterr().out
    assert main([*command.split(), "--json"]) == 0
    assert [each["way"] for each in json.loads(capsys.readouterr().out)] == [*seconds_of(job)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "required"),
        ("--params 7B", "'7B' is not a number; type 7e9 for 7B"),
        ("--params -1", "--params must be more than 0, got -1.0"),
        ("--mb 8 --workers 0", "--workers must be more than 0, got 0"),
        ("--mb 8 --workers 2 --nodes 3", "2 workers cannot be on 3 machines"),
        ("--mb 8 --cores -1", "--cores must be 1 or more, got -1"),
        ("--mb 8 --shards 3", "plan has no"),
        ("--mb 8 --ranks 0", "--ranks must be more than 0, got 0"),
        ("--mb 8 --worker-ranks -2", "--worker-ranks must be more than 0, got -2"),
        ("--mb 8 --relays -1", "--relays must be 1 or more, got -1"),
        ("--mb 8 --changed 2", "--changed must be at most 1, got 2.0"),
        ("--mb 8 --worker-ranks 4 --workers 6", "6 workers do not make copies of 4 each"),
        ("--mb 8 --ranks 2 --nodes 2", "--nodes is for models that are not sharded"),
        ("--mb 8 --ranks 2 --relays 1", "--relays is for models that are not sharded"),
        ("--mb 8 --ranks 2 --changed 0.1", "--changed is for models that are not sharded"),
    ],
)
def test_what_cannot_be_planned(arguments: str, message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *arguments.split()])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.0004, "0.40 MB"), (0.4, "400 MB"), (140.0, "140 GB")]
)
def test_sizes_have_two_digits(value: float, text: str) -> None:
    assert size_text(value) == text


def tables_of(page: str) -> list[list[list[str]]]:
    """The tables of a page that the command computes: those after a comment `plan`."""
    text = (DOCS / page).read_text()
    tables = re.findall(r"<!-- plan -->\n((?:\|.*\n)+)", text)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for table in tables
    ]


def test_the_page_has_what_the_command_computes() -> None:
    tables = tables_of("how-to/choose-a-scheme.md")
    assert len(tables) == 2
    sizes = {"8 MB": 8e6, "400 MB": 400e6, "7B bf16": 14e9, "70B bf16": 140e9}
    jobs = [{"workers": 4}, {"workers": 16, "nodes": 2, "gpu": True}]
    for table, job in zip(tables, jobs, strict=True):
        head, _, *rows = table
        assert [row[0] for row in rows] == [*sizes]
        for row in rows:
            found = {each.way: each for each in estimates(Job(nbytes=sizes[row[0]], **job))}  # type: ignore[arg-type]
            for title, cell in zip(head[1:], row[1:], strict=True):
                assert cell == f"{seconds_text(found[_way(title)])} s", (row[0], title)


def _way(title: str) -> str:
    scheme, *options = title.strip("`").split(", ")
    return f"Sender({', '.join([scheme, '…', *options])})"


def test_the_prediction_on_the_page_about_ray_is_this_model() -> None:
    text = (DOCS / "explanation" / "scaling.md").read_text()
    rows = re.findall(
        r"^\| ([\d,]+) \| ([\d,]+) \| (\d+) \| ([\d,]+) s \| ([\d,]+) s \|", text, re.MULTILINE
    )
    assert len(rows) == 3
    for row in rows:
        gigabytes, nodes, gbit, most, least = (float(cell.replace(",", "")) for cell in row)
        job = Job(nbytes=gigabytes * 1e9, workers=int(8 * nodes), nodes=int(nodes), gbit=gbit)
        (found,) = (each for each in estimates(job) if each.way == 'Sender("ray", …)')
        assert found.most_seconds == pytest.approx(most, rel=0.05)
        assert found.seconds == pytest.approx(least, rel=0.05)


def estimate_of(way: str, job: Job) -> Estimate:
    (found,) = (each for each in estimates(job) if each.way == way)
    return found


def test_the_predictions_of_the_page_are_what_the_command_prints(capsys: Any) -> None:
    text = (DOCS / "explanation" / "scaling.md").read_text()
    (table,) = re.findall(r"<!-- plan rows -->\n((?:\|.*\n)+)", text)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert len(rows) > 8
    for _, arguments, way, seconds, here, worker in rows[2:]:
        assert main(["plan", *arguments.strip("`").split(), "--json"]) == 0
        found = [Estimate(**each) for each in json.loads(capsys.readouterr().out)]
        (estimate,) = (each for each in found if each.way == way.strip("`"))
        assert f"{seconds_text(estimate)} s" == seconds, (arguments, way)
        assert size_text(estimate.trainer_gb) == here
        assert size_text(estimate.worker_gb) == worker


def test_the_model_of_relays_is_near_what_was_measured() -> None:
    measured = {row[0]: float(row[-1]) for row in newest("relays")}
    # Over a slow link, nothing else takes time.
    link = Job(nbytes=4e8, workers=2, nodes=2, gbit=0.01)
    direct = 'Sender("dist", …)'
    for way, relays in (("direct", 0), ("chain", 1), ("tree", 2)):
        name = direct if way == "direct" else 'Sender("chunked::dist", …), Relay(…)'
        job = Job(nbytes=4e8, workers=9, nodes=9, gbit=0.01, relays=relays)
        ratio = estimate_of(name, job).seconds / estimate_of(direct, link).seconds
        assert 0.7 < ratio / measured[way] < 1.3, way


@pytest.mark.parametrize("gbit", [1.0, 5.0])
def test_the_model_of_increments_is_near_what_was_measured(gbit: float) -> None:
    (row,) = (row for row in newest("increments") if row[0] == f"{gbit:g} Gb/s")
    _, mb, _, share, whole, increment = row[:6]
    job = Job(
        nbytes=float(mb) * 1e6,
        workers=2,
        nodes=2,
        gbit=gbit,
        cores=2,
        changed=float(share.rstrip("%")) / 100,
    )
    assert 0.5 < estimate_of('Sender("dist", …)', job).seconds / float(whole) < 2
    found = estimate_of('Sender("increments::dist", …)', job)
    assert 0.5 < found.seconds / float(increment) < 2


def test_shards_cost_what_each_rank_and_each_worker_carries() -> None:
    def sharded(ranks: int, worker_ranks: int, workers: int) -> Estimate:
        job = Job(nbytes=1e11, gbit=400.0, ranks=ranks, worker_ranks=worker_ranks, workers=workers)
        return estimate_of('Sender(Sharded("dist", …), …)', job)

    one = sharded(64, 16, 16)
    half = sharded(128, 32, 32)
    assert half.seconds == pytest.approx(one.seconds / 2, rel=0.02)
    assert half.trainer_gb == pytest.approx(one.trainer_gb / 2)
    # Copies of the model are sent by the ranks, each on its link, once that is what takes longest.
    copies = sharded(4, 16, 64)
    more = sharded(4, 16, 128)
    assert more.seconds - copies.seconds == pytest.approx(4 * 25 * 8 / 400, rel=0.02)
    gathered = estimate_of(
        'Sender("dist", gathered(model), …)',
        Job(nbytes=1e11, gbit=400.0, ranks=64, worker_ranks=16, workers=16),
    )
    assert gathered.seconds > 10 * one.most_seconds
