"""How Sphinx builds the site: `make docs`. The pages are plain Markdown, readable without it."""

import builtins
import os
import re
import shutil
import sys
import textwrap
import zipfile
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

sys.path.insert(0, str(Path(__file__).parent))  # for api_fields

project = "Engine"
copyright = "the authors of Engine"
extensions = ["myst_parser", "sphinx_copybutton", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "api_fields"]
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"  # `api_fields` lists the fields
autodoc_preserve_defaults = True  # defaults as the code has them, not as `repr` does
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


def plain_types(app, what, name, thing, options, signature, result):
    """Leave the objects of ``Annotated`` out of a signature, such as the options of a command."""
    return re.sub(r"\bAnnotated\[([^<>]+?), <[^<>]*>\]", r"\1", signature or "") or None, result


def short_values(app, domain, kind, content):
    """Leave out the value of a constant that is long or holds objects, which have no short text."""
    for value in list(content.parent.findall(addnodes.desc_annotation)):
        if (text := value.astext()).startswith(" = ") and (len(text) > 300 or re.search(r"<[\w.]+ ", text)):
            value.parent.remove(value)


EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NOT_IN_EXAMPLES = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")


def example_files(folder):
    """Return the files of an example in a fixed order, without what runs and tools leave there."""
    found = []
    for place, folders, files in os.walk(folder):
        left_out = NOT_IN_EXAMPLES(place, [*folders, *files])
        folders[:] = sorted({*folders} - left_out)
        found += [Path(place, name) for name in sorted({*files} - left_out)]
    return found


def example_links(app, tree):
    """Turn a link to the folder of an example into a link to its zip file."""
    page = app.env.docname
    links = [link for link in tree.findall(addnodes.pending_xref) if link["reftype"] == "myst"]
    for link in links:
        target = (Path(app.env.doc2path(page)).parent / link["reftarget"]).resolve()
        if target.parent == EXAMPLES and target.is_dir():
            uri = f"{'../' * page.count('/')}_static/examples/{target.name}.zip"
            shown = [*link.children, nodes.Text(" (zip)")]
            link.replace_self(addnodes.download_reference("", "", *shown, refuri=uri))


def builtin_types(app, tree):
    """Take the links from types of Python itself: `bytes` would link to an attribute of this name."""
    for link in list(tree.findall(addnodes.pending_xref)):
        if link.get("refdomain") == "py" and hasattr(builtins, link["reftarget"]):
            link.replace_self(link.children)


def write_examples(app, error):
    """Write a zip file of each example, with the paths of the repository; the same files make the same bytes."""
    out = Path(app.outdir, "_static", "examples")
    if error or app.builder.format != "html":
        return
    out.mkdir(parents=True, exist_ok=True)
    for folder in filter(Path.is_dir, EXAMPLES.iterdir()):
        with zipfile.ZipFile(out / f"{folder.name}.zip", "w", zipfile.ZIP_DEFLATED) as packed:
            for file in example_files(folder):
                entry = zipfile.ZipInfo(file.relative_to(EXAMPLES.parent).as_posix())  # dated 1980
                entry.external_attr = (0o755 if file.stat().st_mode & 0o100 else 0o644) << 16
                packed.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED)


def setup(app):
    app.connect("autodoc-process-docstring", markdown_tables)
    app.connect("autodoc-process-docstring", returns_field, priority=450)
    app.connect("autodoc-process-docstring", keep_attribute, priority=400)
    app.connect("autodoc-process-docstring", restore_attribute, priority=600)
    app.connect("autodoc-process-docstring", page_links, priority=700)
    app.connect("autodoc-process-signature", plain_types)
    app.connect("object-description-transform", short_values)
    app.connect("source-read", file_names)
    app.connect("doctree-read", example_links)
    app.connect("doctree-read", builtin_types)
    app.connect("build-finished", write_examples)
