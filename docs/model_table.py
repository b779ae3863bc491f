"""Writes ``docs/reference/models.md``: which families of models each backend has run.

    python docs/model_table.py                    write the page and the plugins' `families.py`
    python docs/model_table.py --check            change nothing; exit 1 if one of them is out of date
    python docs/model_table.py --record [NAME]    run the tests of one column (of all: two hours), then write

The page shows recorded outcomes of ``tests/families``, which ``engine_plugin_testing.recorder`` writes into ``docs/reference/models.json``.
``engine validate`` prints those of a run's backends, from ``families.py`` of their plugins.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # page_parts, also where this file is run by its path

from page_parts import ROOT, recorded_page, run_recorded, table

from engine_plugin_testing.families import FAMILIES
from engine_plugin_testing.recorder import FAILED, PASSED, read
from engine_plugin_testing.suite import EMPTY, UNDECLARED, UNSUPPORTED

DOCS = Path(__file__).parent
PAGE, RECORD = DOCS / "reference" / "models.md", DOCS / "reference" / "models.json"
BACKENDS = {  # name -> folder of the plugin
    "torch": "torch",
    "fsdp": "fsdp",
    "deepspeed": "deepspeed",
    "megatron": "megatron",
    "hf": "hf_rollout",
    "vllm": "vllm_rollout",
}
FEATURES = ("compile", "sp")
NO = "no: "
ADAPTER = "test_an_adapter_alone_is_trained"
NAMES = {
    "llama": "Llama 2, 3",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_5_text": "Qwen3.5 (text)",
    "qwen3_moe": "Qwen3 MoE",
    "qwen3_next": "Qwen3-Next",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "ministral3": "Ministral 3",
    "mixtral": "Mixtral",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "phi3": "Phi-3, Phi-4",
    "smollm3": "SmolLM3",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "granite": "Granite 3",
    "granitemoehybrid": "Granite 4",
    "glm4": "GLM-4",
    "glm4_moe": "GLM-4.5",
    "falcon_h1": "Falcon-H1",
    "gpt_oss": "gpt-oss",
    "cohere2": "Command R7B, Command A",
    "deepseek_v3": "DeepSeek-V3, R1",
    "exaone4": "EXAONE 4",
    "lfm2": "LFM2",
    "hunyuan_v1_dense": "Hunyuan (dense)",
    "seed_oss": "Seed-OSS",
    "ernie4_5": "ERNIE 4.5 (dense)",
    "apertus": "Apertus",
}
INTRO = """<!-- Written by docs/model_table.py from docs/reference/models.json. Run `python docs/model_table.py --record`. -->

# Supported models

Any model of transformers with a causal language model class trains on `torch`, `fsdp` and `deepspeed`, and samples with `hf`. This table shows the families that
were run with each backend. For each family a tiny model with random weights was built from its own config class, with the family's sliding windows, soft caps,
experts and recurrent layers. **No real weights were run by us**, and nothing here says what a model learns.

The runs were on CPUs: `fsdp` and `deepspeed` on two ranks, `megatron` with `tp = 2`.

- A train engine passes if log-probs, entropies of long packs, gradients, export and exact resume equal an independent forward pass in float64.
- A sampler passes if its log-probs equal that forward pass for prompts of all sizes, also after an update in the middle of a response.
- `compile` is `actor.torch.compile = true`, on a CPU with inductor. It passes if no layer runs without compilation, and log-probs and gradients are equal.
- `sp` is `actor.fsdp.sp = 2`: two ranks share the tokens of each sequence.
- LoRA was run with `torch` and `fsdp`; the column shows `torch`.
- `engine validate` prints what this table says of a run's model and backends.
- On one H100, SmolLM3 and OLMo 2 also trained three steps of GRPO with `torch` and `vllm` in one process, compiled and with CUDA graphs."""

MODULE = '''"""Results of the backend `{backend}` with models of each type. Written by docs/model_table.py."""

FAMILIES = dict.fromkeys(
    """
{passed}
    """.split(),  # noqa: SIM905
    "",
){failed}
"""``model_type`` -> what differs or fails; empty if every test of the family passed."""
'''


def class_of(family: str) -> str:
    """Return the name of a family's suite."""
    return f"Test{family.title().replace('_', '')}"


def outcomes(record: Mapping[str, Mapping[str, Any]], backend: str, family: str) -> Mapping[str, str] | None:
    """Return the recorded outcomes of a column and a family by contract, or None if there are none."""
    found = record.get(f"tests/families/test_{backend}.py::{class_of(family)}")
    return found["contracts"] if found else None


def cell(found: Mapping[str, str] | None) -> str:
    """Return the text of a column and a family."""
    if found is None:
        return "not run"
    rest = {name: value for name, value in found.items() if name != ADAPTER}
    if FAILED in rest.values():
        return "**fails**"
    if reason := next((v for v in rest.values() if v.startswith(UNSUPPORTED)), ""):
        return NO + reason.removeprefix(UNSUPPORTED)
    right = (v == PASSED or UNDECLARED in v or EMPTY in v for v in rest.values())
    return "yes" if all(right) else "not run"


def adapter(found: Mapping[str, str] | None) -> str:
    """Return the text of LoRA on a family."""
    outcome = (found or {}).get(ADAPTER, "not run")
    return "yes" if outcome == PASSED else outcome.replace(UNSUPPORTED, NO)


def families(backend: str) -> str:
    """Return the text of ``families.py`` in a backend's plugin: what ``engine validate`` says of each family."""
    record, rows = read(RECORD), {}
    for family in FAMILIES:
        text = cell(outcomes(record, backend, family))
        if text == "yes" or text.startswith(NO):
            rows[family] = "" if text == "yes" else text.removeprefix(NO)
    passed = textwrap.fill(
        " ".join(name for name, text in rows.items() if not text),
        100,
        initial_indent=" " * 4,
        subsequent_indent=" " * 4,
    )
    differ = {name: text for name, text in rows.items() if text}
    failed = f" | {json.dumps(differ, indent=4)[:-2]},\n}}" if differ else ""
    return MODULE.format(backend=backend, passed=passed, failed=failed)


def page() -> str:
    """Return the page's text."""
    record = read(RECORD)
    rows = []
    for family in FAMILIES:
        cells = {name: cell(outcomes(record, name, family)) for name in (*BACKENDS, *FEATURES)}
        lora = adapter(outcomes(record, "torch", family))
        rows.append([NAMES[family], f"`{family}`", *cells.values(), lora])
    versions = {
        f"{name} {run['versions'][name]}" for run in record.values() for name in ("torch", "transformers")
    }
    days = sorted({run["date"] for run in record.values()})
    commits = ", ".join(f"`{commit}`" for commit in sorted({run["commit"] for run in record.values()}))
    ran = f"Run with {', '.join(sorted(versions))}" + (
        f", {days[0]} to {days[-1]}, commits {commits}." if days else "."
    )
    return (
        "\n\n".join(
            [
                INTRO,
                ran,
                table(
                    ["family", "`model_type`", *BACKENDS, *(f"`{name}`" for name in FEATURES), "LoRA"], rows
                ),
            ]
        )
        + "\n"
    )


def run(backends: list[str]) -> int:
    """Run the tests of these columns (of all if none is given); return pytest's exit code."""
    tests = [f"tests/families/test_{backend}.py" for backend in backends or (*BACKENDS, *FEATURES)]
    return run_recorded(RECORD, tests)


def written() -> dict[Path, Callable[[], str]]:
    """Return the files that are written from the record, each with a function that returns its text."""
    plugins = {
        ROOT / f"plugins/{folder}/src/engine_plugin_{folder}/families.py": partial(families, backend)
        for backend, folder in BACKENDS.items()
    }
    return {PAGE: page, **plugins}


if __name__ == "__main__":
    recorded_page(__doc__, written(), (*BACKENDS, *FEATURES), run)
