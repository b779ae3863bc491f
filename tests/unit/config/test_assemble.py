import importlib.util
import json
import os
import re
import subprocess
import sys
import time

import pytest

from engine_core.config import dump_toml
from engine_core.config.assemble import _where, check_inputs, load_config, plugins_for
from engine_core.config.completeness import check_complete
from engine_core.config.read import read_config
from engine_core.errors import ConfigError, PluginError

SFT = 'trainer = "sft"\n[model]\npath = "model"\n[data]\ntrain = ["train.jsonl"]\n'
PLUGIN = """\
from engine_core import hookimpl
from engine_core.specs import FilePath, Options, Reward, RolloutBackend

class Seven(Options):
    scale: float = 1.0
    '''Factor.'''
    table: FilePath = "none"
    '''A file.'''

@hookimpl
def engine_rewards():
    return {"seven": Reward(load=print, config=Seven)}

@hookimpl
def engine_rollout_engines():
    return {"echo": RolloutBackend(load=print)}
"""
RL = """\
plugins = ["say_seven.py"]
[rollout]
backend = "echo"
[[reward]]
name = "seven"
[reward.seven]
scale = 2.0
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A folder with a model, data, a one-file plugin; run.toml has the given text."""
    for name in [name for name in os.environ if name.startswith("ENGINE__")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "project"
    (folder / "model").mkdir(parents=True)
    (folder / "model/config.json").write_text("{}")
    (folder / "model/tokenizer.json").touch()
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "x", "response": "y"}) + "\n")
    (folder / "say_seven.py").write_text(PLUGIN)

    def write(text, name="run.toml"):
        (folder / name).write_text(text)
        return folder / name

    return write


def problems(*files, **more):
    with pytest.raises(ConfigError) as error:
        load_config(*files, **more)
    return [line.rpartition("/")[2] for line in error.value.problems]


def test_a_run_file_is_read_with_the_plugins_that_it_names(run):
    config = load_config(run(RL))
    assert config.reward[0].options.scale == 2.0
    assert plugins_for(config).spec("rewards", "seven").config.__name__ == "Seven"
    assert config._source.unread == []


def test_a_mapping_and_lines_are_overrides(run):
    file = run(SFT)
    assert load_config(file, {"actor.optim.lr": 3e-4}).actor.optim.lr == 3e-4
    assert load_config(file, overrides={"actor.optim.lr": 3e-4}).actor.optim.lr == 3e-4
    assert load_config(file, overrides=["actor.optim.lr=3e-4"]).actor.optim.lr == 3e-4
    assert load_config(str(file), {"run.seed": 1}, overrides=["run.seed=2"]).run.seed == 2


def test_the_environment_is_read(run, monkeypatch):
    monkeypatch.setenv("ENGINE__RUN__SEED", "7")
    assert load_config(run(SFT)).run.seed == 7


def test_paths_are_relative_to_the_file_that_names_them(run, tmp_path, monkeypatch):
    folder = tmp_path / "project"
    (folder / "parts").mkdir()
    (folder / "parts/base.toml").write_text(
        'trainer = "sft"\ndata.train = "here.jsonl"\nmodel.path = "a/hub-name"'
    )
    config = load_config(
        run('extends = ["parts/base.toml"]\nmodel.tokenizer = "model"\ndata.validation = ["../v.csv"]')
    )
    assert config.data.train == str(folder / "parts/here.jsonl")
    assert config.data.validation == [str(tmp_path / "v.csv")]
    assert config.model.tokenizer == str(folder / "model")
    assert config.model.path == "a/hub-name"
    monkeypatch.chdir(tmp_path)
    assert load_config("project/run.toml", {"data.train": "mine.jsonl"}).data.train == str(
        tmp_path / "mine.jsonl"
    )


def test_a_file_of_a_plugins_table_is_the_same_when_its_run_is_resumed(run, tmp_path):
    config = load_config(run(RL + 'table = "seven.json"\n'))
    assert config.reward[0].options.table == str(tmp_path / "project/seven.json")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.resolved.toml").write_text(dump_toml(config))
    again = load_config(tmp_path / "other/config.resolved.toml", allow_code=True)
    assert again.reward[0].options.table == str(tmp_path / "project/seven.json")


def test_a_plugin_file_of_an_extended_file_lies_beside_that_file(run, tmp_path):
    base = run(RL)
    (tmp_path / "top.toml").write_text('extends = ["project/run.toml"]\nrun.seed = 3\n')
    config = load_config(tmp_path / "top.toml")
    assert config.plugins == load_config(base).plugins == [str(tmp_path / "project/say_seven.py")]
    assert plugins_for(config).spec("rewards", "seven")


def test_a_dumped_config_means_the_same_from_another_folder(run, tmp_path):
    config = load_config(run(RL + SFT.partition("\n")[2]))
    (tmp_path / "other").mkdir()
    copy = tmp_path / "other/config.resolved.toml"
    copy.write_text(dump_toml(config))
    again = load_config(copy, allow_code=True)
    assert again == config


def test_an_unknown_name_has_its_line_and_stands_among_the_other_errors(run):
    text = RL + '[actor]\nbackend = "tohrch"\nlr = 3\n[algorithm.grpo]\nnormalize = true\n'
    found = problems(run(text))
    assert [line[:30] for line in found] == [
        "run.toml:10: actor.lr: unknown",
        "run.toml:12: algorithm.grpo.no",
        "run.toml:9: actor.backend: Unk",
    ]
    assert "Did you mean 'torch'?" in found[-1]


def test_an_unknown_name_alone_is_a_plugin_error(run):
    with pytest.raises(PluginError) as error:
        load_config(run(RL.replace('"seven"', '"sevn"').replace("[reward.seven]\nscale = 2.0\n", "")))
    message = str(error.value)
    assert message.rpartition("/")[2].startswith(
        "run.toml:5: reward.sevn.name: Unknown reward 'sevn'. Did you mean 'seven'?"
    )
    assert error.value.exit_code == 3


def test_a_name_that_is_a_default_is_said_to_be_one(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[rollout]\nbackend = "hf"\n')
    assert _where(read_config([]), "rollout_engines", "hf") == "rollout.backend (default): "
    assert _where(read_config([file]), "rollout_engines", "hf") == f"{file}:2: rollout.backend: "


def test_an_unknown_trainer_is_a_plugin_error(run):
    with pytest.raises(
        PluginError, match=r"run.toml:1: trainer: Unknown trainer 'sfft'. Did you mean 'sft'\?"
    ):
        load_config(run('trainer = "sfft"\n'))


def test_an_unknown_trainer_hides_no_other_error(run):
    found = problems(
        run(RL.replace("scale = 2.0", "scale = 'x'") + '[actor.torch]\ndevce = "cpu"\n', "run.toml"),
        overrides={"trainer": "sfft"},
    )
    assert [line.partition(": ")[2].partition(": ")[0] for line in found[:2]] == [
        "reward.seven.scale",
        "actor.torch.devce",
    ]
    assert found[2].startswith("--set trainer: Unknown trainer 'sfft'.")
    assert len(found) == 3


def test_a_plugin_file_elsewhere_needs_to_be_allowed(run, tmp_path):
    (tmp_path / "out.py").write_text(PLUGIN)
    file = run(RL.replace("say_seven.py", "../out.py"))
    with pytest.raises((PluginError, ConfigError), match="--allow-code"):
        load_config(file)
    config = load_config(file, allow_code=True)
    assert plugins_for(config).spec("rewards", "seven")


def test_a_wrong_choice_and_an_absent_file_are_found_in_one_go(run):
    text = (
        RL.replace('backend = "echo"', 'backend = "echo"\ngroup_size = 1') + '[data]\ntrain = "gone.jsonl"\n'
    )
    with pytest.raises(ConfigError) as error:
        load_config(run(text))
    first, *others = error.value.problems
    assert "run.toml:4: rollout.group_size: got 1, expected at least 2" in first
    assert any("run.toml:10: data.train: there is no file" in line for line in others)


def test_sft_needs_no_rollout_plugin(run):
    config = load_config(run(SFT + '[rollout]\nbackend = "vllm"\n[rollout.vllm]\nx = 1\n'))
    assert "[rollout]: trainer 'sft' does not read it" in config._source.unread


def test_a_placement_is_not_read_where_all_roles_are_in_one_process(run):
    placed = SFT + "[placement]\npools = { a = 2 }\nactor = 'a'\n"
    assert load_config(run(placed)).unread == ["[placement]: runtime 'local' has one pool, this process"]


def test_what_live_objects_stand_for_may_be_missing(run):
    config = load_config(
        run('plugins = ["say_seven.py"]\n[rollout]\nbackend = "echo"\n[eval]\nevery_steps = 5\n')
    )
    with pytest.raises(ConfigError) as error:
        check_complete(config)
    assert [line.rpartition("/run.toml: ")[2].partition(":")[0] for line in error.value.problems] == [
        "model.path",
        "data.train",
        "reward",
        "data.validation",
    ]
    with pytest.raises(
        ConfigError, match=r"data.validation: missing. eval.every_steps asks for scores on it"
    ) as error:
        check_complete(config, {"model", "data", "rewards"})
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            '[actor.torch]\nquantize = "int8"\n',
            r"actor\.torch\.quantize: 'int8' is for weights that are not trained",
        ),
        (
            '[actor.torch]\nquantize = "nf4"\n[actor.lora]\nrank = 2\n',
            r"actor\.torch\.quantize: 'nf4' needs the package bitsandbytes, which is not installed\. Try: "
            r"pip install 'engine-plugin-torch\[quant\]', or use 'int8' or 'fp8', which need no package\.",
        ),
        (
            "[actor.lora]\nrank = 2\n",
            r"actor\.lora: needs the package peft, which is not installed\. Try: pip install 'engine-plugin-torch\[lora\]'",
        ),
    ],
)
def test_weights_that_cannot_be_quantised_or_adapted_are_refused_without_torch(
    run, monkeypatch, text, problem
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if f"package {name}" in problem else find(name, *more),
    )
    with pytest.raises(ConfigError, match=problem) as error:
        check_complete(load_config(run(SFT + text)))
    assert len(error.value.problems) == 1


def test_a_base_below_an_adapter_may_be_quantised(run):
    check_complete(load_config(run(SFT + '[actor.torch]\nquantize = "int8"\n[actor.lora]\nrank = 2\n')))


def test_a_complete_file_is_complete(run):
    check_complete(load_config(run(SFT)))


def test_inputs_on_the_disk_are_tested(run, tmp_path):
    assert check_inputs(load_config(run(SFT))) == []
    file = run(SFT.replace('"model"', '"modl"').replace("train.jsonl", "trian.jsonl"))
    found = check_inputs(load_config(file))
    folder = f"{tmp_path}/project"
    assert found[0].startswith(f"{file}:3: model.path: there is no folder '{folder}/modl'. Did you mean")
    assert found[1].startswith(f"{file}:5: data.train: there is no file '{folder}/trian.jsonl'. Did you mean")


def test_an_absent_file_of_an_option_table_is_named_with_its_line(run, tmp_path):
    text = RL + '[model]\npath = "model"\n[data]\ntrain = "train.jsonl"\n'
    file = run(text.replace("scale = 2.0", 'table = "trian.jsonl"'))
    (found,) = check_inputs(load_config(file))
    assert found == (
        f"{file}:7: reward.seven.table: there is no file or folder '{tmp_path}/project/trian.jsonl'. "
        f"Did you mean '{tmp_path}/project/train.jsonl'?"
    )
    (found,) = check_inputs(load_config(run(text)))  # the default is looked for, too
    assert found.startswith(f"reward.seven.seven.table: there is no file or folder '{tmp_path}/project/none'")


def test_a_config_is_loaded_quickly_and_without_heavy_libraries(run):
    code = (
        "import sys, engine_core\n"
        "from engine_core.config.assemble import check_inputs\nfrom engine_core.config.completeness import check_complete\n"
        "config = engine_core.load_config(sys.argv[1])\n"
        "check_complete(config); check_inputs(config); engine_core.config.dump_toml(config)\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'matplotlib', 'pyarrow', 'pandas'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, str(run(SFT))], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 10  # a second on an idle machine; torch alone would take several


def test_an_algorithm_whose_needs_nobody_meets_is_refused_with_its_file(run):
    plugin = (
        "from engine_core import hookimpl\n"
        "from engine_core.specs import Advantage\n"
        "@hookimpl\n"
        "def engine_advantages():\n"
        "    return {'mine': Advantage(load=print, needs=frozenset({'rewards', 'group_id'}))}\n"
    )
    run(plugin, "mine.py")
    path = run(
        RL.replace('["say_seven.py"]', '["say_seven.py", "mine.py"]')
        + '[model]\npath = "model"\n[data]\ntrain = ["train.jsonl"]\n[algorithm]\nadvantage = "mine"\n'
    )
    expected = (
        r"run.toml:\d+: algorithm.advantage = 'mine' needs the column 'group_id'.*Did you mean 'group_ids'"
    )
    with pytest.raises(ConfigError, match=expected):
        check_complete(load_config(path))


def test_a_sampler_that_cannot_use_the_actors_module_is_told_with_both_keys(run):
    shared = RL.replace('backend = "echo"', 'backend = "echo"\nweights = "shared"')
    shared += "[placement]\npools = { a = 1, b = 1 }\nactor = 'a'\nrollout = 'b'\n"
    with pytest.raises(ConfigError) as error:
        check_complete(load_config(run(shared + SFT.partition("\n")[2])))
    told = str(error.value)
    assert "rollout.weights = 'shared': backend 'echo' has separate weights" in told
    assert "the sampler is in pool 'b' and the actor in 'a'. Set rollout.weights" in told
    check_complete(load_config(run(shared.replace("shared", "own") + SFT.partition("\n")[2])))


def test_a_backend_for_models_that_are_never_trained_is_refused_for_other_roles(run):
    file = run("", "frozen.py")
    file.write_text(
        "from engine_core import hookimpl\nfrom engine_core.specs import TrainBackend\n\n@hookimpl\n"
        "def engine_train_engines():\n"
        '    return {"only": TrainBackend(load=print, frozen_only=True)}\n'
    )
    text = f"{RL}[model]\npath = 'model'\n[data]\ntrain = 'train.jsonl'\n".replace(
        '"say_seven.py"', '"say_seven.py", "frozen.py"'
    )
    text = f"{text}[actor]\nbackend = 'only'\n"
    words = r"actor\.backend: 'only' runs models that are never trained, .* Choose another train engine for \[actor\]"
    with pytest.raises(ConfigError, match=words):
        check_complete(load_config(run(text)))


@pytest.mark.parametrize(
    "text",
    [
        "[checkpoint]\nbest_metric = 'eval/x'",
        "[run]\nfail_above = { 'eval/x' = 1.0 }",
        "[run]\nfinish_above = { 'eval/x' = 1.0 }",
        "[run]\nfinish_below = { 'eval/x' = 1.0 }",
    ],
)
def test_a_metric_of_an_evaluation_that_never_happens_is_refused(run, text):
    table, key = re.match(r"\[(\w+)\]\n(\w+)", text).groups()
    key = f"{table}.{key}"
    with pytest.raises(ConfigError, match=rf"{key}: got 'eval/x', but the run evaluates nothing\. Set eval"):
        check_complete(load_config(run(f"{SFT}\n{text}\n")))
    held_out = SFT.replace("[data]", '[data]\nvalidation = "train.jsonl"')
    check_complete(load_config(run(f"{held_out}\n{text}\n[eval]\nat_end = true\n")))
