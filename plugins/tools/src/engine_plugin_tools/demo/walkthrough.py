"""The steps of ``engine demo``, each an ``engine`` command that is printed and run in this process."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

from engine_core.cli.main import main
from engine_core.errors import EnvironmentProblem
from engine_core.runs.rollout_files import read_rollouts
from engine_plugin_tools.demo.prepare import prepare
from engine_plugin_tools.scaffold import new_demo

MARKER = ".made_by_the_demo"
QUESTION = "Ana has 7 books. She finds 5 more, then gives 4 to Leo. How many books does Ana have now?"


def engine(*arguments: str) -> None:
    """Print an ``engine`` command and run it.

    Raises:
        SystemExit: the command has failed, with its exit code.
    """
    print(f"\n$ engine {' '.join(arguments)}", flush=True)
    if code := main(list(arguments)):
        raise SystemExit(code)


def steps(number: int | None) -> list[str]:
    """Return the arguments that set the length of a run; none for the length in its file."""
    return [] if number is None else ["--steps", str(number)]


def fresh(folder: Path) -> None:
    """Make ``folder`` empty.

    Raises:
        EnvironmentProblem: it holds files of something else; they are left alone.
    """
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARKER).exists():
            raise EnvironmentProblem(
                f"'{folder}' exists and was not made by the demo. Move it away or choose another with --folder."
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()


def accuracies(run: Path) -> list[float]:
    """Return the held-out accuracies of a run, in order of steps."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]


def walk(folder: Path, seed: int, sft_steps: int | None, rl_steps: int | None, control: bool) -> None:
    """Run the demo in ``folder``; the last line printed holds the held-out accuracy before and after GRPO.

    Args:
        folder: gets data, models, run files, runs and a report.
        seed: of data, weights and sampling.
        sft_steps: of the warm start; default: those of ``sft.toml``.
        rl_steps: of GRPO; default: those of ``grpo.toml``.
        control: shuffle the rewards among the prompts, after which nothing must be learned.
    """
    start = time.monotonic()
    fresh(folder)
    print(f"Making data, tokenizer and a random model in {folder}", flush=True)
    prepare(folder, seed)
    new_demo(folder)
    seeds = [word for key in ("run", "model") for word in ("--set", f"{key}.seed={seed}")] if seed else []
    name = "control" if control else "grpo"
    run = folder / "runs" / name
    engine("train", str(folder / "sft.toml"), *seeds, *steps(sft_steps))
    engine("export", str(folder / "runs" / "sft"), str(folder / "sft"))
    engine("train", str(folder / f"{name}.toml"), *seeds, *steps(rl_steps))
    engine("export", str(run), str(folder / "trained"))
    engine("report", str(run))
    finish(folder, run, time.monotonic() - start)


def finish(folder: Path, run: Path, seconds: float) -> None:
    """Print samples, an answer through transformers, the paths of the results, and the last line."""
    shutil.copy(run / "report.html", folder / "report.html")
    shutil.copy(run / "curves.png", folder / "curves.png")
    show_samples("Held-out problems before:", run, 0)
    show_samples("... and after:", run, -1)
    print(f"\nThe exported model, loaded by transformers, is asked:\n  {QUESTION}")
    print(f"    {answer(folder / 'trained', QUESTION)}")
    places = {
        "Report": "report.html",
        "curves": "curves.png",
        "model": "trained",
        "run file": f"{run.name}.toml",
    }
    print("\n" + "   ".join(f"{what}: {folder / path}" for what, path in places.items()))
    print(f"Wall time: {seconds:.0f} s")
    found = accuracies(run)
    print(f"held-out accuracy {found[0]:.2f} -> {found[-1]:.2f}")


def show_samples(title: str, run: Path, which: int, count: int = 3) -> None:
    """Print the first held-out problems and their responses in evaluation number ``which``."""
    print(f"\n{title}")
    file = sorted((run / "rollouts" / "eval").glob("*.parquet"))[which]
    for rollout in read_rollouts(file)[:count]:
        verdict = "right" if rollout.reward > 0 else "wrong"
        print(f"  {rollout.prompt.text.strip()}\n    {verdict}: {rollout.text}")


def answer(folder: Path, question: str) -> str:
    """Return the exported model's answer, computed by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(question + "\n", return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=40, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
