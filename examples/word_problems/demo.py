"""The main job, start to end: data and a random model, a warm start, GRPO, and what came of it.

    make demo                                     (or: python examples/word_problems/demo.py)

Each step is a command that you could type; the script prints it and runs it in this process.
Everything lies below ``demo/`` afterwards, the report in ``demo/report.html``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from prepare import prepare

MARKER = ".made_by_the_demo"


def engine(*arguments: str) -> None:
    """Print an ``engine`` command and run it here; a failure ends the demo with its exit code."""
    from engine_core.cli.main import main

    shown = [a.replace(f"{ROOT}/", "") for a in arguments]
    print(f"\n$ engine {' '.join(shown)}", flush=True)
    code = main(list(arguments))
    if code:
        raise SystemExit(code)


def steps(number: int | None) -> list[str]:
    """Arguments that set the length of a run; none for the file's own."""
    return [] if number is None else ["--steps", str(number)]


def fresh(folder: Path) -> None:
    """An empty demo folder; one that the demo did not make is left alone."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARKER).exists():
            raise SystemExit(f"{folder} exists and was not made by the demo. Move it away or give --folder.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()


def accuracies(run: Path) -> list[float]:
    """Held-out accuracies of a run, in order of steps."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]


def samples(run: Path, which: int, count: int = 3) -> list[tuple[str, str, float]]:
    """(question, response, reward) of the first held-out problems in the first or last evaluation."""
    from engine_core.runs.rollout_files import read_rollouts

    file = sorted((run / "rollouts" / "eval").glob("*.parquet"))[which]
    return [(r.prompt.text.strip(), r.text, r.reward) for r in read_rollouts(file)[:count]]


def show(title: str, found: list[tuple[str, str, float]]) -> None:
    """Print sample completions."""
    print(f"\n{title}")
    for question, response, reward in found:
        print(f"  {question}\n    {'right' if reward > 0 else 'wrong'}: {response}")


def answer(folder: Path, question: str) -> str:
    """What the exported model says, through transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(question + "\n", return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=40, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Run the demo; its last line holds the held-out accuracy before and after."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "demo", help="where everything goes")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and sampling")
    parser.add_argument("--sft-steps", type=int, help="steps of the warm start (default: those of sft.toml)")
    parser.add_argument("--steps", type=int, help="GRPO steps (default: those of grpo.toml)")
    parser.add_argument("--control", action="store_true", help="shuffle the rewards: must not learn")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    start = time.monotonic()
    fresh(folder)
    print(f"Making data, tokenizer and a random model in {folder.name}/", flush=True)
    prepare(folder, arguments.seed)
    common = ["--set", f'run.dir="{folder}/runs"', "--set", f"run.seed={arguments.seed}"]
    model = ["--set", f'model.path="{folder}/model"', "--set", f"model.seed={arguments.seed}"]
    sft = ["--set", f'data.train="{folder}/data/sft.jsonl"', *steps(arguments.sft_steps)]
    engine("train", str(HERE / "sft.toml"), *common, *model, *sft)
    engine("export", str(folder / "runs" / "sft"), str(folder / "sft"))
    name = "control" if arguments.control else "grpo"
    data = [
        "--set",
        f'data.train="{folder}/data/train.jsonl"',
        "--set",
        f'data.validation="{folder}/data/heldout.jsonl"',
    ]
    model = ["--set", f'model.path="{folder}/sft"']
    engine("train", str(HERE / f"{name}.toml"), *common, *model, *data, *steps(arguments.steps))
    run = folder / "runs" / name
    engine("export", str(run), str(folder / "trained"))
    engine("report", str(run))
    finish(folder, run, time.monotonic() - start)


def finish(folder: Path, run: Path, seconds: float) -> None:
    """Samples, an answer through transformers, where things lie, and the last line."""
    shutil.copy(run / "report.html", folder / "report.html")
    shutil.copy(run / "curves.png", folder / "curves.png")
    show("Held-out problems before:", samples(run, 0))
    show("... and after:", samples(run, -1))
    question = "Ana has 7 books. She finds 5 more, then gives 4 to Leo. How many books does Ana have now?"
    print(
        f"\nThe exported model, loaded by transformers, is asked:\n  {question}\n    {answer(folder / 'trained', question)}"
    )
    print(
        f"\nReport: {folder / 'report.html'}   curves: {folder / 'curves.png'}   model: {folder / 'trained'}"
    )
    print(f"Wall time: {seconds:.0f} s")
    found = accuracies(run)
    print(f"held-out accuracy {found[0]:.2f} -> {found[-1]:.2f}")


if __name__ == "__main__":
    main()
