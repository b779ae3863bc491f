"""How Sphinx builds the site: `make docs`. The pages are plain Markdown, readable without it."""

import re
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for api_fields

project = "Engine"
copyright = "the authors of Engine"
extensions = ["myst_parser", "sphinx_copybutton", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "api_fields"]
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"  # `api_fields` lists the fields
default_role = "literal"  # single back ticks in a docstring
suppress_warnings = ["ref.python"]  # a class that a package exports has two addresses
exclude_patterns = ["_build"]
myst_heading_anchors = 4  # every heading can be linked as page.md#heading, and is checked
html_theme = "furo"
html_title = "Engine"
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_copy_source = False
html_show_sphinx = False
highlight_language = "text"
copybutton_prompt_text = "$ "  # only the lines after the prompt are copied from a console block
smartquotes = False  # --set stays --set


def file_names(app, page, source):
    """A block that names a file (```` ```python first/short.py ````) shows the name above itself."""
    source[0] = re.sub(
        r"^```(\w+) +(\S+)$", r"```{code-block} \1\n:caption: \2", source[0], flags=re.MULTILINE
    )


def markdown_tables(app, what, name, thing, options, lines):
    """Show a Markdown table of a docstring as it is written."""
    text = re.sub(
        r"(?m)^(\|.*\n)+",
        lambda table: f"::\n\n{re.sub(r'(?m)^', '    ', table[0])}\n",
        "\n".join(lines) + "\n",
    )
    lines[:] = text.splitlines()


KEPT: dict[str, list[str]] = {}  # the docs of attributes as they are written


def keep_attribute(app, what, name, thing, options, lines):
    """Keep the docs of an attribute from napoleon, which takes what is before a colon for its type."""
    if what in ("attribute", "data", "property"):
        KEPT[name] = list(lines)


def restore_attribute(app, what, name, thing, options, lines):
    """Give an attribute its docs back after napoleon."""
    lines[:] = KEPT.get(name, lines)


def returns_field(app, what, name, thing, options, lines):
    """Write a section of returned values as a field: napoleon takes what is before a colon for their type."""

    def field(section):
        body = textwrap.dedent(section[2]).strip().replace("\n", "\n    ")
        return f":{section[1].lower()}: {body}\n\n"

    text = re.sub(r"(?m)^(Returns|Yields):\n((?: {4}.*\n?|\n)+)", field, "\n".join(lines) + "\n")
    lines[:] = text.splitlines()


def page_links(app, what, name, thing, options, lines):
    """Link the pages that a docstring names as files."""
    lines[:] = [re.sub(r"(`*)docs/([\w/]+)\.md\1", r":doc:`/\2`", line) for line in lines]


def setup(app):
    app.connect("autodoc-process-docstring", markdown_tables)
    app.connect("autodoc-process-docstring", returns_field, priority=450)
    app.connect("autodoc-process-docstring", keep_attribute, priority=400)
    app.connect("autodoc-process-docstring", restore_attribute, priority=600)
    app.connect("autodoc-process-docstring", page_links, priority=700)
    app.connect("source-read", file_names)
