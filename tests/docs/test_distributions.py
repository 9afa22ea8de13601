"""The distributions are ready to be published; `make dist` builds them and tries each alone."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from packaging.requirements import Requirement

import sync_core

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(
    path.parent for path in [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]
)
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
VERSIONS = runpy.run_path(str(ROOT / ".ci" / "versions.py"))
# The one place of the project's address on a code host; empty as long as it has none.
HOME: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["sync-core"]["home"]
URLS = {
    "Repository": HOME,
    "Documentation": f"{HOME}/tree/main/docs",
    "Changelog": f"{HOME}/blob/main/CHANGELOG.md",
    "Issues": f"{HOME}/issues",
}
if not HOME:
    URLS = {}
# Addresses that look like ours: an account, a repository or a site. Of others, those of the project
# are no concern; OWNER stands in a template for the account of its user.
_ADDRESS = re.compile(
    r"(?:github\.com|githubusercontent\.com|gitlab\.com|codeberg\.org|bitbucket\.org|gitee\.com)[/:]"
    r"(?!OWNER/)(?:sync[\w.-]*|[\w.-]+/sync[-_][\w.-]*)"
    r"|\bsync[\w-]*\.(?:github|gitlab|readthedocs)\.io",
    re.IGNORECASE,
)
_PAGES = (".md", ".toml", ".py", ".txt", ".yml", ".html", ".cfg")
_of_each = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def project_of(folder: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project


@_of_each
def test_the_metadata_are_complete(folder: Path) -> None:
    project, core = project_of(folder), project_of(ROOT / "core")
    for field in ("classifiers", "license", "requires-python", "authors"):
        assert project[field] == core[field], field
    assert project.get("urls", {}) == URLS
    assert project["description"].endswith(".")
    assert project["keywords"]
    assert (folder / project["readme"]).read_text().startswith(f"# {project['name']}\n")
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert list(folder.glob("src/*/py.typed"))


def test_no_page_names_an_address_on_a_code_host_but_home() -> None:
    listed = subprocess.run(
        ("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\0")
    files = map(ROOT.joinpath, listed) if any(listed) else ROOT.glob("[!.]*/**/*")
    for path in (path for path in files if path.suffix in _PAGES and path.is_file()):
        if "tests" in path.relative_to(ROOT).parts:
            continue
        text = path.read_text(encoding="utf-8")
        if HOME:
            text = re.sub(rf"{re.escape(HOME)}(?![\w.-])", "", text)
        assert not _ADDRESS.findall(text), path


@_of_each
def test_the_version_is_in_one_place(folder: Path) -> None:
    project = project_of(folder)
    assert project["dynamic"] == ["version"]
    (package,) = folder.glob("src/*/__init__.py")
    # Each has its own, as it can be installed alone; a release gives all the same.
    assert f'\n__version__ = "{sync_core.__version__}"\n' in package.read_text()
    minor = ".".join(sync_core.__version__.split(".")[:2])
    ours = {project_of(other)["name"] for other in FOLDERS}
    for requirement in project["dependencies"]:
        name = requirement.partition("==")[0].partition("[")[0]
        assert name not in ours or requirement.endswith(f"=={minor}.*"), requirement


def test_every_distribution_is_installed_for_development() -> None:
    text = (ROOT / "requirements-dev.txt").read_text()
    for folder in FOLDERS:
        assert f"-e ./{folder.relative_to(ROOT)}" in text


def test_the_workflow_runs_what_exists() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    assert {*jobs["test"]["strategy"]["matrix"]["os"]} == {"ubuntu-latest", "macos-latest"}
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = {command.split()[1] for command in commands if command.startswith("make ")}
    assert targets == {
        "test",
        "test-long",
        "test-kit",
        "test-chains",
        "tests-alone",
        "test-versions",
        "dist",
    }
    columns = {column.name for column in VERSIONS["COLUMNS"]}
    assert {*jobs["versions"]["strategy"]["matrix"]["column"]} == columns
    assert jobs["publish"]["permissions"] == {"id-token": "write"}


@pytest.mark.parametrize("column", VERSIONS["COLUMNS"], ids=lambda column: column.name)
def test_the_oldest_version_that_is_tried_is_the_one_that_is_required(column: Any) -> None:
    oldest = set()
    for folder in FOLDERS:
        project = project_of(folder)
        required = [*project["dependencies"], f"Python{project['requires-python']}"]
        parsed = (Requirement(requirement) for requirement in required)
        oldest |= {str(each.specifier) for each in parsed if each.name == column.name}
    assert oldest == {f">={column.oldest}"}
    assert f"| {column.name} | {column.oldest} " in VERSIONS["PAGE"].read_text()
    assert all((ROOT / test).exists() for test in column.tests)


def test_the_workflow_is_valid() -> None:
    if actionlint := shutil.which("actionlint"):
        command = [actionlint, str(WORKFLOW)]
    else:
        schema = ("--builtin-schema", "vendor.github-workflows")
        command = [sys.executable, "-m", "check_jsonschema", *schema, str(WORKFLOW)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
