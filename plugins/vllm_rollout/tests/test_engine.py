"""What is particular to vLLM, on one real engine; the contracts are in test_conformance.py."""

import dataclasses
import os
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from engine_core.config import ModelConfig, RolloutConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.errors import ConfigError, TrainingFailed
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Prompt, Request, Sampling
from engine_plugin_testing.reference import load_reference, logits_of, tokenizer, write_model
from engine_plugin_vllm_rollout.engine import whole

SHAPE = {"head_dim": 32}
TOLERANCE = 1e-4  # of a log-prob in float32, in nats: sums of the parts are in another order
COLUMNS = ("token_ids", "loss_mask", "rollout_log_probs", "policy_versions")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        write_model(root / str(seed), SHAPE, seed, tied=True)
    return root


def build(path, response=32, **table):
    plugins = PluginSet.load({"rollout_engines": {"vllm"}})
    given = {"dtype": "float32", "enforce_eager": True, "sleep_level": 0, "kv_cache_memory_bytes": 1 << 26}
    options = plugins.spec("rollout_engines", "vllm").config(**given | table)
    config = RolloutConfig(backend="vllm", max_response_tokens=response, options=options)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    context = WorkerContext(plugins=plugins, role="rollout", device=device, live={"tokenizer": tokenizer()})
    return plugins.resolve("rollout_engines", "vllm")(config, ModelConfig(path=str(path)), context)


@pytest.fixture(scope="module")
def engine(folders):
    made = build(folders / "0", log_probs="full", block_size=32)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _as_before(request, folders):
    """Each test finds the weights of seed 0 as version 0, and leaves nothing queued."""
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.abort(list(engine._running))
        engine.step()
        engine.update_weights(load_file(folders / "0" / "model.safetensors").items(), 0)


def asked(count, **sampling):
    given = {"max_response_tokens": 24, "seed": 0} | sampling
    return [
        Request(f"r{i}", Prompt(f"train:{i}", [5, 6, 7 + i], ""), Sampling(**given | {"seed": i}))
        for i in range(count)
    ]


@pytest.mark.parametrize("seeds", [True, False])
def test_a_response_has_numbers_of_its_own_unless_the_run_says_otherwise(engine, monkeypatch, seeds):
    monkeypatch.setattr(engine, "options", engine.options.model_copy(update={"per_request_seeds": seeds}))
    first, again = (engine.generate(asked(4, temperature=1.0)) for _ in range(2))
    same = all(torch.equal(a.token_ids, b.token_ids) for a, b in zip(first, again, strict=True))
    assert same is seeds


def test_a_response_in_flight_tells_the_version_of_each_token(engine, folders):
    (request,) = asked(1, stop_token_ids=(), temperature=1.0)
    request.sampling = dataclasses.replace(request.sampling, max_response_tokens=24)
    engine.add([request])
    assert engine.step() == []  # eight tokens
    engine.update_weights(load_file(folders / "1" / "model.safetensors").items(), 5)
    done = []
    while not done:
        done = engine.step()
    (rollout,) = done
    versions = rollout.policy_versions[3:].tolist()
    assert versions == sorted(versions)
    assert set(versions) == {0, 5}
    for version, seed in ((0, "0"), (5, "1")):
        with torch.no_grad():
            expected = torch.log_softmax(
                logits_of(load_reference(str(folders / seed)), rollout.token_ids), -1
            )
        for at in range(3, len(rollout.token_ids)):
            if rollout.policy_versions[at] == version:
                found = rollout.rollout_log_probs[at]
                assert found == pytest.approx(float(expected[at - 1, rollout.token_ids[at]]), abs=1e-3)


def test_a_prefix_that_was_computed_with_earlier_weights_is_not_found_again(engine, folders):
    """The prompt is longer than a block of the cache, so that a second request for it computes the last tokens alone."""
    block = engine._llm.vllm_config.cache_config.block_size
    prompt = [5 + i % 20 for i in range(block + 8)]
    for version, seed in ((0, "0"), (1, "1"), (2, "0")):
        if version:
            engine.update_weights(load_file(folders / seed / "model.safetensors").items(), version)
        for turn in range(2):
            request = Request(
                f"r{version}-{turn}", Prompt("long", prompt, ""), Sampling(max_response_tokens=4, seed=turn)
            )
            (rollout,) = engine.generate([request])
            with torch.no_grad():
                expected = torch.log_softmax(
                    logits_of(load_reference(str(folders / seed)), rollout.token_ids), -1
                )
            for at in range(len(prompt), len(rollout.token_ids)):
                found = float(rollout.rollout_log_probs[at])
                assert found == pytest.approx(float(expected[at - 1, rollout.token_ids[at]]), abs=1e-3)


def test_an_aborted_response_keeps_what_was_sampled(engine):
    requests = asked(3)
    engine.add(requests)
    engine.step()
    stopped = engine.abort(["r1"])
    assert [r.finish_reason for r in stopped] == ["abort"]
    assert 0 < stopped[0].response_length < 24
    engine.abort(["r0", "r2"])
    whole = {r.request_id: r for r in engine.generate([dataclasses.replace(requests[1], id="again")])}[
        "again"
    ]
    count = len(stopped[0].token_ids)
    assert whole.token_ids[:count].tolist() == stopped[0].token_ids.tolist()


def test_short_responses_come_back_while_long_ones_decode(engine):
    requests = asked(2)
    requests[0].sampling = dataclasses.replace(requests[0].sampling, max_response_tokens=2)
    engine.add(requests)
    assert [r.request_id for r in engine.step()] == ["r0"]
    assert engine.num_unfinished == 1


def test_a_signal_that_raises_in_a_step_is_held_back_until_no_token_is_half_made(engine, monkeypatch):
    class Interrupted(BaseException):
        pass

    def interrupt(number, frame):
        raise Interrupted

    alone = {r.request_id: r.token_ids.tolist() for r in engine.generate(asked(2))}
    core = engine._llm.engine_core.engine_core.model_executor
    sample = core.sample_tokens

    def hurt(*arguments, **named):  # between the pass through the model and the choice of tokens
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        return sample(*arguments, **named)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        engine.add(asked(2))
        engine.add(asked(3, max_response_tokens=1)[2:])
        monkeypatch.setattr(core, "sample_tokens", hurt)
        with pytest.raises(Interrupted):
            engine.step()
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGUSR1, before)
    assert [r.finish_reason for r in engine.abort(["r1"])] == ["abort"]
    assert [r.request_id for r in engine.abort(["r2"])] == ["r2"]  # it had finished when the signal came
    rest = []
    while engine.num_unfinished:
        rest += engine.step()
    assert {r.request_id: r.token_ids.tolist() for r in rest} == {"r0": alone["r0"]}


def whole_log_probs(path, rollout, temperature):
    """Of transformers in float32: each sampled token's, over the whole vocabulary after temperature."""
    module = load_reference(str(path)).float()
    with torch.no_grad():
        logits = module(rollout.token_ids[None]).logits[0]
    found = torch.log_softmax(logits / temperature, -1)[:-1].gather(1, rollout.token_ids[1:, None])[:, 0]
    return found[rollout.prompt_length - 1 :]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 0.5, "max_support": 8},
        {"temperature": 1.3, "top_k": 5, "top_p": 0.9},
    ],
    ids=str,
)
def test_log_probs_of_the_whole_distribution_are_those_of_transformers(engine, folders, sampling):
    found = engine.generate(asked(4, **sampling))
    cut = "top_p" in sampling
    for rollout in found:
        log_probs = rollout.rollout_log_probs
        assert ("support_log_mass" in rollout.extras) == cut
        if cut:
            mass = rollout.extras["support_log_mass"]
            assert bool((mass[rollout.loss_mask] < 0).any())
            log_probs = log_probs + mass
        expected = whole_log_probs(folders / "0", rollout, sampling["temperature"])
        assert float((log_probs[rollout.prompt_length :] - expected).abs().max()) < 2e-5


def test_a_stopped_response_knows_what_was_kept_of_each_distribution(engine, folders):
    """Also where requests leave the batch before others, and others take their rows."""
    cut = {"temperature": 0.7, "top_p": 0.7, "stop_token_ids": ()}
    requests = asked(6, **cut)
    for at in (0, 2):
        requests[at].sampling = dataclasses.replace(requests[at].sampling, max_response_tokens=3)
    engine.add(requests[:4])
    found = engine.step()
    engine.add(requests[4:])
    while len(found) < 5:
        found += engine.step()
        if engine.num_unfinished and not any(r.request_id == "r1" for r in found):
            begun = engine.abort(["r1"])
            if begun:
                assert begun[0].finish_reason == "abort"
                engine.add([dataclasses.replace(requests[1], begun=begun[0])])
    while engine.num_unfinished:
        found += engine.step()
    assert sorted(r.request_id for r in found) == [f"r{i}" for i in range(6)]
    for rollout in found:
        whole = (rollout.rollout_log_probs + rollout.extras["support_log_mass"])[rollout.prompt_length :]
        assert float((whole - whole_log_probs(folders / "0", rollout, 0.7)).abs().max()) < 2e-5


def test_log_probs_are_left_out_where_nobody_reads_them(engine):
    (with_them,) = engine.generate(asked(1))
    (without,) = engine.generate(asked(1, log_probs=False))
    assert without.token_ids.tolist() == with_them.token_ids.tolist()
    assert not without.rollout_log_probs.any()
    assert with_them.rollout_log_probs[3:].all()


def test_weights_that_are_not_numbers_end_the_run(engine, folders):
    weights = load_file(folders / "0" / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    engine.update_weights(weights.items(), 3)
    with pytest.raises(
        TrainingFailed, match=r"logits that are not numbers \(request 'r0', policy version 3\)"
    ):
        engine.generate(asked(1))


def test_a_refused_update_changes_nothing(engine, folders):
    before = engine.generate(asked(2))
    weights = load_file(folders / "1" / "model.safetensors")
    weights.pop("model.norm.weight")
    with pytest.raises(Exception, match=r"lacks 1 weights, such as 'model\.norm\.weight'"):
        engine.update_weights(weights.items(), 9)
    if engine._updater.how == "layerwise":  # nothing was touched, so sampling goes on
        after = engine.generate(asked(2))
        assert [r.token_ids.tolist() for r in after] == [r.token_ids.tolist() for r in before]


def test_a_stop_string_on_the_border_of_a_stopped_response_ends_it(engine):
    (request,) = asked(1)
    engine.add([request])
    engine.step()
    (begun,) = engine.abort(["r0"])
    (plain,) = engine.generate([dataclasses.replace(request, begun=begun)])
    count = len(begun.token_ids)
    text = tokenizer().decode(plain.token_ids[count - 2 : count + 2].tolist(), skip_special_tokens=False)
    sampling = dataclasses.replace(request.sampling, stop=(text,))
    (whole,) = engine.generate([dataclasses.replace(request, begun=begun, sampling=sampling)])
    assert whole.finish_reason == "stop"
    assert whole.token_ids.tolist() == plain.token_ids[: count + 2].tolist()


def test_a_response_that_goes_on_draws_other_numbers_than_it_began_with(engine):
    """With the same ones a prompt that ends in its own beginning would be sampled alike again."""
    (request,) = asked(1, temperature=2.0)
    (whole,) = engine.generate([request])
    ids = whole.token_ids[:11]  # the prompt and eight tokens
    begun = dataclasses.replace(whole, **{name: getattr(whole, name)[:11] for name in COLUMNS})
    (other,) = engine.generate([dataclasses.replace(request, begun=begun)])
    assert other.token_ids[:11].tolist() == ids.tolist()
    assert other.token_ids[11:19].tolist() != whole.token_ids[11:19].tolist()
    again = engine.generate([dataclasses.replace(request, begun=begun)])[0]
    assert again.token_ids.tolist() == other.token_ids.tolist()


def test_weights_in_buckets_are_those_that_vllms_model_loads_at_once(engine, folders, monkeypatch):
    """Models of vLLM as they are before its CPU kernels pack their weights: fused q, k, v and gate, up."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    from engine_plugin_vllm_rollout import versions, weights

    config = engine._llm.vllm_config
    with set_current_vllm_config(config):
        whole, updated = (initialize_model(config, prefix=name) for name in ("whole", "updated"))
    monkeypatch.setattr(versions, "needs_layerwise", lambda llm: False)
    monkeypatch.setattr(versions, "model_of", lambda llm: updated)
    monkeypatch.setattr(weights, "BUCKET", 10_000)
    updater = weights.Updater(engine._llm, engine._updater._shapes)
    for seed in ("0", "1"):
        loaded = load_file(folders / seed / "model.safetensors")
        whole.load_weights(iter(loaded.items()))
        updater.take(loaded.items(), 1)
        expected, found = dict(whole.named_parameters()), dict(updated.named_parameters())
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_starting_leaves_the_random_state_alone(folders):
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    set_num_threads = torch.set_num_threads
    made = build(folders / "0")
    made.close()
    assert torch.rand(2).tolist() == expected
    assert torch.set_num_threads is set_num_threads


def test_the_options_read_from_the_source_are_those_of_vllm():
    from vllm import EngineArgs

    from engine_plugin_vllm_rollout.installed import engine_options

    assert set(engine_options()) == {field.name for field in dataclasses.fields(EngineArgs)}


def test_a_length_without_room_for_a_prompt_is_refused_before_vllm_starts(folders):
    with pytest.raises(
        ConfigError,
        match=r"max_model_len = 32 leaves no room for a prompt: rollout\.max_response_tokens is 32",
    ):
        build(folders / "0", response=32, max_model_len=32)


def test_a_length_over_the_models_is_one_message(folders):
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.max_model_len is more than the model can hold"):
        build(folders / "0", max_model_len=4096)


def test_each_update_of_a_mixture_of_experts_is_what_is_sampled(tmp_path):
    """On a CPU vLLM packs the weights of experts for its kernels when it loads them first."""
    shape = {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    for seed in (0, 1):
        write_model(tmp_path / str(seed), shape, seed, tied=False)
    engine = build(tmp_path / "0")
    try:
        for version, seed in enumerate(("0", "1", "0")):
            if version:
                engine.update_weights(load_file(tmp_path / seed / "model.safetensors").items(), version)
            (rollout,) = engine.generate(asked(1, temperature=1.0))
            with torch.no_grad():
                rows = torch.log_softmax(
                    logits_of(load_reference(str(tmp_path / seed)), rollout.token_ids), -1
                )
            expected = rows[2:-1].gather(1, rollout.token_ids[3:, None].long()).squeeze(1)
            torch.testing.assert_close(
                rollout.rollout_log_probs[3:].double(), expected, atol=1e-3, rtol=0, check_dtype=False
            )
    finally:
        engine.close()


def test_a_signal_during_a_step_reaches_its_handler_after_the_step_whatever_thread_receives_it():
    done, received = threading.Event(), []
    other = threading.Thread(target=done.wait)  # its signals are not blocked
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    other.start()
    try:
        with whole():
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.02)
            assert received == []
        assert received == [signal.SIGUSR1]
    finally:
        done.set()
        other.join()
        signal.signal(signal.SIGUSR1, before)
