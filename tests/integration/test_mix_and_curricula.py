"""``[data] mix`` and ``[data] curriculum`` in whole short runs, with resume."""

import json
import shutil
import textwrap

import pytest

from engine_core import load_config
from engine_core.config.assemble import plugins_for
from engine_core.config.completeness import check_complete
from engine_core.errors import ConfigError
from engine_core.runs.rollout_files import read_rollouts

PLUGIN = """
    from engine_core import hookimpl
    from engine_core.specs import Curriculum, DataSource, Reward


    def sums(split):
        return [
            {
                "prompt": f"{i} + {i} = ", "answer": str(2 * i), "response": str(2 * i), "label": True,
                "chosen": str(2 * i), "rejected": str(2 * i + 1), "completion": str(2 * i),
            }
            for i in range(4)
        ]


    def first_digit(prompt):
        return int(prompt[0]) / 8


    def backwards(rows, round):
        return range(len(rows) - 1, -1, -1)


    class Weakest:
        "Half of the rows, those with the lowest mean reward so far."

        def __init__(self):
            self.means = {}

        def __call__(self, rows, round):
            return sorted(range(len(rows)), key=lambda row: (self.means.get(row, 0), -row))[: len(rows) // 2]

        def update(self, scores):
            self.means |= scores

        def state(self):
            return {"means": list(self.means.items())}

        def load_state(self, state):
            self.means = dict(state["means"])


    @hookimpl
    def engine_rewards():
        return {"first_digit": Reward(load=first_digit)}


    @hookimpl
    def engine_data_sources():
        return {"sums": DataSource(load=sums, license="CC0-1.0")}


    @hookimpl
    def engine_curricula():
        return {"backwards": Curriculum(load=backwards), "weakest": Curriculum(load=Weakest)}
"""
ROWS = [
    {"prompt": f"{i} - {i} = ", "answer": "0", "response": "0", "label": False, "chosen": "0", "rejected": "1"}
    for i in range(8)
]  # fmt: skip
PLAIN = {"reward": None, "rollout.group_size": None, "rollout.max_response_tokens": None}
OF = {
    "rl": {},
    "async": {"rollout.weights": "own"},
    "sft": PLAIN,
    "dpo": PLAIN,
    "kto": PLAIN,
    "reward_model": PLAIN,
    "distill": {"reward": None, "distill.data_share": 0.5},
}


@pytest.fixture
def config_of(tmp_path, world, digits_plugin):
    """Changes of a run on a mix of a file and a source -> its config."""
    shutil.copy(digits_plugin, tmp_path)
    (tmp_path / "own.py").write_text(textwrap.dedent(PLUGIN))
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def make(changes=None):
        settings = {
            "model.path": str(world / "model"),
            "plugins": [str(tmp_path / "digits.py"), str(tmp_path / "own.py")],
            "reward": [{"name": "digits"}],
            "rollout.group_size": 2,
            "rollout.max_response_tokens": 6,
            "data.mix": [{"path": str(file), "weight": 1}, {"source": "sums", "weight": 3, "name": "sums"}],
            "data.prompts_per_step": 4,
            "actor.optim.lr": 1e-3,
            "run.dir": str(tmp_path / "runs"),
            "run.name": "r",
            "run.steps": 3,
            "tracking.trackers": [],
            **(changes or {}),
        }
        kept = {key: value for key, value in settings.items() if value is not None}
        return load_config(kept, allow_code=True)

    return make


@pytest.fixture
def make(config_of):
    """Changes of a run -> its trainer; all are closed at the end."""
    trainers = []

    def trainer_of(changes=None):
        config = config_of(changes)
        trainers.append(plugins_for(config).resolve("trainers", config.trainer)(config))
        return trainers[-1]

    yield trainer_of
    for trainer in trainers:
        trainer.close()


def metrics_of(run):
    return [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]


def without_time(lines):
    dropped = ("time", "throughput", "memory", "sync/seconds")
    return [{k: v for k, v in line.items() if not k.startswith(dropped)} for line in lines]


def rows_of(run):
    """Numbers of the rows that each step sampled, in order."""
    files = sorted(run.folder.rollouts_dir.glob("*.parquet"))
    return [[int(r.prompt.id.rpartition(":")[2]) for r in read_rollouts(file)][::2] for file in files]


@pytest.mark.parametrize(
    "trainer", [pytest.param(name, marks=[] if name in ("rl", "sft") else [pytest.mark.slow]) for name in OF]
)
def test_a_trainer_learns_from_a_mix_of_files_and_sources(make, world, trainer):
    changes = {"trainer": trainer, "run.steps": None, "run.epochs": 1, **OF[trainer]}
    if trainer == "distill":
        changes["teacher.path"] = str(world / "model")
    run = make(changes)
    run.train()

    last = metrics_of(run)[-1]
    assert last["step"] == 3  # 12 rows, 4 a step
    if trainer not in ("distill", "async"):  # distill takes some rows elsewhere, async takes rows ahead
        assert last["data/epoch"] == 1
        assert (last["data/mix/0"], last["data/mix/sums"]) == (3, 9)


def test_the_license_of_a_source_in_a_mix_is_logged(make):
    run = make({"run.steps": 1})
    run.train()

    log = "".join(file.read_text() for file in run.folder.path.rglob("run.log"))
    assert log.count("Data source 'sums' of Plugin file") == 1
    assert "license CC0-1.0" in log


CHANGES = {
    "mix": {},
    "function": {"data.mix": None, "data.curriculum": "backwards"},
    "class": {"data.mix": None, "data.curriculum": "weakest"},
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_resumed_run_takes_the_rows_of_the_uninterrupted_one(make, tmp_path, kind):
    changes = CHANGES[kind] | ({} if kind == "mix" else {"data.train": str(tmp_path / "rows.jsonl")})
    whole = make(changes | {"run.steps": 5, "run.name": "whole"})
    whole.train()
    make(changes | {"run.steps": 2}).train()
    resumed = make(changes | {"run.steps": 5})
    resumed.train(resume=resumed.config.run.dir + "/r")

    assert rows_of(resumed) == rows_of(whole)
    assert without_time(metrics_of(resumed)) == without_time(metrics_of(whole))
    if kind == "function":
        assert rows_of(whole)[:3] == [[7, 6, 5, 4], [3, 2, 1, 0], [7, 6, 5, 4]]


def test_a_curriculum_gets_the_mean_reward_of_each_row_of_a_step(make, tmp_path):
    run = make({"data.mix": None, "data.train": str(tmp_path / "rows.jsonl"), "data.curriculum": "weakest"})
    run.train()

    means = {}
    for step, file in enumerate(sorted(run.folder.rollouts_dir.glob("*.parquet"))):
        chosen = sorted(range(8), key=lambda row: (means.get(row, 0), -row))[:4]
        assert rows_of(run)[step] == chosen
        rewards = {}
        for rollout in read_rollouts(file):
            rewards.setdefault(int(rollout.prompt.id.rpartition(":")[2]), []).append(rollout.reward)
        means |= {row: sum(values) / 2 for row, values in rewards.items()}
    assert len({tuple(rows) for rows in rows_of(run)}) > 1


def test_asynchronous_rounds_use_the_rewards_known_when_their_first_row_is_taken(make, tmp_path):
    changes = {"trainer": "async", "rollout.weights": "own", "run.steps": 4, "data.curriculum": "weakest"}
    changes["async.order"] = "admitted"
    run = make(changes | {"data.mix": None, "data.train": str(tmp_path / "rows.jsonl")})
    run.train()

    first, second = rows_of(run)[:2]
    assert sorted(first) == sorted(second) == [4, 5, 6, 7]  # taken before a reward was known
    made = run.source.curriculum._made
    assert set(made.means) == {row for rows in rows_of(run) for row in rows}


@pytest.mark.slow
def test_a_resumed_asynchronous_run_takes_the_rows_of_the_uninterrupted_one(make, tmp_path):
    changes = {"trainer": "async", "rollout.weights": "own", "async.order": "admitted", "data.mix": None}
    changes |= {"data.train": str(tmp_path / "rows.jsonl"), "data.curriculum": "weakest"}
    changes["reward"] = [{"name": "first_digit"}]  # asynchronous responses depend on time
    whole = make(changes | {"run.steps": 6, "run.name": "whole"})
    whole.train()
    make(changes | {"run.steps": 6, "checkpoint.every_steps": 3}).train()
    shutil.rmtree(max((tmp_path / "runs/r/checkpoints").glob("step_*")))
    resumed = make(changes | {"run.steps": 6})
    resumed.train(resume=resumed.config.run.dir + "/r")

    assert "step_00000003." in "".join(file.read_text() for file in resumed.folder.path.rglob("run.log"))
    assert rows_of(resumed) == rows_of(whole)
    assert len({tuple(sorted(rows)) for rows in rows_of(whole)}) > 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"trainer": "sft", **PLAIN}, "which learns from rewards, but trainer 'sft' has none. Use one that is a function."),
        ({"data.num_workers": 2}, "which learns from rewards, and workers do not wait for these. Set data.num_workers = 0."),
        ({"data.columns.id": "answer"}, "which learns the rewards of rows by number, but data.columns.id replaces it. Remove that key."),
        ({"run.steps": None}, "whose rounds may have any length, so run.epochs counts nothing. Set run.steps."),
        ({"trainer": "distill", **PLAIN, "rollout.group_size": 2}, "which learns from rewards, but trainer 'distill' has none. Use one that is a function."),
        ({"trainer": "offline"}, "which chooses rows, but trainer 'offline' reads stored rollouts. Remove it."),
    ],
    ids=["no rewards", "workers", "ids", "no steps", "distill without rewards", "offline"],
)  # fmt: skip
def test_what_a_curriculum_cannot_have_is_refused_before_work_starts(config_of, tmp_path, changes, problem):
    rows = {"data.mix": None, "data.train": str(tmp_path / "rows.jsonl"), "data.curriculum": "weakest"}
    config = config_of(rows | changes)

    with pytest.raises(ConfigError) as caught:
        check_complete(config)
    assert [p for p in caught.value.problems if p.endswith(f"data.curriculum: got 'weakest', {problem}")]


def test_a_function_may_have_workers_and_any_trainer(config_of, tmp_path):
    rows = {"data.mix": None, "data.train": str(tmp_path / "rows.jsonl"), "data.curriculum": "backwards"}
    check_complete(config_of(rows | {"trainer": "sft", "data.num_workers": 2, **PLAIN}))


def test_stored_rollouts_have_no_mix(config_of):
    with pytest.raises(ConfigError, match=r"data\.train: missing\. Expected files of rollouts"):
        check_complete(config_of({"trainer": "offline"}))
