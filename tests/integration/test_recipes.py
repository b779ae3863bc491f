"""Every recipe on the published sizes of its model, and two steps of it on a small model of the same kind.

What stands for what a recipe names: the model is a folder with the true config and no weights, or with tiny sizes; the tokenizer has
few tokens and the family's template; the data are 20 rows in the layout of the hub's files. vLLM checks its options, and the
sampler ``hf`` takes its place where responses are sampled; ranks are processes with gloo.
"""

import importlib.metadata
import math
import re
import runpy
import shlex
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import datasets
import hub_folders
import pytest
import recipe_models
import torch
from packaging.requirements import Requirement

from engine_core import load_config
from engine_core.config.assemble import plugins_for
from engine_core.errors import ConfigError
from engine_plugin_fsdp.budget import held_by_rank
from engine_plugin_rewards.numeric import numeric
from engine_plugin_tools.commands.evaluate import for_suites
from engine_plugin_tools.recipes import RECIPES, read_recipe, recipe_names
from engine_plugin_tools.suites import SUITES, chosen_suites, run_settings
from engine_plugin_torch.memory import GIB, Decoder, Held, Settings, activations
from engine_plugin_torch.precision import Precision

DOCS = Path(__file__).parents[2] / "docs"
NAMES = recipe_names()
WITH_VLLM = [name for name in NAMES if "[rollout.vllm]" in read_recipe(name).text]
SHARDED = [name for name in NAMES if 'backend = "fsdp"' in read_recipe(name).text]
USABLE = 0.93  # GiB that a program can use for each GB in a GPU's name: 22.4 of an L4's 24
CONTEXT = 1.0  # GiB of the driver and of kernels, for each process on a GPU
IN_BF16 = Precision(torch.float32, torch.bfloat16)
FROZEN = Precision(torch.bfloat16, torch.bfloat16)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """``hub("gsm8k")``: a folder with files like those of the set; the library's cache is in another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        datasets.disable_progress_bars()
        written = {}

        def folder(name):
            if name not in written:
                written[name] = hub_folders.write(name, tmp_path_factory.mktemp("hub") / name)
            return str(written[name])

        yield folder
        datasets.enable_progress_bars()


def recipe_config(name, **changes):
    return load_config(RECIPES / f"{name}.toml", overrides=changes)


@pytest.fixture
def offline(hub, tmp_path):
    """``offline("qwen3-0.6b-gsm8k")``: settings with which a recipe needs no hub; ``small`` makes the model tiny."""

    def settings(name, small=False):
        plain = recipe_config(name)
        model, source = plain.model.path, plain.data.source
        folder = recipe_models.write_config(model, tmp_path / "model", small)
        recipe_models.write_tokenizer(plain.model.tokenizer or model, tmp_path / "tokenizer")
        made = {"model.path": str(folder), "model.tokenizer": str(tmp_path / "tokenizer")}
        made[f"data.{source}.folder"] = hub(source)
        for held_out in plain.eval.set:
            made[f"eval.set.{held_out.name}.{held_out.source}.folder"] = hub(held_out.source)
        return made

    return settings


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_passes_validation_and_the_dry_run_on_the_published_sizes(engine, offline, name):
    settings = offline(name) | {"run.steps": 2}  # 20 rows are less than a step
    sets = [f"--set={key}={value}" for key, value in settings.items()]

    valid = engine("validate", RECIPES / f"{name}.toml", *sets)
    dry = engine("train", RECIPES / f"{name}.toml", "--dry-run", *sets)

    assert valid.code == 0, valid.err
    assert dry.code == 0, dry.err
    assert "made-up response: 0.0" in dry.out or read_recipe(name).title.endswith(("SFT", "DPO"))
    assert "Not read" not in dry.out + dry.err


@pytest.mark.parametrize("name", WITH_VLLM)
def test_suites_measure_a_recipe_whose_sampler_holds_only_the_sequences_of_its_own_rows(offline, name):
    own, files, settings = recipe_config(name).rollout, [str(RECIPES / f"{name}.toml")], offline(name)
    for names in [*([each] for each in SUITES), list(SUITES)]:
        suites = chosen_suites(names)
        asked = settings | run_settings(suites, None)
        measured = for_suites(files, asked, suites, [], False).rollout
        assert (measured.backend, measured.options.max_model_len) == ("vllm", None)
        assert measured.stop_token_ids == own.stop_token_ids
        with pytest.raises(ConfigError, match=r"max_model_len: got 4096, but the longest prompt"):
            for_suites(files, asked, suites, ["rollout.vllm.max_model_len=4096"], False)
    assert own.options.max_model_len


@pytest.mark.parametrize(
    "name", [name for name in NAMES if "the boxed number" in read_recipe(name).about["what"]]
)
def test_a_reward_of_the_boxed_number_reads_no_other_number(name):
    reward = recipe_config(name).reward[0]
    assert reward.name == "numeric"
    scores = [numeric(text, "7", **reward.options.model_dump())["score"] for text in (r"\boxed{7}", "x = 7")]
    assert scores == [1, 0]


def installed_by(words):
    """Return what of ours ``pip install`` of these words brings: distributions, and extras as ``name[extra]``."""
    found, left = set(), [Requirement(word) for word in words]
    while left:
        wanted = left.pop()
        brought = {wanted.name, *(f"{wanted.name}[{extra}]" for extra in wanted.extras)}
        if brought <= found:
            continue
        found |= brought
        for needed in map(Requirement, importlib.metadata.requires(wanted.name) or []):
            asked = [{"extra": extra} for extra in {"", *wanted.extras}]
            if needed.name.startswith("engine-") and (
                needed.marker is None or any(map(needed.marker.evaluate, asked))
            ):
                left.append(needed)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_install_line_brings_what_the_run_uses(name):
    config = recipe_config(name)
    brought = installed_by(shlex.split(read_recipe(name).about["install"])[2:])

    assert {*plugins_for(config).versions()} <= brought
    assert "engine-plugin-trainers[datasets]" in brought
    assert ("engine-plugin-torch[lora]" in brought) == bool(config.actor.lora)
    assert ("engine-plugin-vllm-rollout[gpu]" in brought) == (config.trainer == "rl")


class Need(SimpleNamespace):
    """GiB on one GPU: in training, in sampling, and the tokens of a micro-batch that then fit."""


def gpus_of(name):
    """Return the number of GPUs that a recipe names, and the GiB that a program can use of each."""
    count, size = re.fullmatch(r"(\d+) GPUs? of (\d+) GB", read_recipe(name).about["hardware"]).groups()
    return int(count), int(size) * USABLE


def module_of(model):
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**recipe_models.config_of(model)))


def held(config, module, trained=True):
    """Return the bytes of a role on a GPU, by the estimates of its train engine."""
    whole = Held.of(module, trained)
    if not trained:  # kept in bfloat16
        whole = Held(whole.weights // 2)
    if lora := config.actor.lora:
        layers = [part for name, part in module.named_modules() if type(part).__name__ == "Linear"]
        layers = [part for part in layers if part.out_features != module.config.vocab_size]
        adapter = 4 * sum(lora.rank * (part.in_features + part.out_features) for part in layers)
        return Held(whole.weights // 2 + adapter, adapter, 2 * adapter)
    if config.actor.backend == "torch":
        return whole
    types, size = IN_BF16 if trained else FROZEN, config.runtime.options.processes
    return held_by_rank(whole, module, config.actor.options, types, size, "actor")


def need(name):
    """Return what a recipe needs of one GPU, by the estimates of the engines."""
    config, (_, usable) = recipe_config(name), gpus_of(name)
    module = module_of(config.model.path)
    kept, sharded = held(config, module), config.actor.backend == "fsdp"
    param = torch.bfloat16 if config.actor.lora else torch.float32
    rows = activations(Decoder.of(module), Settings(param, torch.bfloat16, compiled=True, kernel=True))
    copies = 0 if sharded else rows.copies  # fsdp gathers layers in bfloat16
    longest, sampler, asleep = getattr(config.options, "max_tokens", 0), 0.0, 0.0
    resident = kept.total / GIB + CONTEXT
    if config.trainer == "rl":
        vllm = config.rollout.options
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        sampler = vllm.gpu_memory_utilization * usable
        asleep = 2 * CONTEXT if vllm.sleep_level == 2 else sampler
    if config.trainer == "dpo":
        resident += held(config, module, trained=False).total / GIB
    each = (rows.chunks + copies + longest * rows.token(1.0)) / 0.85 / GIB
    left = usable - resident - asleep
    return Need(
        training=resident + asleep + each,
        sampling=(kept.weights / GIB + CONTEXT + sampler + CONTEXT) if sampler else 0.0,
        fitting=((left * 0.85 * GIB) - rows.chunks - copies) / rows.token(1.0),
        longest=longest,
        cache=(sampler - Held.of(module, False).weights / 2 / GIB) / kv_bytes(Decoder.of(module)) * GIB,
    )


def kv_bytes(shape):
    """Return the bytes of a token in vLLM's cache: keys and values in bfloat16."""
    return 2 * 2 * shape.layers * shape.keys


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fits_its_gpus_and_says_the_estimate(name):
    count, usable = gpus_of(name)
    config, estimate = recipe_config(name), need(name)
    processes = getattr(config.runtime.options, "processes", 1)

    peak = math.ceil(max(estimate.training, estimate.sampling))
    assert read_recipe(name).about["memory"] == f"{peak} GiB of each GPU, estimated"
    assert peak < usable
    assert processes == count
    assert estimate.fitting >= 2 * estimate.longest
    if config.trainer == "rl":
        assert estimate.cache >= 16 * config.rollout.options.max_model_len


SMALL = """
plugins = ["spread.py"]

[rollout]
backend = "hf"
group_size = 2
max_response_tokens = 4

[[reward]]
name = "spread"                  # a random model has no right answers, and equal rewards teach nothing

[algorithm]
mini_batch_prompts = 2

[data]
prompts_per_step = 4

[eval]
max_prompts = 2
samples_per_prompt = 1

[run]
steps = 2
name = "r"
"""
"""What makes two steps of any recipe take seconds on a CPU."""
SPREAD = """
from engine_core import hookimpl
from engine_core.specs import Reward


def spread(completions):
    return [sum(map(ord, text)) % 8 / 8 for text in completions]


@hookimpl
def engine_rewards():
    return {"spread": Reward(load=spread)}
"""


@pytest.fixture
def train(offline, tmp_path, monkeypatch):
    """Two steps of a recipe's text on the small model; returns the last line of its metrics."""
    monkeypatch.chdir(tmp_path)

    def run(name, text, **changes):
        for file, content in (("recipe.toml", text), ("small.toml", SMALL), ("spread.py", SPREAD)):
            (tmp_path / file).write_text(content)
        if "[[stage]]" in text:
            changes["stage.dynamic_sampling.dynamic_sampling.reward"] = "spread"
        settings = offline(name, small=True) | changes
        config = load_config("recipe.toml", "small.toml", overrides=settings)
        with closing(plugins_for(config).resolve("trainers", config.trainer)(config)) as trainer:
            trainer.train()
            return trainer.folder.read_metrics()[-1]

    return run


def check_learned(last, name):
    assert last["step"] == 2
    assert last["actor/grad_norm"] > 0
    assert name.endswith("sft") or any(key.startswith("eval/") for key in last)


# one of each trainer; the others are slow
QUICK = ("qwen2.5-0.5b-gsm8k", "llama-3.1-8b-tulu3-sft", "llama-3-8b-ultrafeedback-dpo")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in NAMES]
)
def test_a_recipe_trains_two_steps_on_a_small_model(train, name):
    text = re.sub(r"\[rollout\.process\].*\n", "", read_recipe(name).text)  # a process takes seconds to start
    last = train(name, text, **{"actor.backend": "torch", "runtime.backend": "local"})
    check_learned(last, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_recipe_trains_two_steps_on_two_ranks(train, name):
    ranks = {"runtime.torchrun.processes": 2, "runtime.torchrun.device": "cpu"}
    check_learned(train(name, read_recipe(name).text, **ranks), name)


PROMPTS = {
    "qwen2.5": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "llama-3.2": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma-3": "<bos><start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
}
SUFFIXES = {
    "gsm8k": 'Let\'s think step by step and output the final answer after "####".',
    "math": r"Please reason step by step, and put your final answer within \boxed{}.",
}


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith(("sft", "dpo"))])
def test_prompts_are_chats_that_begin_an_answer_without_thinking_and_without_the_date(offline, name):
    config = recipe_config(name, **offline(name), **{"run.steps": 2})
    with closing(plugins_for(config).resolve("trainers", config.trainer)(config)) as trainer:
        trainer.load_inputs()
        (prompt,) = trainer.source.take(1)

    form = next(form for start, form in PROMPTS.items() if name.startswith(start))
    start, end = form.split("{}")
    suffix = next(text for kind, text in SUFFIXES.items() if kind in name)
    assert prompt.text.startswith(start)
    assert prompt.text.endswith(f" {suffix}{end}")


@pytest.mark.parametrize("name", NAMES)
def test_responses_end_with_the_turn_of_the_family(offline, name, tmp_path):
    """Samplers end a response at the tokenizer's end of sequence, which is not the end of a turn in each family."""
    from transformers import AutoTokenizer

    offline(name)
    config, tokenizer = recipe_config(name), AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    turn = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    ends_turn = (
        tokenizer.eos_token in tokenizer.apply_chat_template(turn, tokenize=False).rpartition("Hello")[2]
    )
    assert ends_turn or config.rollout.stop_token_ids or config.trainer in ("sft", "dpo")


def test_the_page_is_up_to_date():
    page = runpy.run_path(str(DOCS / "recipe_table.py"))
    assert page["PAGE"].read_text("utf-8") == page["page"](), "Run python docs/recipe_table.py."
