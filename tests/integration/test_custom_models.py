"""The models of ``examples/custom_model`` with every sampler: shared, own weights, own process, pools, async; hf and vLLM."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from variants import variants

from engine_core import load_config
from engine_core.config import ModelConfig
from engine_core.config.assemble import plugins_for
from engine_core.errors import DataError
from engine_core.runs.rollout_files import read_rollouts

pytestmark = pytest.mark.usefixtures("forked_workers")

TIMED = ("time", "throughput/", "memory/", "sync/")
NEAR = 1e-5  # of log-probs of sampler and trainer, both in float32
MODELS = {
    "conv_lm": {"plugins": ["conv_lm"]},
    "adapter_lm": {"plugins": ["adapter_lm"]},
    "gru": {"actor.backend": "gru"},
    "gru_sampler": {"actor.backend": "gru", "rollout.backend": "gru"},
    "two_rates": {"plugins": ["conv_lm"], "actor.backend": "two_rates"},
    "sine_lm": {"plugins": ["sine_lm"]},  # with a folder of its own type
}
SINE = {"model_type": "sine_lm", "architectures": ["SineForCausalLM"], "num_attention_heads": 2}
POOLS = {
    "runtime.backend": "torchrun",
    "placement.pools": {"train": 1, "serve": 1},
    "placement.actor": "train",
    "placement.rollout": "serve",
}
WAYS = {
    "shared": {},
    "own": {"rollout.weights": "own"},
    "process": {"rollout.process": {}},
    "pools": POOLS,
    "async": {"trainer": "async", "rollout.process": {}, "async.max_staleness": 0},
    "ahead": {"trainer": "async", **POOLS},  # by one update
}
VLLM = {
    "rollout.backend": "vllm",
    "rollout.vllm.dtype": "float32",
    "rollout.vllm.enforce_eager": True,
    "rollout.vllm.kv_cache_memory_bytes": 1 << 26,
    "rollout.vllm.max_num_seqs": 16,
}


@pytest.fixture(scope="module")
def train(world, custom_model, digits_plugin, tmp_path_factory):
    """``train(model, way, **changes)``: metrics without times, and the samples, of a run of three steps; each is done once."""
    folder, done = tmp_path_factory.mktemp("custom"), {}
    sine = shutil.copytree(world / "model", folder / "sine") / "config.json"
    words = json.loads((world / "model" / "config.json").read_text())["vocab_size"]
    sine.write_text(json.dumps(SINE | {"vocab_size": words, "eos_token_id": 1}))

    def run(model, way, **changes):
        plugins = [Path(plugin).stem for plugin in changes.get("plugins", ())]
        name = "-".join([model, way, *plugins, changes.get("rollout.backend", "hf")])
        if name not in done:
            settings = {
                "model.path": str(world / "model"),
                "data.train": str(world / "data" / "train.jsonl"),
                "data.prompts_per_step": 4,
                "rollout.group_size": 4,
                "rollout.max_response_tokens": 8,
                "actor.optim.lr": 1e-2,
                "reward": [{"name": "digits"}],
                "tracking.rollouts_every_steps": 1,
                "tracking.trackers": [],
                "run.dir": str(folder),
                "run.name": name,
                "run.steps": 3,
            }
            if model == "sine_lm":
                settings["model.path"] = str(sine.parent)
            settings |= {**MODELS[model], **WAYS[way], **changes}
            settings["plugins"] = [*settings.get("plugins", ()), str(digits_plugin)]
            config = load_config(settings, allow_code=True)
            trainer = plugins_for(config).resolve("trainers", config.trainer)(config)
            try:
                trainer.train()
            finally:
                trainer.close()
            done[name] = result_of(trainer.folder.path, stale=way == "ahead")
        return done[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(custom_model))
        yield run


def result_of(run, stale):
    """Metrics and samples; the sampler has followed the actor, which has learned."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert max(line["mismatch/mean_abs"] for line in lines[: 1 if stale else 3]) < NEAR
    assert min(line["actor/grad_norm"] for line in lines) > 0
    samples = {
        file.name: [
            (r.request_id, r.token_ids.tolist(), r.rollout_log_probs.tolist()) for r in read_rollouts(file)
        ]
        for file in sorted((run / "rollouts").rglob("*.parquet"))
    }
    metrics = [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines]
    return {"metrics": metrics, "samples": samples}


def same_first_tokens(one, other):
    """The tokens of the first step; later ones differ where log-probs are rounded otherwise."""
    first, second = (next(iter(result["samples"].values())) for result in (one, other))
    assert [tokens for _, tokens, _ in first] == [tokens for _, tokens, _ in second]


@pytest.mark.parametrize("model", variants(("conv_lm", "adapter_lm"), ("adapter_lm",)))
def test_a_sampler_with_weights_of_its_own_builds_the_model_in_any_process(train, model):
    assert train(model, "process") == train(model, "own")


@pytest.mark.parametrize("model", variants(("gru", "gru_sampler", "sine_lm"), ("gru", "sine_lm")))
def test_so_does_one_whose_actor_brings_model_and_optimizer(train, model):
    same_first_tokens(train(model, "own"), train(model, "shared"))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["process", "pools"])
@pytest.mark.parametrize("model", MODELS)
def test_the_run_is_the_same_in_processes_of_its_own_and_in_pools(train, model, way):
    assert train(model, way) == train(model, "own")


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_it_is_sampled_from_the_actors_own_module_where_they_are_together(train, model):
    same_first_tokens(train(model, "shared"), train(model, "own"))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_trainer_async_samples_from_it(train, model):
    assert train(model, "async")["samples"] == train(model, "own")["samples"]
    train(model, "ahead")


@pytest.fixture(scope="module")
def wide_heads(world):
    """The world's model with heads that vLLM's kernels for a CPU can do."""
    config = world / "model" / "config.json"
    before = config.read_text()
    config.write_text(json.dumps(json.loads(before) | {"head_dim": 32}))
    yield
    config.write_text(before)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm: what the run samples with")
@pytest.mark.parametrize(
    ("plugins", "way"),
    [
        (["adapter_lm"], "own"),
        (["adapter_lm", "adapter_vllm"], "own"),
        (["adapter_lm", "adapter_vllm"], "process"),
    ],
)
def test_vllm_gets_merged_weights_or_an_architecture_of_the_plugin(train, wide_heads, plugins, way):
    train("adapter_lm", way, plugins=plugins, **VLLM)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm: what the run samples with")
def test_a_plugin_gives_vllm_a_model_type_that_transformers_lacks(train):
    train("sine_lm", "process", **VLLM)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm: what the run samples with")
def test_vllm_starts_from_an_export_of_a_changed_model(train, wide_heads, world, tmp_path):
    from engine_plugin_custom_model.adapter_lm import WithAdapter, build

    changed = build(ModelConfig(path=str(world / "model")))
    for part in changed.modules():
        if isinstance(part, WithAdapter):
            torch.nn.init.normal_(part.up.weight, std=0.1)
    export = shutil.copytree(world / "model", tmp_path / "export")
    changed.save_pretrained(export)
    train("adapter_lm", "process", plugins=["adapter_lm"], **VLLM, **{"model.path": str(export)})


def test_a_hook_that_leaves_the_sampler_out_is_told_what_to_do(train, tmp_path):
    file = tmp_path / "actor_only.py"
    file.write_text(
        "from engine_core import hookimpl\n\n\n@hookimpl\ndef engine_build_model(role, model_config):\n"
        "    from engine_plugin_custom_model.adapter_lm import build\n\n"
        "    return build(model_config) if role == 'actor' else None\n"
    )
    with pytest.raises(
        DataError, match=r"Unknown weight .* let engine_build_model answer for the role 'rollout'"
    ):
        train("conv_lm", "own", plugins=[str(file)])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm: what the run samples with")
def test_an_architecture_that_lacks_a_weight_is_not_sampled_from(train, wide_heads, tmp_path):
    file = tmp_path / "forgets.py"
    file.write_text(
        "from engine_core import hookimpl\n\n\n@hookimpl\ndef engine_map_weights(weights):\n"
        "    return ((name, tensor) for name, tensor in weights if not name.endswith('mlp.down.weight'))\n"
    )
    with pytest.raises(
        DataError, match=r"lacks 2 weights of vLLM's model, such as 'model.layers.0.mlp.down.weight'"
    ):
        train("adapter_lm", "own", plugins=["adapter_lm", "adapter_vllm", str(file)], **VLLM)
