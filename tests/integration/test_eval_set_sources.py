"""``[[eval.set]] source``: runs that measure rows of a data source, and the rewards and options of a set."""

import json
import shutil
import textwrap
from contextlib import nullcontext

import pytest

from engine_core import load_config
from engine_core.config.assemble import plugins_for
from engine_core.errors import DataError
from engine_core.runs.rollout_files import read_rollouts

SUMS = """
    from pydantic import Field

    from engine_core import hookimpl
    from engine_core.specs import DataSource, Options


    class SumsOptions(Options):
        held: int = Field(3, ge=0)
        "Held-out rows."
        sign: str = "+"
        "Between the numbers."


    CALLS = []


    def sums(split, held, sign):
        CALLS.append(split)
        first, number = (0, 8) if split == "train" else (8, held)
        return [
            {"prompt": f"{i} {sign} {i} = ", "answer": str(2 * i), "label": i % 2}
            for i in range(first, first + number)
        ]


    @hookimpl
    def engine_data_sources():
        return {"sums": DataSource(load=sums, config=SumsOptions, license="CC0-1.0")}
"""


@pytest.fixture
def make(tmp_path, grpo, digits_plugin):
    """A trainer with the plugins ``digits`` and ``sums``; all are closed at the end."""
    trainers = []
    shutil.copy(digits_plugin, tmp_path)
    (tmp_path / "sums.py").write_text(textwrap.dedent(SUMS))

    def trainer_of(changes):
        plugins = [str(tmp_path / "digits.py"), str(tmp_path / "sums.py")]
        settings = grpo | {"plugins": plugins, "reward": [{"name": "digits"}], "data.validation": []}
        config = load_config(settings | changes, allow_code=True)
        trainers.append(plugins_for(config).resolve("trainers", config.trainer)(config))
        return trainers[-1]

    yield trainer_of
    for trainer in trainers:
        trainer.close()


def metrics_of(run):
    return [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]


def calls_of(run):
    return run.plugins.chosen["data_sources", "sums"][1].module.CALLS


def log_of(run):
    return "".join(file.read_text() for file in sorted(run.folder.path.rglob("run.log")))


LENGTH = """
    from engine_core import hookimpl
    from engine_core.specs import Reward


    def length_of(completion, label):  # the column `label` is of the source, not of the files
        return float(len(completion)) + 0 * label


    @hookimpl
    def engine_rewards():
        return {"length_of": Reward(load=length_of)}
"""


def test_a_run_measures_sets_of_a_source_each_with_its_options_while_it_learns_from_files(make, tmp_path):
    rows = "".join(f'{{"question": "{i}+1=", "result": "{i + 1}"}}\n' for i in range(4))
    (tmp_path / "rows.jsonl").write_text(rows)
    sets = [
        {"name": "plus", "source": "sums"},
        {"name": "minus", "source": "sums", "max_prompts": 2, "sums": {"held": 5, "sign": "-"}},
    ]
    run = make(
        {
            "data.train": str(tmp_path / "rows.jsonl"),
            "data.columns": {"prompt": "question", "answer": "result"},  # of the files, not of the source
            "eval.set": sets,
            "eval.every_steps": 1,
        }
    )
    run.train()

    line = metrics_of(run)[-1]
    assert (line["eval/plus/prompts"], line["eval/minus/prompts"]) == (3, 2)
    assert "eval/prompts" not in line
    assert calls_of(run) == ["validation", "validation"]  # each set once, though two steps evaluate
    written = {
        name: {r.prompt.text: r.prompt.columns["answer"] for r in read_rollouts(files[-1])}
        for name in ("plus", "minus")
        if (files := sorted((run.folder.rollouts_dir / "eval" / name).glob("*.parquet")))
    }
    assert written["plus"] == {f"{i} + {i} = ": str(2 * i) for i in (8, 9, 10)}
    assert written["minus"] == {f"{i} - {i} = ": str(2 * i) for i in (8, 9)}
    assert log_of(run).count("Data source 'sums' of Plugin file") == 2


def test_a_set_is_scored_by_its_rewards_alone(make, tmp_path, world):
    (tmp_path / "length.py").write_text(textwrap.dedent(LENGTH))
    plugins = [str(tmp_path / name) for name in ("digits.py", "sums.py", "length.py")]
    sets = [
        {"name": "plus", "source": "sums", "rewards": ["length_of"]},
        {"name": "files", "path": str(world / "data" / "heldout.jsonl"), "rewards": ["digits"]},
    ]
    config = {"plugins": plugins, "reward": [{"name": "digits"}, {"name": "length_of", "weight": 0}]}
    run = make(
        config
        | {"eval.set": sets, "eval.at_end": True, "run.steps": 1, "data.source": "sums", "data.train": []}
    )
    run.train()

    line = metrics_of(run)[-1]
    assert line["eval/plus/accuracy"] == line["eval/plus/length_of"] > 0
    assert "eval/plus/digits" not in line
    assert line["eval/files/accuracy"] == line["eval/files/digits"] == line["eval/files/reward_mean"]
    assert "eval/files/length_of" not in line


CHECKED = """
    from engine_core import hookimpl
    from engine_core.specs import Reward


    def score(completion, answer):
        return 0.0


    def has_answer(columns):
        if not columns["answer"]:
            raise LookupError("reads `answer`, which is empty.")


    @hookimpl
    def engine_rewards():
        return {name: Reward(load=score, check=lambda: has_answer) for name in ("first", "second")}
"""


@pytest.mark.parametrize("rewards", [["first"], []], ids=["one of two", "both"])
def test_a_row_that_the_only_reward_of_a_set_cannot_use_is_refused(make, tmp_path, rewards):
    (tmp_path / "checked.py").write_text(textwrap.dedent(CHECKED))
    for name, answers in (("rows", ["2", "3"]), ("held", ["2", ""])):
        rows = [{"prompt": f"1+{i}=", "answer": answer} for i, answer in enumerate(answers, 1)] * 2
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"data.train": str(tmp_path / "rows.jsonl"), "eval.at_end": True, "run.steps": 1}
    run = make(
        files
        | {
            "plugins": [str(tmp_path / "checked.py")],
            "reward": [{"name": "first"}, {"name": "second"}],
            "eval.set": [{"name": "held", "path": str(tmp_path / "held.jsonl"), "rewards": rewards}],
        }
    )
    refused = pytest.raises(DataError, match=r"held\.jsonl:2: reward 'first' reads `answer`, which is empty")
    with refused if rewards else nullcontext():  # of two, the other may apply to such a row
        run.train()


def test_a_set_may_end_responses_and_use_the_chat_template_as_the_run_does_not(make, tmp_path):
    sets = [
        {"name": "plain", "source": "sums"},
        {"name": "chat", "source": "sums", "chat_template": True, "stop": ["1", "2"], "max_prompts": 1},
    ]
    run = make({"eval.set": sets, "rollout.stop": ["3"]})
    run.setup()
    run.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    plain, chat = run.held_out()

    assert run.held_items(plain)[0].text == "8 + 8 = "
    assert run.held_items(chat)[0].text == "<user>8 + 8 = "
    assert run.sampler.sampling_of(plain).stop == ("3",)
    assert run.sampler.sampling_of(chat).stop == ("1", "2")


def test_a_set_whose_source_has_no_rows_ends_the_run_before_a_model_is_built(make, monkeypatch):
    def built(*arguments, **options):
        raise AssertionError("a model was built")

    monkeypatch.setattr("engine_core.local.engine_host.EngineHost.__init__", built)
    sets = [{"name": "more", "source": "sums", "sums": {"held": 0}}]
    run = make({"eval.set": sets, "eval.at_end": True})

    with pytest.raises(
        DataError, match=r"eval\.set\.more\.source = 'sums': .* no rows for the split 'validation'"
    ):
        run.train()
