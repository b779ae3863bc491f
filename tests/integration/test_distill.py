"""Distillation as whole runs: what the student learns, what resumes, what the parts of a step change, what is refused."""

import json
import random
import shutil

import pytest
import torch

from engine_core import load_config
from engine_core.config.assemble import check_inputs, plugins_for
from engine_core.errors import ConfigError
from engine_core.runs.checkpoint import Checkpoints, read_state

ROWS = [
    {"prompt": f"{a} + {b} = ", "response": str(a + b), "answer": a + b} for a in range(5) for b in range(5)
]
random.Random(0).shuffle(ROWS)
HELD_OUT, TRAIN = ROWS[:8], ROWS[8:] * 4


def run(name, changes, rows=TRAIN, **live):
    config = load_config(overrides={"trainer": name, "tracking.trackers": [], **changes})
    return plugins_for(config).resolve("trainers", name)(config, data=rows, **live)


@pytest.fixture(scope="module")
def schooled(world, tmp_path_factory):
    """``schooled(steps)``: the folder of a model that has seen sums for so many steps."""
    folder = tmp_path_factory.mktemp("schooled")

    def of(steps):
        if not (folder / str(steps)).exists():
            changes = {
                "model.path": str(world / "model"),
                "run.dir": str(folder / "runs"),
                "run.steps": steps,
            }
            trainer = run("sft", {**changes, "actor.optim.lr": 1e-2, "data.prompts_per_step": 25})
            trainer.train()
            trainer.export(folder / str(steps))
            trainer.close()
        return folder / str(steps)

    return of


@pytest.fixture
def teacher(schooled):
    return schooled(40)


@pytest.fixture
def made(world, teacher, tmp_path):
    """A trainer with these settings on a student that knows nothing; all are closed at the end."""
    heldout, trainers = tmp_path / "heldout.jsonl", []
    heldout.write_text("".join(json.dumps(row) + "\n" for row in HELD_OUT))

    def make(changes=None, name="distill", **live):
        settings = {
            "model.path": str(world / "model"),
            "teacher.path": str(teacher),
            "data.validation": str(heldout),
            "data.prompts_per_step": 8,
            "rollout.group_size": 2,
            "rollout.max_response_tokens": 3,
            "actor.optim.lr": 1e-2,
            "run.dir": str(tmp_path / "runs"),
            "run.steps": 2,
            **(changes or {}),
        }
        trainer = run(name, settings, **live)
        trainers.append(trainer)
        return trainer

    yield make
    for trainer in trainers:
        trainer.close()


def lines_of(folder):
    dropped = ("time", "throughput", "memory", "sync/seconds")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(dropped)} for line in lines]


LEARNS = {
    "reverse": ({"run.steps": 40}, 0.5),
    "forward": ({"run.steps": 25, "distill.divergence": "forward_kl", "distill.top_k": 16}, 0.2),
    "jsd, half from the data": (
        {"run.steps": 25, "distill.divergence": "jsd", "distill.data_share": 0.5, "distill.top_k": 0},
        0.2,
    ),
}


@pytest.mark.parametrize("case", LEARNS)
def test_the_student_comes_to_the_teacher_on_prompts_that_it_has_not_seen(made, case):
    changes, most = LEARNS[case]
    trainer = made({**changes, "data.prompts_per_step": 25, "eval.at_start": True, "eval.at_end": True})
    trainer.train()
    before, *_, after = [
        line["eval/divergence"] for line in lines_of(trainer.folder.path) if "eval/divergence" in line
    ]
    assert after < most * before
    assert "reward/mean" not in lines_of(trainer.folder.path)[-1]


def test_the_policy_gradient_comes_to_the_teacher_without_any_reward(made, schooled):
    changes = {"algorithm.advantage": "distill", "algorithm.mini_batch_prompts": 8, "actor.optim.lr": 2e-3}
    changes |= {"data.prompts_per_step": 24, "rollout.group_size": 4, "run.steps": 20}
    trainer = made({**changes, "model.path": str(schooled(12))}, name="rl")
    trainer.train()
    assert set(trainer.groups) == {"actor", "teacher", "rollout"}
    gaps = [line["actor/teacher_gap"] for line in lines_of(trainer.folder.path)]
    assert sum(gaps[-5:]) / 5 < 0.5 * gaps[0]


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(made, tmp_path):
    settings = {"run.steps": 4, "checkpoint.every_steps": 2, "eval.every_steps": 2, "distill.data_share": 0.5}
    settings["run.fail_above"] = {"mismatch/mean_abs": 5.0}  # a step from the data does not measure it
    straight = made({**settings, "run.name": "straight", "run.seed": 3})
    straight.train()
    straight.close()
    folder, copy = straight.folder.path, tmp_path / "runs" / "again"
    assert {line["distill/from_data"] for line in lines_of(folder) if line["step"]} == {0.0, 1.0}
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "checkpoints" / "step_00000004")
    made({**settings, "run.name": "again", "run.seed": 3}).train(resume=copy)
    assert lines_of(copy) == lines_of(folder)
    states = []
    for each in (folder, copy):
        path = Checkpoints(each / "checkpoints").latest()
        state = read_state(path)
        assert not (path / "teacher").exists()  # it never changes
        files = {f.name: f.read_bytes() for f in sorted((path / "actor").iterdir())}
        states.append(({key: state[key] for key in ("step", "data", "trainer", "random")}, files))
    assert states[0] == states[1]


def gradient(trainer, most, budget):
    """The batch, loss, parts and gradient of one step done in parts of so many values, micro-batches of so many tokens."""
    trainer.setup(training=True)
    engine = trainer.runtime.engines["actor"]
    engine.set_token_budget(budget)
    trainer.settings.now = trainer.config_now.model_copy(
        update={"options": trainer.options.model_copy(update={"max_values": most})}
    )
    batch, _ = trainer.sampled(1)
    parts = [trainer.with_teacher(part) for part in trainer.parts(trainer.compared(batch))]
    outputs = [trainer.forward_backward(part, trainer.loss_call()) for part in parts]
    flat = torch.cat([w.grad.flatten() for w in engine.module.parameters() if w.grad is not None])
    engine.module.zero_grad()
    return batch, sum(output.loss for output in outputs), len(parts), flat.clone()


@pytest.mark.parametrize("changes", [{}, {"distill.temperature": 1.7, "distill.divergence": "jsd"}])
def test_parts_and_micro_batches_of_any_size_give_one_gradient(made, changes):
    whole, alone = made(changes), made(changes)
    _, loss, one, expected = gradient(whole, 10**9, 10_000)
    _, found, many, parts = gradient(alone, 2000, 16)
    assert (one, many > 4) == (1, True)
    assert found == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(parts, expected, rtol=1e-3, atol=1e-6)


def test_the_loss_of_a_step_is_the_divergence_of_the_two_models_in_float64(made, world, teacher):
    from transformers import AutoConfig, AutoModelForCausalLM

    trainer = made({"distill.top_k": 0, "distill.temperature": 0.7, "actor.max_tokens_per_rank": 20})
    batch, loss, _, _ = gradient(trainer, 10**9, 20)
    student = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(world / "model"), dtype=torch.float64
    )
    own = {name: w.double() for name, w in trainer.runtime.engines["actor"].named_weights()}
    student.load_state_dict(own, strict=False)  # tied weights come once
    models = [student, AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)]
    costs = []
    for ids, mask in zip(
        *(t.split(batch.lengths.tolist()) for t in (batch.token_ids, batch["loss_mask"])), strict=True
    ):
        with torch.no_grad():
            s, t = ((m(ids[None]).logits[0, :-1] / 0.7).softmax(-1) for m in models)
        costs.append((s * (s / t).log()).sum(-1)[mask[1:]])
    assert loss == pytest.approx(torch.cat(costs).mean().item(), rel=1e-4)


def test_a_student_that_is_its_teacher_learns_nothing(made, teacher):
    trainer = made({"model.path": str(teacher), "run.steps": 1, "distill.top_k": 5})
    metrics = trainer.train()
    assert abs(metrics["actor/loss"]) < 1e-6
    assert metrics["actor/grad_norm"] < 1e-5


def test_a_reward_measures_and_is_not_learned(made):
    trainer = made({"eval.at_end": True}, rewards=[lambda completions: [1.0] * len(completions)])
    metrics = trainer.train()
    assert metrics["reward/mean"] == metrics["eval/accuracy"] == 1.0


def test_settings_of_the_table_change_by_step(made):
    trainer = made({"schedule": {"distill.data_share": [[2, 1.0]]}, "run.steps": 3})
    trainer.train()
    assert [line["distill/from_data"] for line in lines_of(trainer.folder.path)] == [0.0, 1.0, 1.0]


def test_a_run_without_a_teacher_is_refused_before_anything_is_built(made):
    with pytest.raises(
        ConfigError, match=r"teacher\.path: missing\. Trainer 'distill' learns from a teacher"
    ):
        made({"teacher.path": ""})
    policy = {"teacher.path": "", "algorithm.advantage": "distill"}
    with pytest.raises(
        ConfigError, match=r"teacher\.path: missing\. algorithm\.advantage = 'distill' learns"
    ):
        made(policy, name="rl")


def test_more_candidates_than_tokens_are_refused(made):
    with pytest.raises(
        ConfigError, match=r"distill\.top_k: got 5000, expected at most \d+, the number of tokens"
    ):
        made({"distill.top_k": 5000}).setup()


@pytest.fixture
def other(teacher, tmp_path):
    """A copy of the teacher whose files may be changed."""
    folder = tmp_path / "other"
    shutil.copytree(teacher, folder)
    return folder


def test_a_teacher_of_other_tokens_is_refused_with_the_first_of_them(made, other):
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[20:22]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(
        ConfigError, match=r"has another tokenizer than the student: 2 of \d+ ids differ: id 20 is"
    ):
        made({"teacher.path": str(other)}).setup()
    with pytest.raises(ConfigError, match="has another tokenizer than the student"):
        made({"teacher.path": str(other), "algorithm.advantage": "distill"}, name="rl").setup()


def test_a_teacher_of_another_size_of_vocabulary_is_refused_with_a_way_out(made, other):
    path = other / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 1000}))
    with pytest.raises(
        ConfigError, match=r"gives 1000 tokens \(vocab_size\), the student's \d+.*advantage = \"distill\""
    ):
        made({"teacher.path": str(other)}).setup()


def test_a_teacher_without_a_tokenizer_is_refused_without_torch(made, other):
    for file in other.glob("tokenizer*"):
        file.unlink()
    trainer = made({"teacher.path": str(other)})
    (problem,) = [text for text in check_inputs(trainer.config) if "teacher.path" in text]
    assert "has no tokenizer.json or" in problem
    assert problem.endswith("Expected the teacher's tokenizer there, to compare it with the student's.")


def test_a_live_student_of_another_size_of_vocabulary_is_refused(made, teacher):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(teacher)
    config.vocab_size += 2
    student = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        ConfigError, match=rf"the student's {config.vocab_size}, so their distributions cannot be"
    ):
        made(model=student, tokenizer=AutoTokenizer.from_pretrained(teacher)).setup()


SHORT_OF_WORDS = """
from engine_core import hookimpl
from engine_plugin_vllm_rollout.frozen_engine import FrozenEngine
from engine_core.errors import ConfigError
from engine_core.specs import TrainBackend


class Few(FrozenEngine):
    def infer(self, batch, outputs, adapter=True):
        raise ConfigError(f"{batch.top_k} tokens are more than it tells.")


@hookimpl
def engine_train_engines():
    return {"few": TrainBackend(load=Few, frozen_only=True)}
"""


def test_a_teacher_that_tells_too_little_is_found_out_before_anything_is_sampled(
    world, teacher, tmp_path, monkeypatch
):
    (tmp_path / "few.py").write_text(SHORT_OF_WORDS)
    monkeypatch.chdir(tmp_path)
    settings = {
        "trainer": "distill",
        "plugins": ["few.py"],
        "model.path": str(world / "model"),
        "teacher.path": str(teacher),
        "teacher.backend": "few",
        "distill.top_k": 17,
        "data.train": str(world / "data" / "train.jsonl"),
        "run.dir": str(tmp_path / "runs"),
    }
    too_few, at_temperature_1 = (
        "17 tokens are more than it tells",
        r"distill\.temperature: teacher\.backend = 'few' tells",
    )
    for changes, words in (({}, too_few), ({"distill.temperature": 0.5}, at_temperature_1)):
        config = load_config(overrides=settings | changes)
        trainer = plugins_for(config).resolve("trainers", "distill")(config)
        with pytest.raises(ConfigError, match=words):
            trainer.setup(training=True)
        trainer.close()
