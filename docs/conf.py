# SPDX-License-Identifier: Apache-2.0
"""Sphinx builds these pages; scripts/docs.sh runs Doxygen first."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "moec"
author = "the moec authors"
copyright = "the moec authors; Apache 2.0"
release = version = "0.1.0"
extensions = ["myst_parser", "breathe", "sphinx.ext.autodoc", "made", "python_texts"]
exclude_patterns = ["_ext"]
html_theme = "furo"
html_title = "moec"
html_static_path = ["_static"]
html_css_files = ["moec.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "friendly", "monokai"
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # a part may begin with a heading of a lower level

breathe_projects = {"moec": os.environ["MOEC_DOXYGEN_XML"]}
breathe_default_project = "moec"
breathe_domain_by_extension = {"h": "c"}
breathe_show_include = False

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": True}
add_module_names = False
