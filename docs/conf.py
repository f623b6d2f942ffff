"""How Sphinx builds the site: `nox -s docs`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "fxopt"
author = "The fxopt developers"
project_copyright = author

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "site_pages.sphinx_extension",
]
exclude_patterns = ["examples", "template", "site_pages"]
html_theme = "furo"
html_title = "fxopt"
html_static_path = ["_static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# A docstring's single backticks hold code.
default_role = "code"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Cost", "Source"]  # of passes
