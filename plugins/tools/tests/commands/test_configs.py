"""validate, config show, schema."""

from __future__ import annotations

import json
import tomllib

from engine_core.config import EngineConfig
from engine_core.plugins.metadata import known_names

MINE = """\
from engine_core import hookimpl
from engine_core.specs import Options, Reward

class Words(Options):
    words: int = 3
    '''Most words.'''

def both(completion, prompts):
    return 1.0

def deaf(completions):
    return [1.0 for _ in completions]

@hookimpl
def engine_rewards():
    return {"both": Reward(load=both), "deaf": Reward(load=deaf, config=Words)}
"""


def test_validate_says_that_a_file_is_valid_and_what_is_not_read(engine, sft_run):
    sft_run.write_text(sft_run.read_text() + "\n[actor.fsdp]\nsharding = 'full'\n")
    answer = engine("validate", "run.toml")
    assert answer.code == 0
    assert answer.out == (
        "run.toml: valid, trainer 'sft'. Next: engine train --dry-run\nnot read: [actor.fsdp]: the run uses 'torch'\n"
        "actor: models of type 'qwen3' are tested with torch\n"
    )


def test_validate_says_of_each_role_whether_its_backend_was_tested_with_models_of_this_type(engine, rl_run):
    assert engine("validate", "rl.toml").out.splitlines()[1:] == [
        "actor: models of type 'qwen3' are tested with torch"  # the sampler's plugin declares no families
    ]
    assert json.loads(engine("validate", "rl.toml", "--json").out)["models"] == [
        {
            "role": "actor",
            "backend": "torch",
            "model_type": "qwen3",
            "tested": True,
            "message": "models of type 'qwen3' are tested with torch",
        }
    ]


def test_validate_says_nothing_of_a_model_whose_type_it_cannot_read(engine, rl_run):
    answer = engine("validate", "rl.toml", "--set", "model.path=no-such-org/no-such-model")
    assert (answer.code, answer.err) == (0, "")
    assert len(answer.out.splitlines()) == 1


def test_validate_tells_all_problems_with_file_and_line(engine, sft_run):
    text = (
        sft_run.read_text().replace("steps = 2", "stesp = 2").replace("every_steps = 1", "every_steps = -1")
    )
    sft_run.write_text(text)
    answer = engine("validate", "run.toml", "--set", "actor.optim.lr=fast")
    assert answer.code == 2
    assert answer.out == ""
    lines = answer.err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("engine: ") for line in lines)
    line = 1 + text.splitlines().index("stesp = 2")
    assert f"run.toml:{line}: run.stesp: unknown key. Did you mean 'steps'?" in answer.err
    assert "checkpoint.every_steps: got -1" in answer.err
    assert "--set actor.optim.lr: got 'fast', expected a number" in answer.err


def test_validate_finds_an_absent_file_of_data(engine, sft_run):
    (sft_run.parent / "rows.jsonl").unlink()
    answer = engine("validate", "run.toml")
    assert answer.code == 4
    assert ": data.train: there is no file '" in answer.err


def test_validate_tells_of_reward_functions_that_could_not_be_called(engine, rl_run):
    (rl_run.parent / "mine.py").write_text(MINE)
    text = rl_run.read_text().replace('plugins = ["dice.py"]', 'plugins = ["dice.py", "mine.py"]')
    rl_run.write_text(text + '[[reward]]\nname = "both"\n[[reward]]\nname = "deaf"\n')
    answer = engine("validate", "rl.toml")
    assert answer.code == 2
    assert answer.err.splitlines() == [
        "engine: rl.toml:13: reward.both: Reward 'both' names 'completion' (one sample a call) and 'prompts' (lists). Name one form.",
        "engine: rl.toml:15: reward.deaf: Reward 'deaf' declares the option 'words' but has no such argument. Known: completions.",
    ]
    rl_run.write_text(text)
    assert engine("validate", "rl.toml").code == 0


def test_validate_as_json(engine, sft_run):
    assert json.loads(engine("validate", "run.toml", "--json").out)["valid"] is True
    answer = engine("validate", "run.toml", "--json", "--set", "run.stesp=1")
    assert answer.code == 2
    assert answer.err == ""
    found = json.loads(answer.out)
    assert found["valid"] is False
    assert len(found["problems"]) == 1
    (problem,) = found["problems"]
    assert problem | {"hint": ""} == {
        "code": "ConfigError", "file": None, "line": None, "key": "run.stesp", "message": "unknown key", "hint": "",
    }  # fmt: skip
    assert problem["hint"].startswith("Did you mean 'steps'?")


def test_validate_tells_the_problems_of_all_stages_in_one_go(engine, rl_run):
    (rl_run.parent / "mine.py").write_text(MINE)
    text = rl_run.read_text().replace('plugins = ["dice.py"]', 'plugins = ["dice.py", "mine.py"]')
    text = text.replace("max_prompts = 2", "max_prompts = 2\nevery_steps = 1\nscore = 'nix'")
    rl_run.write_text(text + '[[reward]]\nname = "deaf"\n')
    answer = engine("validate", "rl.toml", "--json", "--set", "model.path=none")
    assert answer.code == 2
    found = [(p["code"], p["file"], p["line"], p["key"]) for p in json.loads(answer.out)["problems"]]
    assert found == [
        ("ConfigError", "rl.toml", 14, "eval.score"),
        ("ConfigError", "rl.toml", 15, "reward.deaf"),
        ("DataError", None, None, "model.path"),
    ]
    lines = engine("train", "rl.toml", "--set", "model.path=none").err
    assert len(lines.splitlines()[1:]) == 3  # after the line that says that it starts


def test_a_later_file_wins_and_set_wins_over_it(engine, sft_run):
    (sft_run.parent / "more.toml").write_text("[run]\nsteps = 7\nseed = 7\n")
    show = engine("config", "show", "run.toml", "more.toml", "--set", "run.seed=9")
    run = tomllib.loads(show.out)["run"]
    assert (run["name"], run["steps"], run["seed"]) == ("first", 7, 9)


def test_config_show_says_where_each_value_came_from(engine, sft_run, monkeypatch):
    monkeypatch.setenv("ENGINE__RUN__SEED", "3")
    lines = engine("config", "show", "run.toml", "--origin", "--set", "run.epochs=2").out.splitlines()
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines}
    steps = 1 + sft_run.read_text().splitlines().index("steps = 2")
    assert rows["run.steps"] == ["2", f"run.toml:{steps}"]
    assert rows["run.epochs"] == ["2", "--set run.epochs"]
    assert rows["run.seed"] == ["3", "environment ENGINE__RUN__SEED"]
    assert rows["actor.optim.eps"] == ["1e-08", "default"]


def test_config_show_as_json(engine, sft_run):
    assert json.loads(engine("config", "show", "run.toml", "--json").out)["run.steps"] == 2
    both = json.loads(engine("config", "show", "run.toml", "--json", "--origin").out)
    assert both["run.epochs"] == {"value": 1, "origin": "default"}


def test_config_show_shows_no_secrets(engine, sft_run):
    secret = ("--set", "model.override.api_key=hunter2")
    for how in ((), ("--origin",), ("--json",), ("--json", "--origin")):
        answer = engine("config", "show", "run.toml", *secret, *how)
        assert "api_key" in answer.out
        assert "[redacted]" in answer.out
        assert "hunter2" not in answer.out


def test_schema_is_json_over_all_tables_and_installed_names(engine):
    schema = json.loads(engine("schema").out)
    assert set(EngineConfig.model_fields) - {"options"} <= set(schema["properties"])
    assert "torch" in schema["$defs"]["RoleConfig"]["properties"]
    optim = json.loads(engine("schema", "actor.optim", "--json").out)
    assert optim["properties"]["lr"]["default"] == 1e-6


def test_schema_has_the_names_that_a_table_chooses_from_plugins(engine, install):
    source = """
        from engine_core import hookimpl
        from engine_plugin_trainers.tables import PairLoss

        @hookimpl
        def engine_pair_losses():
            return {"acme": PairLoss(load="acme_loss:loss")}
        """
    install("engine-acme", {"pair_losses": {"acme": "acme_loss"}}, {"acme_loss": source})
    assert '("acme" | ' in engine("schema", "dpo.loss").out


def test_schema_has_the_tables_of_installed_plugins(engine, install):
    source = """
        from engine_core import hookimpl
        from engine_core.specs import Options

        class TallyOptions(Options):
            most_cut: float = 0.5
            \"\"\"Ends the run above this share of cut responses.\"\"\"

        @hookimpl
        def engine_options():
            return TallyOptions

        @hookimpl
        def engine_on_event(event):
            pass
        """
    install("engine-acme", {"plugins": {"tally": "acme_tally"}}, {"acme_tally": source})
    assert "[plugin.tally]" in engine("schema", "plugin").out
    assert "most_cut = 0.5  (number)\n    Ends the run above" in engine("schema", "plugin.tally").out


def test_schema_of_a_table_is_readable(engine):
    text = engine("schema", "actor.torch").out
    assert text.startswith("[actor.torch]\n")
    assert 'param_dtype = "auto"  ("auto" | "fp32" | "bf16")\n    Type of the weights' in text
    assert "log_prob_chunk_tokens = 1024  (integer > 0)" in text


def test_schema_points_to_the_tables_below_and_shows_single_keys(engine):
    actor = engine("schema", "actor").out
    assert "[actor.optim]  see: engine schema actor.optim" in actor
    assert "path = not set  (string)" in actor
    assert engine("schema", "actor.optim.betas").out == (
        "betas = [0.9, 0.999]  ([number >= 0 <= 1, number >= 0 <= 1])\n    Adam's decay rates.\n"
    )
    assert "name = required  (" in engine("schema", "reward").out
    assert engine("schema", "actor.").out == actor
    assert (
        'trainer = "rl"  ("async" | "distill" | "dpo" | "evaluate" | "kto" | "offline" | "reward_model" | "rl" | "sft")'
        in engine("schema", "trainer").out
    )
    assert "stop = []  (list of string)" in engine("schema", "rollout").out


def test_schema_of_an_unknown_key_suggests_the_nearest(engine):
    answer = engine("schema", "actor.trch")
    assert answer.code == 2
    assert answer.err.startswith("engine: [actor] has no table or key 'trch'. Did you mean 'torch'? Known: ")
    known = answer.err.partition("Known: ")[2].removesuffix(".\n").split(", ")
    assert known == sorted(known)
    backends = {*known_names("train_engines")}
    assert "torch" in backends
    assert {*known} - backends == {"backend", "lora", "max_tokens_per_rank", "optim", "path"}


def test_schema_leaves_a_broken_plugin_out_and_says_so(engine, install):
    install("broken-one", {"rewards": {"broken": "broken_one"}}, {"broken_one": "import absent_module"})
    answer = engine("schema")
    assert answer.code == 0
    assert "broken" not in json.loads(answer.out)["$defs"]["RewardConfig"]["properties"]
    assert "engine: left out of the schema: " in answer.err
    assert "absent_module" in answer.err


def test_an_override_of_a_reward_that_no_file_has_is_named(engine, sft_run):
    answer = engine("config", "show", "run.toml", "--set", "reward.math.weight=0.5", "--set", "trainer=rl")
    assert answer.code == 2
    assert "[[reward]], with the entry that '--set reward.math.weight' names." in answer.err
