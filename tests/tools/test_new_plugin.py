"""`sync-core new-plugin`: what it writes conforms, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

# All runs of pytester then share the modules, which it otherwise forgets after each.
import sync_testing
from sync_tools.main import main

pytest_plugins = ["pytester"]

KINDS = {
    "my-transport": [],
    "my-layer": ["--layer"],
    "my-group": ["--workers"],
}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one plugin of each kind, importable."""
    for name, options in KINDS.items():
        folder = tmp_path / name
        assert main(["new-plugin", name, *options, "--directory", str(folder)]) == 0
        monkeypatch.syspath_prepend(str(folder / "src"))
    return tmp_path


def test_what_is_written_is_clean(written: Path) -> None:
    ruff = [sys.executable, "-m", "ruff"]
    # As its author has it, without our own settings.
    subprocess.run([*ruff, "check", "."], check=True, cwd=written)
    subprocess.run([*ruff, "format", "--check", "."], check=True, cwd=written)
    files = {str(p.relative_to(written)) for p in written.rglob("*") if p.is_file()}
    assert {
        "my-transport/.github/workflows/test.yml",
        "my-transport/.gitignore",
        "my-transport/LICENSE",
        "my-transport/README.md",
        "my-transport/pyproject.toml",
        "my-transport/src/sync_plugin_my_transport/__init__.py",
        "my-transport/src/sync_plugin_my_transport/py.typed",
        "my-transport/tests/test_sync_plugin_my_transport.py",
    } <= files
    assert "the authors of sync-plugin-my-layer" in (written / "my-layer/LICENSE").read_text()


@pytest.mark.parametrize(
    ("options", "distribution"),
    [
        ([], "sync-plugin-redis"),
        (["--distribution", "weights-over-redis"], "weights-over-redis"),
    ],
)
def test_the_names_of_a_plugin(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    distribution: str,
) -> None:
    module = distribution.replace("-", "_")
    monkeypatch.chdir(tmp_path)
    assert main(["new-plugin", "redis", *options]) == 0
    assert f"cd {distribution}\n" in capsys.readouterr().out
    project = tomllib.loads((tmp_path / distribution / "pyproject.toml").read_text())["project"]
    assert project["name"] == distribution
    assert project["entry-points"] == {"sync.schemes": {"redis": f"{module}:Redis"}}
    assert project["license-files"] == ["LICENSE"]
    assert (tmp_path / distribution / "src" / module / "__init__.py").is_file()


def test_what_a_distribution_says_of_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"description": 'Says "hi", Ö.', "author": "Jo Ö", "url": "https://example.org/owl/"}
    options = [text for name, value in said.items() for text in (f"--{name}", value)]
    folder = str(tmp_path / "owl")
    assert main(["new-plugin", "owl", "--layer", "--directory", folder, *options]) == 0
    assert "complete pyproject.toml" not in capsys.readouterr().out
    project = tomllib.loads(Path(folder, "pyproject.toml").read_text())["project"]
    assert project["description"] == said["description"]
    assert project["authors"] == [{"name": said["author"]}]
    assert project["urls"]["Repository"] == "https://example.org/owl"
    assert {"sync-core", "sync-core-layer"} <= {*project["keywords"]}
    assert "Typing :: Typed" in project["classifiers"]
    minor = ".".join(sync_testing.__version__.split(".")[:2])
    assert f"sync-testing=={minor}.*" in project["optional-dependencies"]["test"]
    # Without them, their places are named.
    assert main(["new-plugin", "owl", "--directory", str(tmp_path / "bare"), *options[:2]]) == 0
    assert "(or give --author, --url here)" in capsys.readouterr().out


def files_of(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


@pytest.mark.parametrize("kind", [[], ["--layer"], ["--workers"]], ids=["scheme", "layer", "group"])
def test_a_copy_of_a_template_is_what_is_written_under_its_name(
    tmp_path: Path, kind: list[str]
) -> None:
    copy, direct = tmp_path / "copy", tmp_path / "direct"
    assert main(["new-plugin", "--template", *kind, "--directory", str(copy)]) == 0
    url = ("--url", "https://github.com/jo/sync-plugin-my-owl")
    assert (
        main(["new-plugin", "my-owl", "--template", *kind, *url, "--directory", str(direct)]) == 0
    )
    subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "."], check=True, cwd=copy)
    subprocess.run([sys.executable, "rename.py", "my-owl", "--owner", "jo"], check=True, cwd=copy)
    expected = files_of(direct)
    del expected["rename.py"]
    before, note = expected["README.md"].split("<!-- template -->")
    expected["README.md"] = before.removesuffix("\n") + note.split("template -->\n")[1]
    found = files_of(copy)
    # The name of a kind in a copy does not change with the plugin's.
    assert found == expected
    workflows = sorted(str(path) for path in (copy / ".github/workflows").iterdir())
    assert len(workflows) == 3
    schema = ("--builtin-schema", "vendor.github-workflows")
    subprocess.run([sys.executable, "-m", "check_jsonschema", *schema, *workflows], check=True)


@pytest.mark.parametrize(
    "arguments",
    [
        [
            "--scheme",
            "sync_plugin_my_transport:MyTransport",
            "--group",
            "thread",
            "-k",
            "not 5000 and not large",
        ],
        ["--layer", "sync_plugin_my_layer:MyLayer", "--tolerance", "1e-7"],
        ["--workers", "sync_plugin_my_group:MyGroup"],
    ],
    ids=["scheme", "layer", "workers"],
)
@pytest.mark.long
def test_what_is_written_conforms(
    written: Path, run_suite: Callable[..., pytest.RunResult], arguments: list[str]
) -> None:
    outcomes = run_suite(*arguments).parseoutcomes()
    assert outcomes["passed"] > 20
    assert not outcomes.keys() & {"failed", "error", "errors"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["My_Transport"], "not a name for a plugin: lower-case letters"),
        (["shm"], "sync-plugin-std has a scheme 'shm' already.* such as my-shm"),
        (["bf16", "--layer"], "sync-plugin-std has a layer 'bf16' already"),
        (["sync-plugin-owl"], "would be typed as the scheme.* new-plugin owl"),
        (["std"], "the module 'sync_plugin_std' exists already.* --distribution my-sync-plugin-s"),
        (["owl", "--distribution", "json"], "the module 'json' exists already"),
        (["owl", "--distribution", "torch"], "the module 'torch' exists already.* my-torch"),
        (["owl", "--distribution", "class"], "no module can be called 'class'"),
        (["owl", "--distribution", "Owl_1"], "'Owl_1' is not a name for a distribution: lower"),
        (["options"], "the class would be called 'Options'.* such as my-options"),
        (["directory-store"], "the class would be called 'DirectoryStore'"),
        (["path"], "the class would be called 'Path'"),
        (["file-not-found-error"], "the class would be called 'FileNotFoundError'"),
        (["scheme-conformance"], "the class would be called 'SchemeConformance'"),
        (["true"], "the class would be called 'True'"),
        (["update", "--layer"], "the class would be called 'Update'"),
        (["worker", "--workers"], "the class would be called 'Worker'"),
        (["launcher", "--workers"], "the class would be called 'Launcher'"),
        (["owl", "--template"], "has 'owl' replaced wherever it stands.* such as my-owl"),
        (["my-owl", "--template", "--distribution", "owl"], "leave out --distribution"),
        (["owl", "--url", "owl.org"], "--url must be an address.* got 'owl.org'"),
        (["owl", "--author", "a\nb"], "--author must be one line of text"),
    ],
)
def test_names_that_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-plugin", *arguments]) == 1
    error = capsys.readouterr().err
    assert all(part in error for part in message.split(".*"))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-plugin", "my-transport", "--directory", str(tmp_path)]) == 1
    assert "exists already; give another by --directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("where", "reason"), [("file/below", "Not a directory"), ("n" * 300, "File name too long")]
)
def test_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, reason: str
) -> None:
    (tmp_path / "file").touch()
    assert main(["new-plugin", "my-transport", "--directory", str(tmp_path / where)]) == 1
    error = capsys.readouterr().err
    assert f"{where} cannot be written: {reason}; give another by --directory\n" in error
