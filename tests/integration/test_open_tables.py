"""Tables that plugins of other people fill: objectives and columns in whole short runs, commands on the command line."""

import json
import shutil
import sys
import textwrap

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine_core import load_config
from engine_core.config.assemble import plugins_for
from engine_core.errors import ConfigError, PluginError, TrainingFailed


@pytest.fixture(scope="module")
def model(world, tmp_path_factory):
    """A model folder with weights, and the same model for values that a test works out itself."""
    folder = tmp_path_factory.mktemp("open") / "model"
    shutil.copytree(world / "model", folder)
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(4.0)  # else all tokens are about equally likely
    made.save_pretrained(folder)
    return folder, made.eval()


@pytest.fixture
def make(tmp_path, grpo, model, digits_plugin):
    """A trainer with settings and one-file plugins; all are closed at the end."""
    trainers = []

    def trainer_of(changes=None, *sources, **live):
        files = [tmp_path / f"plugin_{number}.py" for number in range(len(sources))]
        for file, source in zip(files, sources, strict=True):
            file.write_text(textwrap.dedent(source))
        settings = grpo | {
            "model.path": str(model[0]),
            "plugins": [str(digits_plugin), *map(str, files)],
            "reward": [{"name": "digits"}],
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


def module_of(run, kind, name):
    """The module of the plugin that offers a name in this process."""
    return run.plugins.chosen[kind, name][1].module


def expected(model, batch, temperature=1.0):
    """Log-probs and entropies [T] of a batch, one sequence after another, without anything of the engine."""
    log_probs, entropies = [], []
    for ids in batch.token_ids.split(batch.lengths.tolist()):
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1] / temperature
        distribution = torch.distributions.Categorical(logits=logits)
        log_probs.append(torch.cat([torch.zeros(1), distribution.log_prob(ids[1:])]))
        entropies.append(torch.cat([torch.zeros(1), distribution.entropy()]))
    mask = batch["loss_mask"]
    return torch.cat(log_probs) * mask, torch.cat(entropies) * mask


# ------------------------------------------------------------------ objectives

OBJECTIVES = """
    import torch

    from engine_core import hookimpl
    from engine_core.specs import SHARED_SECTIONS, Objective, TrainerSpec
    from engine_core.types import LossCall
    from engine_plugin_trainers.options import SFTOptions
    from engine_plugin_trainers.sft import SFTTrainer, example_batch

    SEEN = []


    class PowerTrainer(SFTTrainer):
        call = LossCall("CALLED", {"power": 2.0})

        def step(self, step):
            batch = example_batch(self.source.take(self.config_now.data.prompts_per_step))
            SEEN.append(batch)
            with self.phase("train"):
                return self.learn(batch, self.call)


    def power_of_surprise(outputs, batch, power):
        losses = (-outputs["log_probs"]).clamp(min=0) ** power
        summed = {"power/mean": (batch["token_share"] * losses.detach()).sum(), "max/power/most": losses.detach().max()}
        return (batch["weights"] * losses).sum(), summed


    def make_power_of_surprise(plugins, power):
        nll = plugins.require("objectives", "nll")

        def objective(outputs, batch):
            total, _ = nll({"log_probs": -((-outputs["log_probs"]).clamp(min=0) ** power)}, batch)
            return total, {"power/mean": total.detach()}

        return objective


    @hookimpl
    def engine_objectives():
        return {
            "power": Objective(load=power_of_surprise),
            "made": Objective(load="power_plugin:make_power_of_surprise", factory=True),
        }


    @hookimpl
    def engine_trainers():
        sections = SHARED_SECTIONS | {"power"}
        return {"power": TrainerSpec(load=PowerTrainer, config=SFTOptions, sections=sections)}
"""


@pytest.fixture
def power(install, make, world):
    """A trainer that an installed distribution offers, on the objective of this name."""

    def trainer_of(called, changes=None, source=OBJECTIVES):
        names = {
            "objectives": {"power": "power_plugin", "made": "power_plugin"},
            "trainers": {"power": "power_plugin"},
        }
        install("power-dist", names, {"power_plugin": source.replace("CALLED", called)})
        rows = str(world / "data" / "sft.jsonl")
        return make(
            {
                "trainer": "power",
                "data.train": rows,
                "data.validation": None,
                "reward": None,
                **(changes or {}),
            }
        )

    return trainer_of


@pytest.mark.parametrize("called", ["power", "made"])
@pytest.mark.parametrize("most", [8192, 40])
def test_an_objective_of_a_plugin_is_the_loss_that_is_worked_out_by_hand(power, model, called, most):
    run = power(called, {"actor.max_tokens_per_rank": most, "run.steps": 1})
    run.train()

    (batch,) = module_of(run, "trainers", "power").SEEN
    (line,) = metrics_of(run)
    log_probs, _ = expected(model[1], batch)
    by_hand = (log_probs**2)[batch["loss_mask"]].mean()
    assert line["actor/loss"] == pytest.approx(float(by_hand), rel=1e-4)
    assert line["power/mean"] == pytest.approx(float(by_hand), rel=1e-4)
    assert (line["actor/micro_batches"] > 1) == (most == 40)
    if called == "power":
        assert line["power/most"] == pytest.approx(float((log_probs**2).max()), rel=1e-4)


def test_an_objective_of_a_plugin_is_learned(power):
    run = power("power", {"run.steps": 6, "data.shuffle": False, "data.prompts_per_step": 64})
    run.train()

    losses = [line["actor/loss"] for line in metrics_of(run)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_a_worker_in_another_process_loads_the_objective_itself(make, model, world):
    source = OBJECTIVES.replace("CALLED", "power").replace(
        '"power_plugin:make_power_of_surprise"', "make_power_of_surprise"
    )
    rows = {"data.train": str(world / "data" / "sft.jsonl"), "data.validation": None, "reward": None}
    run = make({"trainer": "power", "runtime.backend": "torchrun", "run.steps": 1, **rows}, source)
    run.train()

    (batch,) = module_of(run, "trainers", "power").SEEN
    by_hand = (expected(model[1], batch)[0] ** 2)[batch["loss_mask"]].mean()
    assert metrics_of(run)[0]["actor/loss"] == pytest.approx(float(by_hand), rel=1e-4)


def test_a_sampler_that_calls_exit_fails_the_run(make, monkeypatch):
    from engine_plugin_hf_rollout.engine import HFRolloutEngine

    monkeypatch.setattr(HFRolloutEngine, "step", lambda self: sys.exit(0))
    with pytest.raises(TrainingFailed, match=r"called sys.exit\(0\) during the run"):
        make({"run.steps": 1}).train()


FAILS = [
    ("pover", "", "", r"Unknown objective 'pover'\. Did you mean 'power'\?"),
    ("power", '{"power": 2.0}', '{"exponent": 2.0}', r"objective 'power' failed: TypeError: .*'exponent'"),
    ("power", '"weights"] *', '"wieghts"] *', r"objective 'power' failed: KeyError: .*no column 'wieghts'.*power_plugin\.py"),
    ("made", '"objectives", "nll"', '"objectives", "nl"', r"Unknown objective 'nl'\. Did you mean 'nll'\?"),
    ("power", "batch = e", "SEEN[step]; batch = e", r"trainer 'power' failed: IndexError: .*power_plugin\.py:\d+: SEEN"),
    ("power", "batch = e", "self.plugins.require('objectives', 'nl'); batch = e", "^Unknown objective 'nl'"),
    ("power", "def step", "def prepare(self): raise SystemExit(3)\n\n        def step", "trainer 'power' failed: SystemExit: 3"),
    ("power", "def step", "def state(self): return 1 / 0\n\n        def step", "trainer 'power' failed: ZeroDivisionError: "),
    ("power", "def step", "def state(self): return {'a': 1, 'all': {1}}\n\n        def step", r"gives 'all' = \{1\}, which cannot"),
]  # fmt: skip


@pytest.mark.parametrize(("called", "old", "new", "said"), FAILS)
def test_an_objective_or_a_trainer_that_fails_is_named_with_its_plugin(power, called, old, new, said):
    if "failed" in said:
        said = r"Plugin 'power' \(power-dist 1\.0\): " + said
    with pytest.raises(PluginError, match=said):
        power(called, source=OBJECTIVES.replace(old, new)).train()


# ------------------------------------------------------------------ columns

COLUMNS = """
    import torch

    from engine_core import hookimpl
    from engine_core.specs import Advantage, Column

    SEEN = []


    def surprise(batch):
        return -batch["old_log_probs"]


    def mean_surprise(batch):
        return batch.sum_by_sequence(batch["surprise"]) / batch["response_lengths"]


    def calm(batch):
        SEEN.append(batch)
        return batch.to_tokens(batch["rewards"] - batch["mean_surprise"]) - batch["ref_entropy"]


    @hookimpl
    def engine_columns():
        return {
            "ref_entropy": Column(role="ref", output="entropy"),
            "mean_surprise": Column(load=mean_surprise, needs=frozenset({"surprise", "response_lengths"})),
            "surprise": Column(load=surprise, needs=frozenset({"old_log_probs"})),
        }


    @hookimpl
    def engine_advantages():
        needs = frozenset({"rewards", "mean_surprise", "ref_entropy"})
        return {"calm": Advantage(load=calm, needs=needs)}
"""
CALM = {"algorithm.advantage": "calm", "actor.optim.lr": 1e-2}


def test_columns_of_a_plugin_have_the_right_values_in_every_step(make, model):
    run = make(CALM | {"rollout.temperature": 0.8}, COLUMNS)
    run.train()

    assert "ref" in run.groups
    first, second = module_of(run, "advantages", "calm").SEEN
    log_probs, _ = expected(model[1], first, 0.8)
    assert torch.allclose(first["surprise"], -log_probs, atol=1e-4)
    for batch in (first, second):
        _, entropy = expected(model[1], batch, 0.8)  # the reference stays as it was
        assert torch.allclose(batch["ref_entropy"], entropy, atol=1e-4)
        assert torch.equal(batch["surprise"], -batch["old_log_probs"])
        assert torch.allclose(
            batch["old_log_probs"], batch["rollout_log_probs"] * batch["loss_mask"], atol=1e-4
        )
        means = [
            float(values.sum() / mask.sum())
            for values, mask in zip(
                batch["surprise"].split(batch.lengths.tolist()),
                batch["loss_mask"].split(batch.lengths.tolist()),
                strict=True,
            )
        ]
        assert batch["mean_surprise"].tolist() == pytest.approx(means, rel=1e-5)
    log_probs, _ = expected(model[1], second, 0.8)
    assert not torch.allclose(second["surprise"], -log_probs, atol=1e-3)  # the policy moved


def test_columns_of_a_plugin_in_an_installed_distribution_are_found_by_their_names(make, install):
    install(
        "calm-dist",
        {
            "advantages": {"calm": "calm_plugin"},
            "columns": dict.fromkeys(["surprise", "mean_surprise", "ref_entropy"], "calm_plugin"),
        },
        {"calm_plugin": COLUMNS},
    )
    run = make(CALM | {"run.steps": 1})
    run.train()

    (batch,) = module_of(run, "columns", "surprise").SEEN
    assert torch.equal(batch["surprise"], -batch["old_log_probs"])
    assert run.plugins.versions()["calm-dist"] == "1.0"


def test_with_bypass_a_derived_column_reads_the_samplers_log_probs(make):
    run = make(CALM | {"algorithm.correction.bypass": True, "run.steps": 1}, COLUMNS)
    run.train()

    (batch,) = module_of(run, "advantages", "calm").SEEN
    assert torch.equal(batch["surprise"], -batch["rollout_log_probs"])


def test_a_column_may_come_from_the_teacher(make, model):
    source = COLUMNS.replace('role="ref"', 'role="teacher"')
    run = make(CALM | {"teacher.path": str(model[0]), "run.steps": 1}, source)
    assert run.config.unread == []
    run.train()

    assert "ref" not in run.groups
    (batch,) = module_of(run, "advantages", "calm").SEEN
    assert torch.allclose(batch["ref_entropy"], expected(model[1], batch)[1], atol=1e-4)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            '{"old_log_probs"}',
            '{"mean_surprise"}',
            "The column 'mean_surprise' needs itself, by way of mean_surprise and surprise",
        ),
        (
            '{"old_log_probs"}',
            '{"old_log_prob"}',
            "The column 'surprise' needs 'old_log_prob', which nothing in this run makes. Did you mean 'old_log_probs'",
        ),
        (
            '"mean_surprise", "ref_entropy"',
            '"mean_suprise"',
            "algorithm.advantage = 'calm' needs the column 'mean_suprise', which nothing in this run makes",
        ),
        ('role="ref"', 'role="reff"', "The column 'ref_entropy' has role = 'reff'"),
        (
            'output="entropy"',
            'output="entropie"',
            "The column 'ref_entropy' has role = 'ref' and output = 'entropie'",
        ),
        (
            'role="ref", output="entropy"',
            'role="critic", output="values"',
            "The column 'ref_entropy' comes from the critic, .* algorithm.advantage = 'calm' must need 'values' itself",
        ),
    ],
)
def test_columns_that_nothing_makes_are_refused_before_the_run_begins(make, old, new, said):
    with pytest.raises(ConfigError, match=said):
        make(CALM, COLUMNS.replace(old, new))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "torch.zeros(3)",
            r"The column 'surprise' must be \[T\] = \[\d+\] or \[B\] = \[16\]; its function gave \[3\]",
        ),
        ("[0.0]", r"The column 'surprise' must be .* its function gave list"),
        ('batch["old_log_probs"].log()', "The column 'surprise' has a value that is not finite"),
        (
            '-batch["old_log_prbs"]',
            r"Plugin file '.*' \(sha256:\w+\): column 'surprise' failed: KeyError: .*no column 'old_log_prbs'",
        ),
    ],
)
def test_a_column_that_cannot_be_used_ends_the_run_before_any_weight_changes(make, monkeypatch, body, said):
    steps = []
    monkeypatch.setattr(
        "engine_plugin_torch.engine.TorchEngine.optimizer_step", lambda engine: steps.append(engine)
    )
    run = make(CALM, COLUMNS.replace('return -batch["old_log_probs"]', f"return {body}"))

    with pytest.raises(PluginError, match=said):
        run.train()
    assert steps == []


# ------------------------------------------------------------------ commands

COMMANDS = """
    from engine_core import hookimpl
    from engine_core.specs import Command


    def hello(name: str = "world", loud: bool = False):
        "Greet somebody."
        print(f"hello {name}" + "!" * loud)


    def fast(count: int):
        "Measure fast."
        print(count + 1)


    def slow():
        "Measure slowly."
        print("slow")


    @hookimpl
    def engine_commands():
        return {
            "hello": Command(load=hello),
            "measure.fast": Command(load=fast),
            "measure.slow": Command(load="hello_plugin:slow"),
        }
"""
OFFERED = {"commands": dict.fromkeys(["hello", "measure.fast", "measure.slow"], "hello_plugin")}


@pytest.fixture
def greeting(install, engine):
    """The command line, with a distribution that offers commands."""
    install("hello-dist", OFFERED, {"hello_plugin": COMMANDS})
    return engine


def test_a_command_of_a_plugin_runs_with_its_options(greeting):
    assert greeting("hello") == (0, "hello world\n", "")
    assert greeting("hello", "--name", "engine", "--loud") == (0, "hello engine!\n", "")
    wrong = greeting("hello", "--nme", "x")
    assert (wrong.code, wrong.out) == (2, "")
    assert "See 'engine hello --help'" in wrong.err


def test_the_help_lists_commands_and_groups_of_plugins(greeting):
    listed = [line.split(maxsplit=1) for line in greeting("--help").out.splitlines() if line.startswith("  ")]

    assert ["hello", "Greet somebody."] in listed
    assert ["measure", "Commands: fast, slow."] in listed
    assert "Greet somebody." in greeting("hello", "--help").out


def test_a_group_of_commands_has_a_help_and_runs_each(greeting):
    group = greeting("measure")

    assert group.code == 0
    for line in ("  Commands: fast, slow.", "  fast  Measure fast.", "  slow  Measure slowly."):
        assert line in group.out.splitlines()
    assert greeting("measure", "fast", 2).out == "3\n"
    assert greeting("measure", "slow").out == "slow\n"
    unknown = greeting("measure", "slw")
    assert unknown.code == 2
    assert "Unknown command 'measure.slw'. Did you mean 'measure.slow'?" in unknown.err


def test_a_command_of_a_broken_plugin_is_its_own_problem_alone(greeting, install):
    broken = {"commands": {"bad": "bad_plugin", "measure.bad": "bad_plugin"}}
    install("bad-dist", broken, {"bad_plugin": "raise RuntimeError('boom')"})

    for words in (["bad"], ["measure", "bad"]):
        answer = greeting(*words)
        assert answer.code == 3
        assert "(bad-dist 1.0) is broken, it does not import: RuntimeError: boom" in answer.err
    assert greeting("hello").out == "hello world\n"
    assert greeting("measure", "fast", 2).out == "3\n"
    assert "  slow  Measure slowly." in greeting("measure").out.splitlines()
    shown = greeting("--help")
    assert shown.code == 0
    assert "Greet somebody." in shown.out
    assert "  Commands: bad, fast, slow." in greeting("measure").out.splitlines()


def test_a_command_that_two_plugins_offer_names_both_and_the_words_that_choose(greeting, install):
    other = COMMANDS.replace("hello {name}", "good day {name}").replace("hello_plugin", "day_plugin")
    install("day-dist", {"commands": {"hello": "day_plugin"}}, {"day_plugin": other})

    answer = greeting("hello")
    assert answer.code == 3
    assert (
        "Command 'hello' is offered by day-dist 1.0 and by hello-dist 1.0. "
        "Write 'day-dist:hello' or 'hello-dist:hello'." in answer.err
    )
    assert greeting("day-dist:hello").out == "good day world\n"
    assert greeting("hello-dist:hello").out == "hello world\n"
    assert greeting("--help").code == 0
