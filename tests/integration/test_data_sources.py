"""``[data] source``: rows of a plugin in whole short runs of every trainer that reads rows."""

import json
import re
import shutil
import textwrap

import pytest

from engine_core import load_config
from engine_core.config.assemble import plugins_for
from engine_core.errors import ConfigError, DataError, PluginError
from engine_core.runs.machine import describe_environment
from engine_core.runs.rollout_files import read_rollouts

SUMS = """
    from pydantic import Field

    from engine_core import hookimpl
    from engine_core.specs import DataSource, Options


    class SumsOptions(Options):
        count: int = Field(8, gt=0)
        "Rows to train on."
        held: int = Field(3, ge=0)
        "Held-out rows."
        sign: str = "+"
        "Between the numbers."


    CALLS = []


    def sums(split, count, held, sign):
        CALLS.append(split)
        first, number = (0, count) if split == "train" else (count, held)
        return [
            {
                "prompt": f"{i} {sign} {i} = ",
                "response": str(2 * i),
                "chosen": str(2 * i),
                "rejected": str(2 * i + 1),
                "label": i % 2 == 0,
                "completion": str(2 * i + i % 2),
                "answer": str(2 * i),
            }
            for i in range(first, first + number)
        ]


    @hookimpl
    def engine_data_sources():
        about = {"license": "CC0-1.0", "revision": "2026-01", "url": "https://example.org/sums"}
        return {"sums": DataSource(load=sums, config=SumsOptions, **about)}
"""


@pytest.fixture
def make(tmp_path, world, digits_plugin):
    """A trainer on the rows of the source ``sums``; all are closed at the end."""
    trainers = []
    shutil.copy(digits_plugin, tmp_path)

    def trainer_of(changes=None, source=SUMS, **live):
        (tmp_path / "sums.py").write_text(textwrap.dedent(source))
        settings = {
            "model.path": str(world / "model"),
            "plugins": [str(tmp_path / "digits.py"), str(tmp_path / "sums.py")],
            "reward": [{"name": "digits"}],
            "rollout.group_size": 2,
            "rollout.max_response_tokens": 6,
            "data.source": "sums",
            "data.prompts_per_step": 4,
            "actor.optim.lr": 1e-3,
            "run.dir": str(tmp_path / "runs"),
            "run.name": "r",
            "run.steps": 2,
            "tracking.trackers": [],
            **(changes or {}),
        }
        config = load_config(
            {key: value for key, value in settings.items() if value is not None}, allow_code=True
        )
        trainers.append(plugins_for(config).resolve("trainers", config.trainer)(config, **live))
        return trainers[-1]

    yield trainer_of
    for trainer in trainers:
        trainer.close()


def metrics_of(run):
    return [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]


def without_time(lines):
    dropped = ("time", "throughput", "memory", "sync/seconds")
    return [{k: v for k, v in line.items() if not k.startswith(dropped)} for line in lines]


def calls_of(run):
    return run.plugins.chosen["data_sources", "sums"][1].module.CALLS


def log_of(run):
    return "".join(file.read_text() for file in sorted(run.folder.path.rglob("run.log")))


OF = {
    "rl": {},
    "async": {"rollout.weights": "own"},
    "sft": {"reward": None, "rollout.group_size": None, "rollout.max_response_tokens": None},
    "dpo": {"reward": None},
    "kto": {"reward": None},
    "reward_model": {"reward": None},
    "distill": {"reward": None},
}


@pytest.mark.parametrize("trainer", OF)
def test_a_trainer_learns_and_evaluates_on_the_rows_of_a_source(make, world, trainer):
    changes = {"trainer": trainer, "eval.at_end": True, "run.epochs": 1, "run.steps": None, **OF[trainer]}
    if trainer == "distill":
        changes |= {"teacher.path": str(world / "model"), "distill.data_share": 0.5}
    run = make(changes)
    run.train()

    lines = metrics_of(run)
    assert [line["step"] for line in lines] == [1, 2]  # 8 rows, 4 a step
    if trainer != "distill":  # some of whose steps sample and some learn the rows' responses
        assert lines[-1]["data/epoch"] == 1.0
    assert any(name.startswith("eval/") for name in lines[-1])
    if "eval/prompts" in lines[-1]:
        assert lines[-1]["eval/prompts"] == 3
    assert sorted(calls_of(run)) == ["train", "validation"]  # each split once


def test_the_rows_are_those_that_files_would_give(make, tmp_path):
    from_source = make({"data.sums.count": 6})
    from_source.train()
    rows = from_source.source._rows.files[0].rows
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    from_file = make({"data.source": None, "data.train": str(tmp_path / "rows.jsonl"), "run.name": "f"})
    from_file.train()

    assert without_time(metrics_of(from_source)) == without_time(metrics_of(from_file))
    prompts = {
        r.prompt.text for r in read_rollouts(sorted(from_source.folder.rollouts_dir.glob("*.parquet"))[0])
    }
    assert prompts < {f"{i} + {i} = " for i in range(6)}


def test_license_revision_and_address_are_logged_once_and_recorded(make):
    run = make({"eval.at_end": True})
    run.train()

    log = log_of(run)
    assert log.count("Data source 'sums' of Plugin file") == 1
    assert "license CC0-1.0, revision 2026-01, url https://example.org/sums." in log
    about = {"license": "CC0-1.0", "revision": "2026-01", "url": "https://example.org/sums"}
    assert json.loads((run.folder.path / "env.json").read_text())["data_sources"] == [
        {"name": "sums", **about}
    ]


def test_the_sources_of_a_mix_and_of_held_out_sets_are_recorded(make):
    others = 'DataSource(load=sums, config=SumsOptions, license="MIT")'
    source = SUMS.replace('return {"sums"', f'return {{"more": {others}, "held": {others}, "sums"')
    mix = [{"source": "more", "weight": 2}, {"source": "sums", "weight": 1}]
    run = make({"data.source": None, "data.mix": mix, "eval.set": [{"name": "e", "source": "held"}]}, source)
    about = {"license": "MIT", "revision": "", "url": ""}
    recorded = describe_environment(run.config, run.plugins)["data_sources"]
    assert recorded[0] == {"name": "more", **about}
    assert recorded[1]["url"] == "https://example.org/sums"
    assert recorded[2:] == [{"name": "held", **about}]


def test_messages_name_the_key_that_the_rows_come_from(make, world):
    epochs = {"run.steps": None, "run.epochs": 1, "data.prompts_per_step": 1000}
    with pytest.raises(
        ConfigError, match=r"^data\.source has \d+ usable rows and data\.prompts_per_step = 1000: not one"
    ):
        make(epochs).train()
    with pytest.raises(ConfigError, match=r"^data\.train has \d+ usable rows"):
        make(epochs | {"data.source": None, "data.train": str(world / "data" / "train.jsonl")}).train()
    with pytest.raises(ConfigError, match=r"^the argument data has 2 usable rows"):
        make(epochs | {"data.source": None}, data=[{"prompt": "1"}, {"prompt": "2"}]).train()
    run = make({"run.steps": None})
    run.load_inputs()
    assert re.search(r"\(\d+ rows in data\.source\)", " ".join(run.derived()))


def test_a_source_without_a_license_is_logged_as_such(make):
    run = make(source=SUMS.replace(", **about", ""))
    run.train()

    assert "no license is named" in log_of(run)


def test_rows_given_from_python_come_before_the_source(make):
    run = make(data=[{"prompt": "1 + 1 = ", "answer": "2"}])
    run.train()

    assert calls_of(run) == []
    assert "Data source" not in log_of(run)
    assert len(run.source) == 1


def test_files_in_validation_come_before_the_held_out_rows_of_the_source(make, world):
    run = make({"data.validation": str(world / "data" / "heldout.jsonl"), "eval.at_end": True})
    run.train()

    assert metrics_of(run)[-1]["eval/prompts"] == 8
    assert calls_of(run) == ["train"]


@pytest.mark.parametrize("trainer", ["rl", "sft"])
def test_a_source_without_held_out_rows_leaves_the_other_sets(make, world, trainer):
    sets = [{"name": "more", "path": str(world / "data" / "heldout.jsonl")}]
    run = make(
        {"trainer": trainer, "data.sums.held": 0, "eval.set": sets, "eval.at_end": True, **OF[trainer]}
    )
    run.train()

    evaluated = {name for name in metrics_of(run)[-1] if name.startswith("eval/")}
    assert evaluated
    assert all(name.startswith("eval/more/") for name in evaluated)


def test_rows_with_a_digest_are_read_when_they_are_needed(make):
    lazy = """
    class Lazy:
        digest = "abc"

        def __init__(self, rows):
            self.rows, self.read = rows, CALLS

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, number):
            self.read.append(number)
            return self.rows[number]

    """
    source = SUMS.replace("    CALLS = []\n", lazy + "\n    CALLS = []\n")
    source = source.replace("return [\n", "return Lazy([\n").replace(
        "+ number)\n        ]", "+ number)\n        ])"
    )
    run = make({"run.steps": 1, "data.sums.count": 1000}, source)
    run.train()

    assert 4 <= len({number for number in calls_of(run) if number != "train"}) < 1000
    assert run.source.state()["files"] == [
        {"file": "data source 'sums' (train)", "rows": 1000, "sha256": "abc"}
    ]


# ------------------------------------------------------------------ resuming


def test_a_resumed_run_takes_the_rows_that_the_uninterrupted_one_takes(make):
    whole = make({"run.steps": 3, "run.name": "whole"})
    whole.train()
    make({"run.steps": 2}).train()
    resumed = make({"run.steps": 3})
    resumed.train(resume=resumed.config.run.dir + "/r")

    assert without_time(metrics_of(resumed)) == without_time(metrics_of(whole))
    assert "changed since the checkpoint" not in log_of(resumed)


def test_other_rows_of_the_same_number_are_a_warning(make, caplog):
    make().train()
    resumed = make({"run.steps": 3, "data.sums.sign": "*"})
    resumed.train(resume=resumed.config.run.dir + "/r")

    assert "The data files changed since the checkpoint, in content but not in number of rows" in caplog.text


def test_another_number_of_rows_is_refused_before_a_model_is_built(make, no_model_on_request):
    make().train()
    resumed = make({"run.steps": 3, "data.sums.count": 9})
    no_model_on_request()

    with pytest.raises(DataError, match=r"its files had \[8\] rows, now \[9\]"):
        resumed.train(resume=resumed.config.run.dir + "/r")


# ------------------------------------------------------------------ what is refused


@pytest.fixture
def no_model_on_request(monkeypatch):
    """A function after whose call building a model is an error."""

    def built(*arguments, **options):
        raise AssertionError("a model was built")

    return lambda: monkeypatch.setattr("engine_core.local.engine_host.EngineHost.__init__", built)


@pytest.fixture
def no_model(no_model_on_request):
    """Building a model is an error."""
    no_model_on_request()


AT = r"data\.source = 'sums', split 'train': Plugin file '.*sums\.py' \(sha256:\w+\)"


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        (
            "raise OSError('no network')",
            PluginError,
            AT + r": data source 'sums' failed: OSError: no network \(.*sums\.py:\d+: raise OSError",
        ),
        ("return []", DataError, r"data\.source = 'sums'.* returned no rows for the split 'train'\."),
        ("return ['a', 'b']", PluginError, AT + r" must return a sequence of dicts, got str as row 0\."),
        ("return [{'prompt': '1'}, 3]", PluginError, AT + " .* got int as row 1"),
        ("return {'prompt': ['1']}", PluginError, AT + " .* got dict"),
        ("return iter([])", PluginError, AT + " .* got list_iterator"),
        ("return None", PluginError, AT + " .* got NoneType"),
        (
            "return Lazy()",
            PluginError,
            AT
            + r": data source 'sums' failed: OSError: page 2 \(.*sums\.py:\d+: raise OSError\('page 2'\)\)",
        ),
        ("return [{'question': '1'}] * 4", DataError, r"data source 'sums' \(train\), row 0"),
    ],
)
def test_rows_that_cannot_be_used_end_the_run_before_a_model_is_built(make, no_model, body, error, said):
    lazy = """
    class Lazy:
        def __len__(self):
            return 3

        def __getitem__(self, number):
            if number < 2:
                return {"prompt": "1"}
            raise OSError('page 2')
    """
    source = SUMS.replace("CALLS.append(split)", body).replace(
        "    CALLS = []\n", lazy + "\n    CALLS = []\n"
    )
    run = make(source=source)

    with pytest.raises(error, match=said):
        run.train()


@pytest.mark.parametrize("trainer", ["sft", "dpo", "kto", "reward_model", "async"])
def test_every_trainer_reads_the_rows_before_a_model_is_built(make, no_model, trainer):
    run = make({"trainer": trainer, **OF[trainer]}, SUMS.replace("CALLS.append(split)", "return ['a']"))

    with pytest.raises(PluginError, match=AT + " .* got str as row 0"):
        run.train()


def test_a_function_that_does_not_take_its_options_is_refused_with_the_config(make):
    source = SUMS.replace("def sums(split, count, held, sign):", "def sums(split, count, sign, held_out=0):")
    with pytest.raises(
        PluginError, match=r"'sums' must be callable as f\(split, \*, count, held, sign\): .*'held'"
    ):
        make(source=source)


@pytest.mark.parametrize("trainer", ["rl", "sft", "dpo"])
@pytest.mark.parametrize(
    ("old", "new", "error", "said"),
    [
        (
            "(count, held)",
            "(count, 0)",
            DataError,
            r"data\.source = 'sums' has no rows for the split 'validation': name files in data\.validation",
        ),
        (
            "(count, held)",
            "(count, 1 / 0)",
            PluginError,
            r"data\.source = 'sums', split 'validation': Plugin file .* failed: ZeroDivisionError",
        ),
    ],
)
def test_held_out_rows_that_cannot_be_used_end_a_run_that_evaluates_before_it_begins(
    make, no_model, trainer, old, new, error, said
):
    run = make({"trainer": trainer, "eval.every_steps": 5, **OF[trainer]}, SUMS.replace(old, new))

    with pytest.raises(error, match=said):
        run.train()


def test_a_run_that_does_not_evaluate_asks_for_no_held_out_rows(make):
    run = make(source=SUMS.replace("(count, held)", "(count, 1 / 0)"))
    run.train()

    assert calls_of(run) == ["train"]


def test_files_and_a_source_together_are_refused_with_both_keys(make, world):
    with pytest.raises(ConfigError, match=r"data\.source: data\.train is set too"):
        make({"data.train": str(world / "data" / "train.jsonl")})


def test_a_trainer_on_stored_rollouts_takes_no_source(make):
    with pytest.raises(ConfigError, match=r"data\.train: missing\. Expected files of rollouts in \[data\]"):
        make({"trainer": "offline"})


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (
            {"data.source": "sms"},
            PluginError,
            r"data\.source: .*Unknown data source 'sms'\. Did you mean 'sums'\?",
        ),
        ({"data.sums.count": 0}, ConfigError, r"data\.sums\.count: got 0, expected a number above 0"),
        ({"data.sums.cuont": 3}, ConfigError, r"data\.sums\.cuont: unknown key\. Did you mean 'count'\?"),
        ({"data.source": None, "data.sums.count": 3}, ConfigError, r"data\.train: missing\. .* or a source,"),
        (
            {"eval.set": [{"name": "more", "path": []}]},
            ConfigError,
            r"eval\.set\.more: expected either files in path, or the name of a data source in source",
        ),
        (
            {"eval.set": [{"name": "more", "path": "a.jsonl", "source": "sums"}]},
            ConfigError,
            r"eval\.set\.more: expected either files in path, or",
        ),
        (
            {"eval.set": [{"name": "more", "source": "sms"}]},
            PluginError,
            r"eval\.set\.more\.source: .*Unknown data source 'sms'\. Did you mean 'sums'\?",
        ),
        (
            {"eval.set": [{"name": "more", "source": "sums", "sums": {"cuont": 3}}]},
            ConfigError,
            r"eval\.set\.more\.sums\.cuont: unknown key\. Did you mean 'count'\?",
        ),
        (
            {"eval.at_end": True, "eval.set": [{"name": "more", "source": "sums", "rewards": ["digit"]}]},
            ConfigError,
            r"eval\.set\.more\.rewards: got 'digit', which is no reward of the run\. Did you mean 'digits'",
        ),
    ],
)
def test_a_wrong_choice_is_refused_with_its_key(make, changes, error, said):
    with pytest.raises(error, match=said):
        make(changes)


# ------------------------------------------------------------------ the command line, an installed distribution


def test_a_source_of_an_installed_distribution_is_validated_trained_and_evaluated(
    engine, install, sft_run, tmp_path
):
    install("sums-dist", {"data_sources": {"sums": "sums_plugin"}}, {"sums_plugin": SUMS})
    text = (
        sft_run.read_text()
        .replace('train = "rows.jsonl"', 'source = "sums"')
        .replace('validation = "rows.jsonl"', "")
    )
    sft_run.write_text(text + "[data.sums]\ncount = 5\n")

    checked = engine("validate", "run.toml")
    assert checked.code == 0, checked.err
    trained = engine("train", "run.toml")
    assert trained.code == 0, trained.err
    resumed = engine("resume", trained.out.strip(), "--steps", 3)
    assert resumed.code == 0, resumed.err
    scored = engine("eval", trained.out.strip(), "--json")
    assert scored.code == 0, scored.err
    assert set(json.loads(scored.out)) == {"eval/nll"}
    shown = engine("config", "show", "run.toml")
    assert "[data.sums]\ncount = 5\nheld = 3" in shown.out
    assert "count = 8  (integer > 0)" in engine("schema", "data.sums").out
