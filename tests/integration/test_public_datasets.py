"""Public data sets from copies of their hub repositories: rewards, whole short runs, resuming, files in place of the source."""

import json
import runpy
import shutil
import textwrap
import tomllib
from pathlib import Path
from types import SimpleNamespace

import datasets
import hub_folders
import pytest
from transformers import AutoTokenizer

from engine_core import load_config
from engine_core.config.assemble import plugins_for
from engine_core.errors import ConfigError, DataError
from engine_plugin_rewards.mathematics import same_mathematics
from engine_plugin_rewards.numeric import numeric
from engine_plugin_trainers.datasets.loading import rows_of
from engine_plugin_trainers.datasets.table import SETS

DOCS = Path(__file__).parents[2] / "docs"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """A folder with a copy of the repository of each set; the library ``datasets`` keeps its files elsewhere."""
    folder = tmp_path_factory.mktemp("hub")
    for name in hub_folders.SETS:
        hub_folders.write(name, folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        datasets.disable_progress_bars()
        yield folder
        datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def chat_model(world, tmp_path_factory):
    """The small model with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(world / "model", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def make(tmp_path, chat_model, copies):
    """``make("gsm8k", {"run.steps": 3})``: a trainer on the rows of a set; all are closed at the end."""
    trainers = []

    def trainer_of(name, changes=None):
        trainer = (changes or {}).get("trainer", "rl")
        settings = {
            "model.path": str(chat_model),
            "trainer": trainer,
            "data.source": name,
            f"data.{name}.folder": str(copies / name),
            "data.prompts_per_step": 4,
            "data.max_prompt_tokens": 512,
            "actor.optim.lr": 1e-3,
            "run.dir": str(tmp_path / "runs"),
            "run.name": "r",
            "run.steps": 2,
            "tracking.trackers": [],
            **(RL if trainer == "rl" else {}),
            **(changes or {}),
        }
        config = load_config({key: value for key, value in settings.items() if value is not None})
        trainers.append(plugins_for(config).resolve("trainers", config.trainer)(config))
        return trainers[-1]

    yield trainer_of
    for trainer in trainers:
        trainer.close()


RL = {
    "reward": [{"name": "numeric"}],
    "rollout.group_size": 2,
    "rollout.max_response_tokens": 6,
    "data.chat_template": True,
}


def metrics_of(run):
    return [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]


def without_time(lines):
    dropped = ("time", "throughput", "memory", "sync/seconds")
    return [{k: v for k, v in line.items() if not k.startswith(dropped)} for line in lines]


def log_of(run):
    return "".join(file.read_text() for file in sorted(run.folder.path.rglob("run.log")))


# ------------------------------------------------------------------ rewards

REWARDS = {
    "numeric": lambda text, answer: numeric(
        text, answer, tolerance=0.0, relative_tolerance=0.0, boxed="prefer"
    ),
    "math": lambda text, answer: same_mathematics(text, answer, precision=6, strict=True),
}


@pytest.mark.parametrize("name", [name for name, chosen in SETS.items() if chosen.reward])
def test_the_reward_is_1_for_the_reference_and_0_for_another_answer(copies, name):
    reward = REWARDS[SETS[name].reward]
    rows = rows_of(name, "train" if SETS[name].train else "validation", folder=str(copies / name))
    for row, other in zip(rows, [*rows][1:], strict=False):
        solution = row.get("response") or f"So it is $\\boxed{{{row['answer']}}}$."
        wrong = other.get("response") or f"So it is $\\boxed{{{other['answer']}}}$."
        assert reward(solution, row["answer"])["score"] == 1
        assert reward(wrong, row["answer"])["score"] == 0


# ------------------------------------------------------------------ whole runs

RUNS = {
    "gsm8k": {"eval.at_end": True},
    "dapo_math_17k": {},
    "openr1_math": {"trainer": "sft", "data.chat_template": True},
    "tulu3_sft": {"trainer": "sft"},
    "ultrachat": {"trainer": "sft", "eval.at_end": True},
    "ultrafeedback": {"trainer": "dpo", "eval.at_end": True},
    "hh_rlhf": {"trainer": "dpo", "eval.at_end": True},
}


QUICK = ("gsm8k", "tulu3_sft", "ultrafeedback")  # one of each trainer; the others are slow


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in RUNS]
)
def test_the_fitting_trainer_learns_from_a_set(make, name):
    run = make(name, RUNS[name])
    run.train()

    lines = metrics_of(run)
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[-1].get("data/bad_rows", 0) == lines[-1].get("data/over_long", 0) == 0
    assert any(key.startswith("eval/") for key in lines[-1]) == ("eval.at_end" in RUNS[name])
    log, chosen = log_of(run), SETS[name]
    assert f"license {chosen.license}, revision {chosen.revision}, url {chosen.url}." in log
    assert f"Data source '{name}' (train) is read from folder" in log


@pytest.mark.parametrize(
    ("trainer", "changes"), [("reward_model", {}), ("kto", {"data.ultrafeedback.unpaired": True})]
)
def test_pairs_fit_the_other_trainers_of_preferences(make, trainer, changes):
    run = make("ultrafeedback", {"trainer": trainer, "run.steps": 1, **changes})
    run.train()
    assert len(metrics_of(run)) == 1


def test_a_set_for_evaluation_is_an_evaluation_set(make, engine, copies):
    assert engine("data", "math500", "held", "--source", copies / "math500").code == 0
    sets = [{"name": "math500", "path": "held/validation.parquet"}]
    run = make("gsm8k", {"eval.set": sets, "eval.at_end": True, "run.steps": 1})
    run.train()
    assert metrics_of(run)[-1]["eval/math500/prompts"] == 20


def test_a_resumed_run_continues_with_the_next_row(make):
    whole = make("gsm8k", {"run.steps": 3, "run.name": "whole"})
    whole.train()
    make("gsm8k").train()
    resumed = make("gsm8k", {"run.steps": 3})
    resumed.train(resume=resumed.config.run.dir + "/r")

    assert without_time(metrics_of(resumed)) == without_time(metrics_of(whole))
    assert "changed since the checkpoint" not in log_of(resumed)


def test_another_suffix_on_resume_is_a_warning(make, caplog):
    make("gsm8k").train()
    resumed = make("gsm8k", {"run.steps": 3, "data.gsm8k.suffix": ""})
    resumed.train(resume=resumed.config.run.dir + "/r")
    assert "The data files changed since the checkpoint, in content but not in number" in caplog.text


@pytest.mark.parametrize("name", ["gsm8k", "ultrafeedback", "hh_rlhf", "tulu3_sft"])
def test_files_of_engine_data_give_what_the_source_gives(make, engine, copies, name):
    shown = engine("data", name, "out", "--source", copies / name)
    assert shown.code == 0, shown.err
    keys = tomllib.loads(shown.out)
    changes = {"trainer": keys["trainer"]}
    from_source = make(name, {**changes, "run.name": "source"})
    from_source.train()
    files = {
        f"data.{split}": keys["data"][split] for split in ("train", "validation") if split in keys["data"]
    }
    from_files = make(name, {**changes, **files, "data.source": None, f"data.{name}.folder": None})
    from_files.train()

    assert without_time(metrics_of(from_files)) == without_time(metrics_of(from_source))


def test_the_page_of_data_sets_is_up_to_date():
    made = SimpleNamespace(**runpy.run_path(str(DOCS / "dataset_table.py")))
    assert made.PAGE.read_text("utf-8") == made.page(), "Run python docs/dataset_table.py."


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("name", "changes", "error", "said"),
    [
        (
            "gsm8k",
            {"data.gsm8k.sufix": ""},
            ConfigError,
            r"data\.gsm8k\.sufix: unknown key\. Did you mean 'suffix'",
        ),
        (
            "tulu3_sft",
            {"trainer": "sft", "data.tulu3_sft.shots": 1},
            ConfigError,
            r"data\.tulu3_sft\.shots: unknown key",
        ),
        (
            "aime25",
            {},
            DataError,
            r"data\.source = 'aime25', split 'train': math-ai/aime25 has no training split",
        ),
        (
            "dapo_math_17k",
            {"eval.at_end": True},
            DataError,
            r"data\.source = 'dapo_math_17k' has no rows .* 'validation'",
        ),
        (
            "gsm8k",
            {
                "eval.at_end": True,
                "eval.set": [{"name": "m", "source": "math500", "math500": {"revision": "x", "folder": "."}}],
            },
            ConfigError,
            r"^eval\.set\.m\.source = 'math500', split 'validation': revision: got 'x', but folder",
        ),
    ],
)
def test_a_mistake_is_refused_before_training(make, name, changes, error, said):
    with pytest.raises(error, match=said):
        make(name, changes).train()


def test_validate_names_an_absent_folder(engine, chat_model, tmp_path):
    text = f'''
        trainer = "sft"
        [model]
        path = "{chat_model}"
        [data]
        source = "tulu3_sft"
        prompts_per_step = 4
        [data.tulu3_sft]
        folder = "tulu"
        [run]
        steps = 1
        '''
    (tmp_path / "run.toml").write_text(textwrap.dedent(text))
    (tmp_path / "tulu3").mkdir()
    checked = engine("validate", "run.toml")
    assert checked.code == 4
    assert "data.tulu3_sft.folder: there is no file or folder" in checked.err
    assert f"Did you mean '{tmp_path / 'tulu3'}'?" in checked.err
    (tmp_path / "tulu3").rename(tmp_path / "tulu")
    assert engine("validate", "run.toml").code == 0  # relative to the run file
