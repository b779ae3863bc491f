"""Writes ``docs/reference/datasets.md``: the public data sets that are data sources.

    python docs/dataset_table.py            write the page
    python docs/dataset_table.py --check    change nothing; exit 1 if it is out of date

The page shows ``engine_plugin_trainers.datasets.table``. A test runs the check.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # page_parts, also where this file is run by its path

from page_parts import table

from engine_plugin_trainers.datasets.table import (
    SETS,
    DatasetOptions,
    PairOptions,
    PublicSet,
    QuestionOptions,
)

PAGE = Path(__file__).parent / "reference" / "datasets.md"
SHORT = 12  # characters of a commit in a link's text
INTRO = r"""<!-- Written by docs/dataset_table.py from the code. Change the code, then run `make docs`. -->

# Public data sets

These names work as `source` in `[data]` ([how](../data.md#public-data-sets)). A set is read from the Hugging Face hub at the commit below, with the library
`datasets`. `engine-core-rl[standard]` installs the library; without it, run `pip install 'engine-plugin-trainers[datasets]'`. The license is the one on the
data set card at that commit. Read the card before you publish a model."""

ROWS = """## Rows

Rows become the columns of [plain layouts](../data.md#layouts). Other columns stay, so rewards receive them.

- **Questions** become `prompt`, with the set's suffix, and `answer`. A solution becomes `response`, for SFT and for worked examples. The solutions of GSM8K
  keep their calculator notes, such as `<<48/2=24>>`.
- **Pairs** become `prompt`, `chosen` and `rejected`, as messages. Pairs that the trainers refuse are left out: with equal responses, with an empty one, or with
  conversations that differ before the last turn. So are questions without an answer. The log counts them.
- **Conversations** stay in the column `messages`.

A prompt of text becomes a user message with `chat_template = true`. For a base model, leave that out, and set a suffix that separates question and response,
such as `suffix = "\\nAnswer: "`.

A set without rows for validation needs files in `validation`, or an `[[eval.set]]`. A set without rows for training is for evaluation: write its file with
`engine data NAME OUT`."""

OPTIONS = """## Options

The options are in `[data.NAME]`:

```toml gsm8k.toml
[data]
source = "gsm8k"

[data.gsm8k]
folder = "mirrors/gsm8k"   # relative to this file
shots = 4
suffix = ""
```"""

OFFLINE = """## Without access to the hub

Copy the repository on a machine with access, and name the folder on the other one. Nothing is downloaded then, and the log names
the commit that `hf` recorded in the folder:

```sh
hf download openai/gsm8k --repo-type dataset --revision 740312add88f781978c0658806c59bc2815b9866 --local-dir mirrors/gsm8k
```

Or write the rows once, and name the files:

```bash
engine data gsm8k gsm8k-rows --source mirrors/gsm8k
```

Rows are read from the memory-mapped files of the library's cache (`HF_DATASETS_CACHE`), in which changed files of a folder are noticed. Checkpoints store
the hash of all rows, so a resumed run warns if they changed."""

HUB = """## What is read from the hub

The library downloads all splits of a configuration. A folder must have these splits and columns:"""


def page() -> str:
    """Return the page's text."""
    header = [
        "name",
        "content",
        "training rows",
        "validation rows",
        "`trainer`",
        "reward",
        "license",
        "commit",
    ]
    sets = table(header, [overview(name, chosen) for name, chosen in SETS.items()])
    header = ["name", "configuration", "training split", "validation split", "columns", "suffix"]
    hub = table(header, [repository(name, chosen) for name, chosen in SETS.items()])
    models = {
        DatasetOptions: "every set",
        QuestionOptions: "sets with a reward",
        PairOptions: "sets of pairs",
    }
    options = table(
        ["option", "sets", "what it does"], [row for model, of in models.items() for row in keys(model, of)]
    )
    parts = [INTRO, sets, ROWS, OPTIONS, options, OFFLINE, HUB, hub]
    return "\n\n".join(parts) + "\n"


def overview(name: str, chosen: PublicSet) -> list[str]:
    """Return the cells of a set in the first table."""
    counts = [
        f"{chosen.rows[split]:,}" if split in chosen.rows else "none" for split in ("train", "validation")
    ]
    commit = f"[`{chosen.revision[:SHORT]}`]({chosen.url}/tree/{chosen.revision})"
    trainers = ", ".join(f"`{trainer}`" for trainer in chosen.trainers) or "evaluation only"
    reward = f"`{chosen.reward}`" if chosen.reward else ""
    cells = [chosen.content, *counts, trainers, reward, chosen.license, commit]
    return [f"[`{name}`]({chosen.url})", *cells]


def repository(name: str, chosen: PublicSet) -> list[str]:
    """Return the cells of a set in the last table."""
    splits = [f"`{split}`" if split else "none" for split in (chosen.train, chosen.validation)]
    columns = ", ".join(f"`{column}` ({kind})" for column, kind in chosen.columns.items())
    return [
        f"`{name}`",
        f"`{chosen.config}`" if chosen.config else "",
        *splits,
        columns,
        f"`{chosen.suffix}`" if chosen.suffix else "",
    ]


def keys(model: type[DatasetOptions], of: str) -> list[list[str]]:
    """Return the cells of the options that a model adds to those of every set."""
    inherited = {} if model is DatasetOptions else DatasetOptions.model_fields
    return [
        [f"`{name}`", of, str(field.description).replace("``", "`")]
        for name, field in model.model_fields.items()
        if name not in inherited
    ]


if __name__ == "__main__":
    made = page()
    if "--check" not in sys.argv:
        PAGE.write_text(made, "utf-8")
    elif not PAGE.is_file() or PAGE.read_text("utf-8") != made:
        sys.exit("docs/reference/datasets.md is out of date. Run: python docs/dataset_table.py")
