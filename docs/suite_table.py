"""Write ``docs/reference/evaluation_suites.md`` from the suites of ``engine eval --suite``.

    python docs/suite_table.py            write the page (`make docs` does this first)
    python docs/suite_table.py --check    change nothing; exit 1 if the page is out of date

A test runs ``--check``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from page_parts import table

from engine_plugin_tools.suites import SUITES, Suite

PAGE = Path(__file__).parent / "reference" / "evaluation_suites.md"
NOTE = "<!-- Written by docs/suite_table.py from the code. Change the code, then run `make docs`. -->"

ABOUT = """\
`engine eval TARGET --suite NAME` measures a public set by a published protocol. This page says which protocol each suite follows, and where
its score is not comparable. [Evaluation](../evaluation.md#published-benchmarks-gsm8k-math-500-aime) shows the command."""

COMPARE = """\
## Where a score is not comparable

The result of each suite ends with the same lines: `differs` for what never is the same, `changed` for what this command changed."""

USE = """\
## Targets

- **A model folder or a hub name:** only the sampler is loaded, `hf` by default. `--set rollout.backend=vllm` chooses another.
- **A run file:** its `[model]` and `[rollout]`.
- **A run:** its newest checkpoint, or that of `--step N`. The trainer may be one that samples nothing, such as `sft`.

A suite replaces the rows, the rewards, `[eval]` and `[environment]` of a run file, so the score does not depend on them. It unsets the sampler's
`max_model_len`, which fits the run's own rows. Arguments of the chat template stay.

A response ends at the tokenizer's end token and at the end tokens of the model's `generation_config.json`, such as `<end_of_turn>` of Gemma. If
`rollout.stop_token_ids` is set, its ids replace those of `generation_config.json`.

## Rows without access to the hub

`--source FOLDER` reads a copy of the set's hub repository ([data sets](datasets.md)). For suites of several sets, the folder holds one folder for each data
source: `FOLDER/gsm8k`, `FOLDER/math500`.

## Change a suite

`--set eval.set.NAME.KEY=VALUE` changes one key, and the result says so. These are the usual ones:

| to | set |
|---|---|
| try it on a few prompts | `eval.set.gsm8k.max_prompts=50` |
| leave a model that reasons enough room | `eval.set.math500.max_response_tokens=32768` |
| switch off the reasoning of Qwen3 | `data.chat_template_kwargs.enable_thinking=false` |
| sample less often | `eval.set.aime24.samples_per_prompt=4` |
| add a system message | `data.system="You are a helpful assistant."` |

## Results

Each suite prints its accuracy with a 95% interval ([how sure it is](../evaluation.md#how-sure-it-is)), the mean response length, the share of responses that
were cut, and its time. `--json` prints all metrics with the protocol. `--out DIR` keeps the responses, one file for each suite, and the results in
`suites.json`. `engine compare DIR DIR` compares two such folders prompt by prompt.

## A run file that only evaluates

`trainer = "evaluate"` loads the sampler alone and measures `data.validation` and each `[[eval.set]]`. `engine train` refuses it.

```toml
trainer = "evaluate"

[model]
path = "model"

[[reward]]
name = "gsm8k"

[[eval.set]]
name = "test"
source = "gsm8k"
max_response_tokens = 1024
[eval.set.gsm8k]
limit = 200
```"""


def sampling(suite: Suite) -> str:
    """Return how responses are sampled: ``greedy``, or the keys that are set."""
    words = {key.replace("_", " "): value for key, value in suite.sampling.items() if key != "stop"}
    first = [] if "temperature" in words else ["greedy"]
    stop = " or ".join(f"`{text}`" for text in suite.sampling.get("stop", ()))
    last = [f"until {stop}"] if stop else []
    return ", ".join([*first, *(f"{key} {value}" for key, value in words.items()), *last])


def prompt(suite: Suite) -> str:
    """Return the form of the prompts, in words."""
    shots = f"{suite.shots}-shot, Question and Answer" if suite.shots else "zero-shot, the question"
    text = f"{shots}, then `{suite.suffix.strip()}`" if suite.suffix else shots
    return f"{text}; {'chat template' if suite.chat else 'plain text'}"


def page() -> str:
    """Return the page."""
    rows = [
        [
            f"`{name}`",
            f"`{suite.source}`",
            prompt(suite),
            sampling(suite),
            "; ".join(f"`{reward}`: {what}" for reward, what in suite.rewards.items()),
            f"[{suite.follows}]({suite.url})",
        ]
        for name, suite in SUITES.items()
    ]
    header = ["suite", "data source", "prompt", "sampling", "answer, the first decides", "protocol"]
    differs = [[f"`{name}`", "; ".join(suite.differs)] for name, suite in SUITES.items()]
    parts = [NOTE, "# Evaluation suites: GSM8K, MATH, MATH-500, AIME", ABOUT, table(header, rows)]
    return "\n\n".join([*parts, COMPARE, table(["suite", "differs"], differs), USE]) + "\n"


def main() -> int:
    """Write the page, or check it."""
    current = PAGE.exists() and PAGE.read_text("utf-8") == page()
    if "--check" in sys.argv:
        if not current:
            print(f"{PAGE} is out of date. Run: python docs/suite_table.py")
        return 0 if current else 1
    PAGE.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
