"""Write the table of docs/plugins.md from the metadata of installed distributions.

    python docs/plugin_table.py                  # the table, with the results that are recorded
    python docs/plugin_table.py --run            # run the suite over each plugin, half an hour
    python docs/plugin_table.py --run shm bf16   # over these

A distribution is listed by its name, which begins with ``sync-plugin-``. Results come from
docs/conformance.json, a report of the suite in which each run takes the place of the one before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from importlib.metadata import distributions
from pathlib import Path

from sync_testing.report import PluginResult, read_report
from sync_tools.commands.listing import Listed, listed

HERE = Path(__file__).parent
PAGE = HERE / "plugins.md"
RESULTS = HERE / "conformance.json"
PREFIX = "sync-plugin-"
BEGIN, END = "<!--- plugins --->\n", "<!--- end of plugins --->"
KINDS = {"schemes": "scheme", "layers": "layer", "worker groups": "worker group"}
GROUPS = {"scheme": "--scheme", "layer": "--layer", "worker group": "--workers"}
# Arguments of the suite for plugins that need more than their names.
ARGUMENTS = {
    ("layer", "bf16"): ("--tolerance", "0.004"),
    ("layer", "fp16"): ("--tolerance", "0.001"),
    ("scheme", "file"): ("--option", "lost_after=3.0"),
    ("scheme", "ray"): ("--group", "ray"),
}
# Without arguments these do nothing; or they need other models at the two ends, or a process group.
OWN_TESTS = {
    *(("layer", name) for name in ("fuse", "rename", "split", "stack", "transpose", "unstack")),
    *(("layer", name) for name in ("fp8", "interval", "keep", "lora")),
    *(("scheme", name) for name in ("none", "rpc", "sharded")),
    ("worker group", "rpc"),
}


def rows(names: Collection[str] | None = None) -> Iterator[tuple[str, ...]]:
    """Yield the rows: name, kind, distribution, capabilities, result of the suite.

    Args:
        names: the distributions; None for all that are installed.
    """
    _, found = read_report(RESULTS)
    results = {(result.kind, result.name.partition("::")[0]): result for result in found}
    plugins = [plugin for plugin in listed() if plugin.kind in KINDS]
    for distribution, summary in _distributions(names):
        own = [plugin for plugin in plugins if plugin.distribution == distribution]
        for plugin in own:
            kind = KINDS[plugin.kind]
            able = ", ".join(f"`{name}`" for name in plugin.capabilities)
            yield (
                f"`{plugin.name}::`" if plugin.wraps else f"`{plugin.name}`",
                kind,
                f"`{distribution}`",
                able or "none",
                _result(kind, plugin, results.get((kind, plugin.name))),
            )
        if not own:
            yield "", "integration", f"`{distribution}`", summary, "own tests"


def table(names: Collection[str] | None = None) -> str:
    """Return the table as Markdown."""
    head = ("name", "kind", "distribution", "capabilities", "suite")
    lines = [head, ("---",) * len(head), *rows(names)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_table(text: str, names: Collection[str] | None = None) -> str:
    """Return the page's text with the table in its place."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{table(names)}{END}{rest.partition(END)[2]}"


def run(wanted: Collection[str]) -> None:
    """Run the suite over plugins, and put the results into the file."""
    for plugin in listed():
        kind = KINDS.get(plugin.kind)
        chosen = not wanted or plugin.name in wanted
        of_ours = (plugin.distribution or "").startswith(PREFIX)
        if kind is None or not chosen or not of_ours or (kind, plugin.name) in OWN_TESTS:
            continue
        name = f"{plugin.name}::shm" if plugin.wraps else plugin.name
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "conformance.json")
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs"]
            chosen_plugin = (GROUPS[kind], name, *ARGUMENTS.get((kind, plugin.name), ()))
            report = ("sync_testing.suite", *chosen_plugin, "--report", str(path))
            subprocess.run([*command, *report], check=False, cwd=folder)
            _record(json.loads(path.read_text(encoding="utf-8")))


def _record(report: dict[str, object]) -> None:
    """Put the plugins of a report into the file, instead of earlier results."""
    plugins: list[dict[str, str]] = report["plugins"]  # type: ignore[assignment]
    if RESULTS.exists():
        earlier = json.loads(RESULTS.read_text(encoding="utf-8"))["plugins"]
        new = {(each["kind"], each["name"]) for each in plugins}
        plugins += [each for each in earlier if (each["kind"], each["name"]) not in new]
    plugins.sort(key=lambda each: (each["kind"], each["name"]))
    RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _distributions(names: Collection[str] | None) -> list[tuple[str, str]]:
    found = {each.metadata["Name"]: each for each in distributions()}
    return sorted(
        (name, found[name].metadata["Summary"])
        for name in found
        if name.startswith(PREFIX) and (names is None or name in names)
    )


def _result(kind: str, plugin: Listed, result: PluginResult | None) -> str:
    if (kind, plugin.name) in OWN_TESTS:
        return "own tests"
    if result is None:
        return "not run"
    counts = result.counts
    done = f"{counts['passed']} passed" if result.complete else "partial"
    text = f"{counts['failed']} failed" if result.failed else done
    if counts["skipped"]:
        text += f", {counts['skipped']} skipped"
    return f"{text} (`{result.name}`)" if plugin.wraps else text


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", nargs="*", metavar="NAME", help="run the suite first")
    arguments = parser.parse_args()
    if arguments.run is not None:
        run(arguments.run)
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
