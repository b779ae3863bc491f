"""How Sphinx builds the site: `make docs`. The pages are plain Markdown, readable without it."""

project = "Engine"
copyright = "the authors of Engine"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4  # every heading can be linked as page.md#heading, and is checked
html_theme = "furo"
html_title = "Engine"
html_static_path = ["static"]
html_css_files = ["wide_tables.css"]
html_copy_source = False
html_show_sphinx = False
highlight_language = "text"
suppress_warnings = ["misc.highlighting_failure"]
