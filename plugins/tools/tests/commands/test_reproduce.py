"""engine manifest and engine reproduce, on tiny runs."""

from __future__ import annotations

import json
import shutil

import pytest

from engine_plugin_tools.replaying import first_difference


@pytest.fixture
def manifest(engine, sft_run, tmp_path):
    """A manifest with data of a supervised run of two steps, each with a checkpoint."""
    assert engine("train", "run.toml").code == 0
    made = engine("manifest", "first", "-o", "run.json", "--data")
    assert made.code == 0, made.err
    assert "run.json: 2 steps" in made.out
    return tmp_path / "run.json"


def change(manifest, edit):
    """Rewrite a manifest after ``edit`` of its fields."""
    fields = json.loads(manifest.read_text())
    edit(fields)
    manifest.write_text(json.dumps(fields))


def test_an_unchanged_run_is_equal_in_every_number_and_in_its_weights(engine, manifest, tmp_path):
    fields = json.loads(manifest.read_text())
    assert list(fields["weights"]) == ["1", "2"]
    assert fields["steps"]["1"]["actor/loss"] == pytest.approx(fields["steps"]["1"]["actor/nll"])
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir())
    answer = engine("reproduce", "run.json")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == "Everything is as recorded.\nstep 1: equal\nstep 2: equal\n"
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == runs


def test_a_run_with_other_settings_differs_with_the_numbers_of_its_first_differing_step(engine, manifest):
    answer = engine("reproduce", "run.json", "--set", "actor.optim.lr=0.5", "--json")
    assert answer.code == 7
    found = json.loads(answer.out)
    assert found["steps"] == 2
    assert {"step": 2, "number": "actor/weights.safetensors"}.items() <= found["differences"][-1].items()
    names = {row["number"] for row in found["differences"] if row["step"] == 1}
    assert names == {"actor/lr", "actor/weights.safetensors"}
    assert found["first"].startswith("The first part that differs: update (actor/weights.safetensors: ")


def test_weights_that_are_not_as_recorded_are_found_although_the_metrics_are_equal(engine, manifest):
    change(manifest, lambda fields: fields["weights"]["2"].update({"actor/weights.safetensors": "0" * 64}))
    answer = engine("reproduce", "run.json")
    assert answer.code == 7
    assert "step 1: equal\nstep 2: 1 numbers differ" in answer.out
    assert "2     actor/weights.safetensors  000000000000" in answer.out


CHANGES = {
    "rollout.temperature=0.7": "samples",
    "run.seed=5": "samples",
    "model.seed=5": "samples",
    "rollout.max_response_tokens=7": "samples",
    "reward.python.weight=0.5": "rewards",
    "reward.python.python.function=letters": "rewards",
    "actor.torch.param_dtype=bf16": "log-probs",
    "algorithm.advantage=rloo": "advantages or loss",
    "algorithm.loss_aggregation=seq-mean-token-sum": "advantages or loss",
    "algorithm.entropy_coef=0.1": "advantages or loss",
    "actor.optim.max_grad_norm=1e-6": "update",
    "actor.optim.lr=0.3": "update",
    "actor.optim.weight_decay=0.5": "update",
}


@pytest.mark.slow
def test_a_changed_part_is_named_as_the_first_that_differs(engine, grpo_run):
    assert engine("train", "grpo.toml", "--set", "run.name=first").code == 0
    assert engine("manifest", "first", "-o", "run.json").code == 0
    for setting, part in CHANGES.items():
        answer = engine("reproduce", "run.json", "--steps", "1", "--set", setting, "--json")
        assert answer.code == 7, setting
        first = json.loads(answer.out)["first"]
        assert f"The first part that differs: {part} (" in first, setting


def test_a_band_allows_twice_the_difference_between_repeats(engine, manifest):
    def edit(fields):
        fields["steps"]["1"]["actor/loss"] *= 1.001
        fields["weights"]["1"] = {"actor/weights.safetensors": "0" * 64}

    change(manifest, edit)
    assert engine("reproduce", "run.json", "--steps", "1").code == 7
    change(manifest, lambda fields: fields.update(band={"actor/loss": 0.0006}))
    assert engine("reproduce", "run.json").code == 0
    change(manifest, lambda fields: fields.update(band={"actor/loss": 0.0004}))
    assert engine("reproduce", "run.json").code == 7


def test_the_band_is_the_largest_relative_difference_to_the_repeats(engine, manifest, tmp_path):
    shutil.copytree(tmp_path / "runs/first", tmp_path / "runs/second")
    file = tmp_path / "runs/second/metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if row["step"]:
            row["actor/loss"] *= 1 + 0.01 * row["step"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert engine("manifest", "first", "-o", "band.json", "--repeat", "second").code == 0
    band = json.loads((tmp_path / "band.json").read_text())["band"]
    assert band == {"actor/loss": pytest.approx(0.02 / 1.02)}


def test_a_changed_line_of_code_is_named_with_both_texts(engine, rl_run, tmp_path):
    assert engine("train", "rl.toml").code == 0
    assert engine("manifest", "first", "-o", "run.json").code == 0
    code = (tmp_path / "dice.py").read_text().splitlines()
    at = next(number for number, line in enumerate(code) if "isdigit" in line or "digit" in line)
    changed = [*code[:at], code[at] + "  # changed", *code[at + 1 :]]
    (tmp_path / "dice.py").write_text("\n".join(changed) + "\n")
    answer = engine("reproduce", "run.json", "--check")
    assert answer.code == 0
    (row,) = [line for line in answer.out.splitlines() if "dice.py" in line or "plugins[0]" in line]
    assert row.startswith(f"plugins[0], line {at + 1}")
    assert row.split("  ")[-2:] != row
    assert row.endswith(f"{code[at].strip()}  # changed")


def test_absent_files_are_taken_from_the_manifest_and_code_only_if_allowed(engine, rl_run, tmp_path):
    assert engine("train", "rl.toml").code == 0
    assert engine("manifest", "first", "-o", "run.json", "--data").code == 0
    for name in ("dice.py", "rows.jsonl"):
        (tmp_path / name).unlink()
    refused = engine("reproduce", "run.json")
    assert refused.code == 2
    assert "dice.py' here. The manifest holds it; --allow-code writes it and runs it." in refused.err
    assert not (tmp_path / "run.files").exists()
    answer = engine("reproduce", "run.json", "--allow-code")
    assert answer.code == 0, answer.out + answer.err
    assert sorted(path.name for path in (tmp_path / "run.files").rglob("*.*")) == [
        "dice.py",
        "rows.jsonl",
        "rows.jsonl",
    ]


def test_a_file_that_the_manifest_does_not_hold_is_set_by_hand(engine, manifest, tmp_path):
    change(
        manifest,
        lambda fields: [
            fields["inputs"][key][""].update(content=None) for key in ("data.train", "data.validation")
        ],
    )
    (tmp_path / "rows.jsonl").rename(tmp_path / "moved.jsonl")
    refused = engine("reproduce", "run.json")
    assert refused.code == 4
    assert "rows.jsonl' here, and the manifest does not hold it. Use --set data.train=PATH." in refused.err
    moved = [word for key in ("train", "validation") for word in ("--set", f"data.{key}=moved.jsonl")]
    assert engine("reproduce", "run.json", *moved).code == 0


def test_a_package_of_another_version_and_an_absent_weight_file_are_listed(engine, manifest, tmp_path):
    def edit(fields):
        fields["packages"]["torch"] = fields["environment"]["packages"]["torch"] = "1.0"
        fields["inputs"]["model.path"]["model.safetensors"] = {"sha256": "0" * 64}

    change(manifest, edit)
    answer = engine("reproduce", "run.json", "--check", "--json")
    items = {row["item"]: row for row in json.loads(answer.out)["changed"]}
    assert items["package torch"]["recorded"] == "1.0"
    assert (
        items["model.path model.safetensors"]["recorded"],
        items["model.path model.safetensors"]["here"],
    ) == ("exists", "-")


def test_secrets_are_left_out_and_asked_for(engine, sft_run, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED_API_KEY", "planted-secret-value")
    (tmp_path / "planted-secret-value").mkdir()
    shutil.copy(tmp_path / "rows.jsonl", tmp_path / "planted-secret-value/rows.jsonl")
    assert engine("train", "run.toml", "--set", "data.train=planted-secret-value/rows.jsonl").code == 0
    assert engine("manifest", "first", "-o", "run.json").code == 0
    assert "planted-secret-value" not in (tmp_path / "run.json").read_text()
    answer = engine("reproduce", "run.json")
    assert answer.code == 2
    assert "data.train: the manifest leaves out this secret. Use --set data.train=VALUE." in answer.err


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda fields: fields.pop("config"), "is not a manifest: config: Field required"),
        (lambda fields: fields.update(format=2), "is not a manifest: format: Input should be 1"),
        (lambda fields: fields.update(extra=1), "is not a manifest: extra: Extra inputs are not permitted"),
        (
            lambda fields: fields["inputs"]["data.train"][""].update(content="aGk="),
            "the content does not have the hash",
        ),
    ],
)
def test_a_damaged_manifest_is_refused_with_its_field(edit, message, engine, manifest):
    change(manifest, edit)
    answer = engine("reproduce", "run.json")
    assert answer.code == 4
    assert message in answer.err


def test_nothing_is_overwritten_and_a_run_without_steps_has_no_manifest(engine, manifest, tmp_path):
    assert engine("manifest", "first", "-o", "run.json").code == 2
    (tmp_path / "runs/first/metrics.jsonl").write_text("")
    answer = engine("manifest", "first", "-o", "other.json")
    assert answer.code == 4
    assert "first has not finished a step" in answer.err


def test_numbers_that_are_nan_in_both_are_equal_and_one_that_became_nan_is_not():
    nan = float("nan")
    assert first_difference({"actor/loss": (nan, nan), "mismatch/kl": (nan, nan)}, 1) == ""
    assert "advantages or loss (actor/loss: 1, now nan" in first_difference({"actor/loss": (1.0, nan)}, 1)
    assert "log-probs (mismatch/kl: 0.1, now nan" in first_difference({"mismatch/kl": (0.1, nan)}, 1)
