"""Simulated runs against closed forms: the time of a step when every duration is known."""

import dataclasses

import pytest
from virtual_cluster.runs import MODES, Setting, simulate
from virtual_cluster.speeds import SPEEDS, Lengths, Speeds

from engine_core.errors import ConfigError
from engine_core.train.rollouts import sampling_seed

SPEED = Speeds(
    "test", "", token_seconds=0.01, token_seconds_each=0.0, prefill_rate=1e12, train_rate=1000.0,
    optimizer_seconds=0.0, weight_bytes=0, load_seconds=0.0, message_seconds=0.0, controller_bandwidth=1e18,
    reward_seconds=0.0, call_tokens=1,
)  # fmt: skip
"""A response takes 10 ms a token, whoever is beside it; training 1 ms a token; nothing else takes any time."""


def setting(**changes):
    given = {
        "workers": 2,
        "speeds": SPEED,
        "prompts_per_worker": 2,
        "group_size": 2,
        "prompt_tokens": 4,
        "steps": 3,
    }
    return Setting(**(given | {"trainer_share": 0.5} | changes))


def lengths_of(lengths, step, prompts, group):
    """Return the lengths of a step's responses, as the samplers draw them."""
    return [lengths.of(sampling_seed(0, step, p, g)) for p in range(prompts) for g in range(group)]


def test_a_step_in_turn_takes_its_longest_response_and_then_the_busiest_trainer():
    lengths = Lengths(20, 90, 120)
    found = simulate(setting(lengths=lengths))
    for number, line in enumerate(found["lines"], 4):
        assert line["step"] == number
        each = lengths_of(lengths, number, prompts=4, group=2)
        assert line["time/generate"] == pytest.approx(max(each) * 0.01, rel=1e-9)
        tokens = [4 + length for length in each]  # of 2 ranks; the shares differ by less than one sequence
        assert sum(tokens) / 2 <= line["time/train"] / 0.001 + 1e-6 <= (sum(tokens) + max(tokens)) / 2
        assert line["time/step"] == pytest.approx(line["time/generate"] + line["time/train"], rel=1e-9)
    assert found["step_s"] == pytest.approx(sum(line["time/step"] for line in found["lines"]) / 3, rel=1e-9)


def test_it_runs_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(simulate(setting())["lines"]) == 3


@pytest.mark.parametrize("rate", [200.0, 480.0, 2000.0])
def test_one_step_off_a_step_takes_the_longer_of_sampling_and_training(rate):
    equal = Lengths(50, 50, 50)  # 0.5 s to sample
    speeds = dataclasses.replace(SPEED, train_rate=rate, capacity=8)
    tokens = 8 * 54
    # the one sampler has room for the 8 responses of a step
    training = tokens / rate  # with one update a step there is no pass for log-probs before it
    found = simulate(setting(mode="async-1", lengths=equal, speeds=speeds))
    assert found["step_s"] == pytest.approx(max(0.5, training), rel=0.03)
    in_turn = simulate(setting(lengths=equal, speeds=speeds))
    assert in_turn["step_s"] == pytest.approx(0.5 + tokens / 2 / rate, rel=1e-6)


def test_idle_shares_are_what_is_left_of_the_time():
    found = simulate(setting(lengths=Lengths(50, 50, 50)))  # 0.5 s sampling, 216 ms training, both on all
    whole = 0.5 + 8 * 54 / 2 / 1000
    assert found["idle_samplers"] == pytest.approx(1 - 0.5 / whole, rel=1e-6)
    assert found["idle_trainers"] == pytest.approx(0.5 / whole, rel=1e-6)
    assert found["idle"] == pytest.approx(0.0, abs=1e-6)
    assert found["staleness"] == {"0": 1.0}
    assert found["tokens_per_s"] == pytest.approx(8 * 50 / whole, rel=1e-6)


@pytest.mark.parametrize("mode", ["async-2", "early-stop", "early-stop-rounds"])
def test_the_same_setting_gives_the_same_run(mode):
    given = setting(mode=mode, lengths=Lengths(20, 90, 120), steps=2)
    first, second = (simulate(given) for _ in range(2))
    for name in ("step_s", "staleness", "idle", "messages", "bytes", "tokens_per_s"):
        assert first[name] == second[name]
    assert max(map(int, first["staleness"])) <= max(MODES[mode].staleness, 4)


def test_prompts_that_others_tokenize_change_nothing_of_what_happens():
    own = simulate(Setting(workers=4, mode="async-1", steps=2))
    others = simulate(Setting(workers=4, mode="async-1", steps=2, data_workers=1))
    same = ("step_s", "idle", "tokens_per_s", "staleness", "messages")
    assert [others[name] for name in same] == [own[name] for name in same]


def test_weights_from_one_rank_to_each_sampler_take_as_many_times_as_there_are_samplers():
    speeds = dataclasses.replace(SPEED, weight_bytes=10**9, weight_bandwidth=1e9)
    for way, seconds in (("relay", 1.0), ("star", 3.0)):
        given = setting(
            workers=4, trainer_share=0.25, speeds=speeds, lengths=Lengths(50, 50, 50), mode="async-1"
        )
        found = simulate(dataclasses.replace(given, weights=way))
        assert found["sync_s"] == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workers": 1}, "--workers 1: expected at least 2"),
        ({"trainer_share": 1.0}, "--trainer-share 1"),
    ],
)
def test_what_cannot_be_simulated_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        setting(**changes)


def test_the_rates_of_a_model_are_those_that_were_measured():
    small = SPEEDS["qwen3-0.6b"]
    assert 512 / small.decode_step(512) == pytest.approx(40_400)
    assert 1 / small.decode_step(1) == pytest.approx(414)


def test_lengths_have_the_median_and_the_tail_that_they_say():
    drawn = sorted(Lengths(300, 4096, 8192).of(sampling_seed(0, 1, 0, i)) for i in range(20_000))
    assert drawn[10_000] == pytest.approx(300, rel=0.03)
    assert drawn[19_800] == pytest.approx(4096, rel=0.1)
    assert drawn[-1] == 8192
