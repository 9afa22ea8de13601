"""The configuration of Sphinx for these pages; `make docs` runs it."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

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
# An argument is a line of its own where they do not fit into one.
maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def setup(app: Sphinx) -> None:
    """Write the pages that come from the code before Sphinx looks for pages."""
    reference_pages.write(Path(app.srcdir) / "reference" / "generated")
