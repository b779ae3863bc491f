"""Small copies of the public data sets' hub repositories: same files, configurations and columns, 20 rows of our own a split.

``write("gsm8k", folder)`` writes the files as ``hf download --local-dir`` does, with its records of the commit. Every row's numbers follow from its number,
so a test knows the right answer.
"""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 20
COMMIT = "0123456789abcdef" * 2 + "01234567"

Row = dict


def turn(role: str, content: str) -> Row:
    # The hub's own order of the two keys.
    return {"content": content, "role": role}


def chat(question: str, *others: str) -> list[Row]:
    roles = ["user", "assistant"] * (1 + len(others))
    return [turn(role, text) for role, text in zip(roles, [question, *others], strict=False)]


def gsm8k(i: int) -> Row:
    price = 500 * i
    return {
        "question": f"A desk costs {price} coins and a lamp costs {i}. How much do both cost?",
        "answer": f"They cost {price} + {i} = <<{price}+{i}={price + i}>>{price + i} coins.\n#### {price + i:,}",
    }


def math(i: int) -> Row:
    return {
        "problem": f"Write $\\frac{{{2 * i}}}{{4}}$ in lowest terms.",
        "level": f"Level {1 + i % 5}",
        "type": "Prealgebra",
        "solution": f"First $\\boxed{{x}}$ is a name. Divide by 2 to get $\\boxed{{\\frac{{{i}}}{{2}}}}$.",
    }


def math500(i: int) -> Row:
    return {
        "problem": f"Find ${i}^2$.",
        "solution": f"It is $\\boxed{{{i * i}}}$.",
        "answer": str(i * i),
        "subject": "Algebra",
        "level": 1 + i % 5,
        "unique_id": f"test/algebra/{i}.json",
    }


def aime24(i: int) -> Row:
    return {
        "id": 60 + i,
        "problem": f"Find the remainder of {i} + 3 modulo 1000.",
        "solution": f"It is $\\boxed{{{i + 3:03}}}$.",
        "answer": f"{i + 3:03}",
        "url": f"https://example.org/{i}",
        "year": "2024",
    }


def aime25(i: int) -> Row:
    return {"problem": f"Find {i} + 4.", "answer": str(i + 4), "id": str(i)}


def dapo(i: int) -> Row:
    asked = f"Find {i} + 5."
    return {
        "prompt": asked,
        "solution": str(i + 5),
        "data_source": "math_dapo",
        "source_prompt": [turn("user", f"Solve the problem. End with a line 'Answer: '.\n\n{asked}")],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(i + 5), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"00000000-{i:04}"},
    }


def deepscaler(i: int) -> Row:
    answer = "" if i == 7 else f"\\sqrt{{{i}}}"  # the real set has rows without an answer
    return {
        "problem": f"Simplify $\\sqrt{{{i}}}$.",
        "answer": answer,
        "solution": "" if i % 2 else f"It is ${answer}$.",
    }


def openr1(i: int) -> Row:
    asked, thought = (
        f"Find {i} + 6.",
        f"<think>\n{i} + 6 is {i + 6}.\n</think>\n\nIt is $\\boxed{{{i + 6}}}$.",
    )
    return {
        "problem": asked,
        "solution": f"${i} + 6 = {i + 6}$",
        "answer": str(i + 6),
        "problem_type": "Algebra",
        "question_type": "math-word-problem",
        "source": "olympiads",
        "uuid": f"00000000-{i:04}",
        "is_reasoning_complete": [True, False],
        "generations": [thought, "<think>\nHm"],
        "correctness_math_verify": [True, False],
        "correctness_llama": None,
        "finish_reasons": None,
        "correctness_count": 1,
        "messages": chat(asked, thought),
    }


def ultrafeedback(i: int) -> Row:
    asked, better = f"Name the number after {i}.", f"It is {i + 1}."
    worse = better if i == 4 else f"It is {i}."  # the real set has equal responses
    return {
        "prompt": asked,
        "prompt_id": f"{i:064x}",
        "chosen": chat(asked, better),
        "rejected": chat(asked, worse),
        "messages": chat(asked, better),
        "score_chosen": 8.0,
        "score_rejected": 2.5,
    }


def hh_rlhf(i: int) -> Row:
    start = f"\n\nHuman: Name a number.\n\nAssistant: {i}.\n\nHuman: And the next?\n\nAssistant:"
    odd = {
        3: ("\n\nHuman: Hi", "\n\nHuman: Hi\n\nAssistant: Hi"),
        5: (start, f"{start} {i}"),
    }  # as the real set has
    chosen, rejected = odd.get(i, (f"{start} {i + 1}.", f"{start} No."))
    return {"chosen": chosen, "rejected": rejected}


def tulu3(i: int) -> Row:
    return {
        "id": f"flan_{i}",
        "messages": [turn("system", "Be brief."), *chat(f"Double {i}.", str(2 * i))],
        "source": "ai2-adapt-dev/flan_v2_converted",
    }


def ultrachat(i: int) -> Row:
    asked = f"Count to {i}."
    return {"prompt": asked, "prompt_id": f"{i:064x}", "messages": chat(asked, "1, 2, 3.", "Go on.", f"{i}.")}


def read_me(license: str, configs: dict[str, dict[str, str]]) -> str:
    """Return a data set card with the YAML of its configurations: name -> split -> files."""
    lines = ["---", "language: en", *([f"license: {license}"] if license else [])]
    lines += ["configs:"] if configs else []
    for name, splits in configs.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, path in splits.items():
            lines += [f"  - split: {split}", f"    path: {path}"]
    return "\n".join([*lines, "---", "", "# Card", ""])


def one_config(*splits: str, folder: str = "data") -> dict[str, str]:
    return {split: f"{folder}/{split}-*" for split in splits}


GSM8K = {name: one_config("train", "test", folder=name) for name in ("main", "socratic")}
MATH = {"default": one_config("train", "test"), "algebra": one_config("train", "test", folder="algebra")}
DAPO = {name: one_config("train", folder=name) for name in ("all", "cn", "en")}
OPENR1 = {
    "all": one_config("default", "extended", folder="all"),
    "default": one_config("train"),
    "extended": one_config("train", folder="extended"),
}
ULTRAFEEDBACK = one_config("train_prefs", "train_sft", "test_prefs", "test_sft", "train_gen", "test_gen")
ULTRACHAT = one_config("train_sft", "test_sft", "train_gen", "test_gen")
HH_FOLDERS = ("harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled")

SETS: dict[str, tuple[Callable[[int], Row], str, dict[str, dict[str, str]]]] = {
    "gsm8k": (gsm8k, "mit", GSM8K),
    "math": (math, "mit", MATH),
    "math500": (math500, "", {}),
    "aime24": (aime24, "", {"default": one_config("train")}),
    "aime25": (aime25, "apache-2.0", {}),
    "dapo_math_17k": (dapo, "", DAPO),
    "deepscaler": (deepscaler, "mit", {}),
    "openr1_math": (openr1, "apache-2.0", OPENR1),
    "ultrafeedback": (ultrafeedback, "mit", {"default": ULTRAFEEDBACK}),
    "hh_rlhf": (hh_rlhf, "mit", {}),
    "tulu3_sft": (tulu3, "odc-by", {"default": one_config("train")}),
    "ultrachat": (ultrachat, "mit", {"default": ULTRACHAT}),
}
PLAIN_FILES = {"math500": "test.jsonl", "aime25": "test.jsonl", "deepscaler": "deepscaler.json"}


def rows_of(name: str, split: str = "train") -> list[Row]:
    """Return the rows of a split as the hub has them; held-out rows follow those of the training split."""
    first = ROWS if split.startswith("test") else 0
    return [SETS[name][0](i) for i in range(first + 1, first + ROWS + 1)]


def write(name: str, folder: Path, commit: str = COMMIT) -> Path:
    """Write the files of a set's repository below ``folder`` and return it."""
    _, license, configs = SETS[name]
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(read_me(license, configs))
    for splits in configs.values():
        for split, path in splits.items():
            file = folder / path.replace("-*", "-00000-of-00001.parquet")
            file.parent.mkdir(exist_ok=True)
            pq.write_table(pa.Table.from_pylist(rows_of(name, split)), file)
    if name == "hh_rlhf":
        _write_hh(folder)
    elif plain := PLAIN_FILES.get(name):
        rows = rows_of(name, Path(plain).stem)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / plain).write_text(json.dumps(rows, indent=2) if plain.endswith(".json") else lines)
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        record = folder / ".cache" / "huggingface" / "download" / f"{file.relative_to(folder)}.metadata"
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(f"{commit}\n{len(file.read_bytes()):040x}\n1764000000.0\n")
    return folder


def _write_hh(folder: Path) -> None:
    """Divide the rows of each split among the four folders; the fifth has other columns and belongs to no split."""
    for split in ("train", "test"):
        for number, part in enumerate(HH_FOLDERS):
            rows = rows_of("hh_rlhf", split)[number :: len(HH_FOLDERS)]
            (folder / part).mkdir(exist_ok=True)
            with gzip.open(folder / part / f"{split}.jsonl.gz", "wt") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    (folder / "red-team-attempts").mkdir()
    with gzip.open(folder / "red-team-attempts" / "red_team_attempts.jsonl.gz", "wt") as file:
        file.write(json.dumps({"transcript": "\n\nHuman: Hi", "rating": 1.0}) + "\n")
