"""Write ``docs/reference/recipes.md`` from the comment blocks of the recipes.

    python docs/recipe_table.py            write what changed (`make docs` does this)
    python docs/recipe_table.py --check    change nothing; exit 1 if the page is out of date

A test runs ``--check``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # page_parts, also where this file is run by its path

from page_parts import table

from engine_plugin_tools.recipes import read_recipe, recipe_names

PAGE = Path(__file__).parent / "reference" / "recipes.md"
INTRO = """<!-- Written by docs/recipe_table.py from the recipes. Change a recipe, then run `make docs`. -->

# Recipes for published models

A recipe is a complete run file for a published model and a [public data set](datasets.md). `engine new run DIR --recipe NAME` writes it and prints the next
commands; `engine new run --list` prints all names. In the source repository the files are in the folder `recipes`. Each key that differs from its default has
a comment with the reason.

**None of them was run by us on real weights.** Tests validate each recipe on the published sizes of its model, and train two steps of it on a small model of the
same kind on a CPU, with the sampler `hf`. Memory is the peak of one GPU by the engine's [estimate](../performance.md#how-many-tokens-fit), if a micro-batch holds
one longest sequence; by default larger micro-batches use what is free. Published results are not results of the recipe: *differs* says what is not the same.

`engine train run.toml` starts every recipe, also those for several GPUs: it starts one process for each GPU itself (`processes` in `[runtime.torchrun]`),
without a `torchrun` command."""
COLUMNS = ("hardware", "memory", "minutes", "status")


def page() -> str:
    """Return the page: a table of all recipes, then a section for each."""
    recipes = [read_recipe(name) for name in recipe_names()]
    rows = [
        [f"[`{one.name}`](#{anchor(one.name)})", one.title, *(one.about[column] for column in COLUMNS)]
        for one in recipes
    ]
    parts = [INTRO, table(["recipe", "model, data set, method", *COLUMNS], rows)]
    for one in recipes:
        about = one.about
        sources = ", ".join(f"[{re.sub('https?://', '', url)}]({url})" for url in about["source"].split())
        lines = [
            f"- **What:** {about['what']}.",
            f"- **Published:** {about['published']}. Source: {sources}.",
            f"- **Differs:** {about['differs']}.",
            f"- **Install:** `{about['install']}`",
        ]
        parts += [f"## {one.name}", f"{one.title}.", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def anchor(name: str) -> str:
    """Return the address of the section with this name within the page."""
    return name.replace(".", "")


def main() -> int:
    """Write the page, or check it."""
    current = PAGE.exists() and PAGE.read_text("utf-8") == page()
    if "--check" in sys.argv:
        if not current:
            print(f"{PAGE} is out of date. Run: python docs/recipe_table.py")
        return 0 if current else 1
    PAGE.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
