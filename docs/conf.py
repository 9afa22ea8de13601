"""The configuration of Sphinx for these pages; `make docs` runs it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

sys.path.insert(0, str(Path(__file__).parent))

import reference_pages

import sync_core

project = "sync-core"
author = "the sync-core maintainers"
release = version = sync_core.__version__
html_theme = "furo"
html_title = f"sync-core {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_favicon = "_static/favicon.svg"
html_search_scorer = str(Path(__file__).with_name("_static") / "scorer.js")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_design"]
myst_enable_extensions = ["colon_fence"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
# These have no highlighter, or too strict a one.
suppress_warnings = ["misc.highlighting_failure"]

# Docstrings write names in single backticks, whether or not a page describes them.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [("py:(obj|class|exc|meth|data|attr|func)", ".*")]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# Signatures too long for a line get one line for each argument.
maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# The groups of the arguments of `Collector`.
napoleon_custom_sections = [
    (group, "params_style")
    for group in ("Workers", "Weights", "Environments and batches", "Logs", "Other names")
]


SEARCH = tomllib.loads(Path(__file__).with_name("search.toml").read_text(encoding="utf-8"))


class SearchWords(SphinxTransform):
    """Puts the words of ``search.toml`` into the index, which the search ranks first."""

    default_priority = 500  # before Sphinx collects the entries of the index, at 850

    def apply(self, **kwargs: Any) -> None:
        """Add an entry for each word of this page, which leads to its top."""
        del kwargs
        section = next(iter(self.document.findall(nodes.section)), None)
        if section is not None:
            words = SEARCH.get(self.env.docname, ())
            # "main" ranks before the other results.
            entries = [("single", word, section["ids"][0], "main", None) for word in words]
            self.document.insert(0, addnodes.index(entries=entries))


def leave_out_decisions(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Keep the decisions, which are about the design, out of the search for users."""
    del app
    for name in env.found_docs:
        if name.startswith("decisions/"):
            env.metadata[name]["nosearch"] = True
    return []


def setup(app: Sphinx) -> None:
    """Write the pages that come from the code before Sphinx looks for pages."""
    reference_pages.write(Path(app.srcdir) / "reference" / "generated")
    app.add_transform(SearchWords)
    app.connect("env-updated", leave_out_decisions)
