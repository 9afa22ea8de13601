"""Build every distribution into ``dist/``, check it, and try each wheel alone.

    python .ci/dist.py                    # all of them
    python .ci/dist.py core plugins/std   # some

Nothing comes from the environment of the caller: the wheels are built from the sdists by tools in
an environment of their own, and each is installed into an empty one, with what it names. There its
entry points load and its public names exist; then what its README says is typed: the install line,
and the example, unless a comment before it says that it is "not a whole program". ``--tag v0.1.0``
also fails if that is not the version.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
# Wheels of this repository that a distribution needs are taken from here, before any index.
DIST = ROOT / "dist"
INSTALL = re.compile(r"^pip install (.+)$", re.MULTILINE)
EXAMPLE = re.compile(
    r'(?<!"not a whole program" --->\n)^```python\n(.*?)^```', re.MULTILINE | re.DOTALL
)
# An example of a README ends, or is ended.
DEADLINE_S = 300

#: Runs in the environment of a wheel: entry points load, and what is exported exists.
PROBE = """
import sys
from importlib import import_module
from importlib.metadata import distribution

found = distribution(sys.argv[1])
for entry in found.entry_points:
    if entry.group in ("sync.schemes", "sync.layers", "sync.workers"):
        entry.load()
for name in sys.argv[2:]:
    module = import_module(name)
    for public in module.__all__:
        getattr(module, public)
    assert module.__version__ == found.version, (module.__version__, found.version)
print("  loads", found.name, found.version)
"""


def main() -> None:
    """Build and check."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", help="distributions by folder; all without any")
    parser.add_argument("--tag", help="the tag that is released, such as v0.1.0")
    parser.add_argument("--build-only", action="store_true", help="install nothing")
    arguments = parser.parse_args()
    folders = [ROOT / folder for folder in arguments.folders] or distributions()
    # Those that others are tried with are built too.
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="sync-dist-") as scratch:
        tools = environment(Path(scratch, "tools"), "build", "twine")
        for folder in distributions():
            run(tools, "-m", "build", "--outdir", DIST, folder)
        files = sorted(DIST.iterdir())
        run(tools, "-m", "twine", "check", "--strict", *files)
    wheels = {name_of(wheel): wheel for wheel in DIST.glob("*.whl")}
    for wheel in wheels.values():
        check_contents(wheel, arguments.tag)
    if not arguments.build_only:
        for folder in folders:
            try_alone(folder, wheels)
    print(f"{len(files)} files in {DIST.relative_to(ROOT)}/ are ready to be published.")


def distributions() -> list[Path]:
    """Return the folders of all distributions."""
    found = [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]
    return sorted(
        (path.parent for path in found), key=lambda folder: (folder.name != "core", folder)
    )


def name_of(wheel: Path) -> str:
    """Return the normalized name of the distribution in a wheel."""
    return wheel.name.partition("-")[0].replace("_", "-")


def check_contents(wheel: Path, tag: str | None) -> None:
    """Check what a wheel must have besides its code."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(path).decode())
    for ending in ("py.typed", ".dist-info/licenses/LICENSE"):
        if not any(name.endswith(ending) for name in names):
            sys.exit(f"{wheel.name} has no {ending}")
    for field in ("Summary", "License-Expression", "Classifier", "Requires-Python"):
        if field not in metadata:
            sys.exit(f"{wheel.name} has no {field} in its metadata")
    if tag is not None and tag != f"v{metadata['Version']}":
        sys.exit(f"{wheel.name} has version {metadata['Version']}, and the tag is {tag}")


def try_alone(folder: Path, wheels: dict[str, Path]) -> None:
    """Install one wheel with what it names, and use it."""
    packages = [path.parent.name for path in folder.glob("src/*/__init__.py")]
    (name,) = (name for name in wheels if name_of_folder(folder) == name)
    readme = (folder / "README.md").read_text(encoding="utf-8")
    print(f"{name}:", flush=True)
    with tempfile.TemporaryDirectory(prefix="sync-dist-") as scratch:
        python = environment(Path(scratch, "venv"), wheels[name])
        run(python, "-c", PROBE, name, *packages, folder=scratch)
        for line in INSTALL.findall(readme):
            install(python, *shlex.split(line, comments=True))
        for number, example in enumerate(EXAMPLE.findall(readme), 1):
            # A file, since workers in other processes import what started them.
            script = Path(scratch, f"example_{number}.py")
            script.write_text(example, encoding="utf-8")
            run(python, script.name, folder=scratch)


def name_of_folder(folder: Path) -> str:
    """Return the name that a folder's pyproject.toml gives to its distribution."""
    found = re.search(r'^name = "(.+)"$', (folder / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None, f"{folder} has no name"
    return found[1]


def environment(folder: Path, *requirements: str | Path) -> Path:
    """Make an environment with these requirements and nothing else; return its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install(python, *requirements)
    return python


def install(python: Path, *requirements: str | Path) -> None:
    """Install into an environment, from ``dist/`` before any index."""
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(python, *pip, "--find-links", DIST, "--constraint", CONSTRAINTS, *requirements)


def run(python: Path, *arguments: str | Path, folder: str | Path = ROOT) -> None:
    """Run an interpreter that sees nothing of the caller's packages; end with it if it fails."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [str(part) for part in (python, *arguments)]
    deadline = DEADLINE_S if folder != ROOT else None
    done = subprocess.run(command, cwd=folder, env=kept, check=False, timeout=deadline)
    if done.returncode:
        sys.exit(f"failed with code {done.returncode}: {' '.join(command[:4])} …")


if __name__ == "__main__":
    main()
