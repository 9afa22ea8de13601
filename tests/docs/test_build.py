"""The pages build with warnings as errors, load nothing from elsewhere, and have every member."""

from __future__ import annotations

import html
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
# The files that a browser loads to show a page, without links to other pages.
_LOADED = re.compile(
    r'<(?:script|img|iframe|source)\b[^>]*\ssrc="(.*?)"|<link\b[^>]*\shref="(.*?)"'
)

# Asks the search of Sphinx, whose results come in reverse.
_SEARCH = """<script>
const found = {};
for (const word of @WORDS@) {
    const results = Search._performSearch(...Search._parseQuery(word));
    found[word] = results.reverse().slice(0, 3).map(result => result[0]);
}
document.title = "found " + JSON.stringify(found);
</script></body>"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Into an empty folder: of pages that it has built before, Sphinx does not warn again.
    folder = tmp_path_factory.mktemp("pages")
    options = ("-W", "--keep-going", "-q")
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_pages_build(built: Path) -> None:
    assert (built / "index.html").exists()


def test_no_page_loads_anything_from_elsewhere(built: Path) -> None:
    for page in built.rglob("*.html"):
        for urls in _LOADED.findall(page.read_text(encoding="utf-8")):
            assert not "".join(urls).startswith(("http", "//")), f"{page.name} loads {urls}"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
@pytest.mark.parametrize("page", ["index.html", "how-to/choose-a-scheme.html"])
def test_a_page_is_as_wide_as_a_phone(built: Path, tmp_path: Path, page: str) -> None:
    """Wide tables and code scroll within the page, which does not."""
    measured = (built / page).with_name("measured.html")
    script = "document.title = `wide ${document.documentElement.scrollWidth} ${innerWidth}`"
    text = (built / page).read_text(encoding="utf-8")
    measured.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
    done = _chromium(tmp_path, "--window-size=500,900", "--dump-dom", measured.as_uri())
    found = re.search(r"<title>wide (\d+) (\d+)</title>", done)
    assert found is not None, done[:2000]
    assert int(found[1]) <= int(found[2])


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
def test_the_search_finds_what_readers_type(built: Path, tmp_path: Path) -> None:
    """The pages' own search, in a browser, has the page of each word among the first three."""
    pages = tomllib.loads((ROOT / "docs" / "search.toml").read_text(encoding="utf-8"))
    words = sorted({word for found in pages.values() for word in found})
    found = _search(built, tmp_path, words)
    missed = [
        f"{word!r} finds {found[word]}, and not {page}"
        for page, asked in pages.items()
        for word in asked
        if page not in found[word]
    ]
    assert not missed, "\n".join(missed)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
def test_the_search_ranks_a_title_first(built: Path, tmp_path: Path) -> None:
    pages = {
        page.relative_to(ROOT / "docs").with_suffix("").as_posix(): page
        for folder in ("start", "tutorials", "how-to", "authors")
        for page in (ROOT / "docs" / folder).glob("*.md")
    }
    titles = {
        name: page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").replace("`", "")
        for name, page in pages.items()
    }
    found = _search(built, tmp_path, sorted(titles.values()))
    missed = [
        f"{title!r} finds {found[title]}, and not {name} first"
        for name, title in titles.items()
        if found[title][:1] != [name]
    ]
    assert not missed, "\n".join(missed)


def test_the_sidebar_has_the_groups_of_the_page_that_leads_to_pages() -> None:
    index, groups = (
        (ROOT / "docs" / page).read_text(encoding="utf-8")
        for page in ("index.md", "start/which-page.md")
    )
    captions = re.findall(r"^:caption: (.+)$", index, re.MULTILINE)
    assert captions == [*re.findall(r"^## (.+)$", groups, re.MULTILINE), "Reference"]


def test_every_public_member_has_an_entry(built: Path) -> None:
    inventory = (built / "objects.inv").read_bytes().split(b"\n", 4)[4]
    entries = {line.split(" ")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        reference = importlib.import_module("reference_pages")
    finally:
        sys.path.pop(0)
    wanted = {
        f"{module}.{name}{member}"
        for module in reference.PUBLIC
        if "testing" not in module  # most members are cases of the suites
        for name, found in _classes(module)
        for member in ("", *(f".{each}" for each in reference.members_of(found)))
    }
    assert len(wanted) > 200
    assert not wanted - entries


def _search(built: Path, folder: Path, words: list[str]) -> dict[str, list[str]]:
    """Return the first three pages that the pages' own search finds for each of these words."""
    script = _SEARCH.replace("@WORDS@", json.dumps(words))
    page = (built / "search.html").read_text(encoding="utf-8").replace("</body>", script)
    (built / "searched.html").write_text(page, encoding="utf-8")
    done = _chromium(folder, "--dump-dom", (built / "searched.html").as_uri())
    printed = re.search(r"<title>found (.*?)</title>", done)
    assert printed is not None, done[:2000]
    found: dict[str, list[str]] = json.loads(html.unescape(printed[1]))
    return found


def _chromium(folder: Path, *arguments: str) -> str:
    """Run a browser without a window, with its profile in a folder; return its output."""
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'c'}")
    command = [str(CHROMIUM), *options, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return done.stdout


def _classes(module: str) -> Iterator[tuple[str, type]]:
    package = importlib.import_module(module)
    for name in package.__all__:
        found = getattr(package, name)
        # Errors are described where they are defined.
        if inspect.isclass(found) and found.__module__ == "sync_core.errors":
            if module == "sync_core.errors":
                yield name, found
        elif inspect.isclass(found):
            yield name, found
