"""Every estimator and stage of the core through the real trainer, on the default path."""

import json
import math
import shutil
import tomllib
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine_core import Trainer, builtin, load_config
from engine_core.errors import ConfigError, PluginError
from engine_core.plugins.plugin_set import known_names
from engine_core.runs.rollout_files import read_rollouts
from engine_plugin_trainers import plugin as trainers


def digits(completions):
    """Share of characters that are digits: a reward with a spread for a random model."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def even(completions):
    """1 where the response has an even number of characters: of small groups many have no spread."""
    return [float(len(text) % 2 == 0) for text in completions]


def trainer(grpo, changes=None, rewards=(digits,)):
    return Trainer(load_config(overrides={**grpo, **(changes or {})}), rewards=list(rewards))


def metrics_of(run):
    return [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]


def without_time(lines):
    dropped = ("time", "throughput", "memory", "sync/seconds")
    return [{k: v for k, v in line.items() if not k.startswith(dropped)} for line in lines]


def rollouts_of(run, step):
    return read_rollouts(sorted(run.folder.rollouts_dir.glob("*.parquet"))[step - 1])


def trained(run, **arguments):
    run.train(**arguments)
    run.close()
    return metrics_of(run)


def dynamic(**options):
    return {"stage": [{"name": "dynamic_sampling", "dynamic_sampling": options}], "rollout.group_size": 2}


def teacher(grpo, folder):
    """The student's model with weights of its own."""
    shutil.copytree(grpo["model.path"], folder / "teacher")
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(grpo["model.path"])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "teacher")
    return str(folder / "teacher")


ADVANTAGES = sorted({*builtin.engine_advantages(), *trainers.engine_advantages()})


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_estimator_trains_two_steps(grpo, name, tmp_path):
    rewards = [digits, even] if name == "gdpo" else [digits]
    changes = {"teacher.path": teacher(grpo, tmp_path)} if name == "distill" else {}
    lines = trained(trainer(grpo, {"algorithm.advantage": name, **changes}, rewards))
    assert [line["step"] for line in lines] == [1, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    assert all(line["actor/grad_norm"] > 0 for line in lines)


def test_every_offered_name_is_installed():
    assert set(ADVANTAGES) <= set(known_names("advantages"))


def test_remax_pays_one_greedy_response_a_prompt_and_says_so(grpo):
    plain = trained(trainer(grpo, {"run.name": "plain", "run.steps": 1}))[0]
    remax = trained(trainer(grpo, {"algorithm.advantage": "remax", "run.steps": 1}))[0]
    assert remax["rollouts"] == plain["rollouts"] == 16
    assert 0 < remax["greedy/tokens"] <= 4 * 8
    assert remax["tokens/generated"] == plain["tokens/generated"] + remax["greedy/tokens"]
    assert "greedy/reward_mean" in remax
    assert "greedy/tokens" not in plain


def test_a_greedy_baseline_is_the_reward_of_the_most_likely_response(grpo):
    run = trainer(grpo, {"algorithm.advantage": "remax"})
    run.setup()
    prompts = run.source.take(2)
    run.source = SimpleNamespace(take=lambda count: prompts, close=run.source.close)
    run.config_now.data.prompts_per_step = 2
    rollouts, _ = run.rollouts(1)
    batch = run.batch(rollouts)
    again = run.sampler.sample_greedy(prompts, 7)
    run.score(again, 7, training=False)
    expected = [reward for greedy in again for reward in [greedy.reward] * 4]
    assert batch["greedy_rewards"].tolist() == pytest.approx(expected)
    run.close()


def test_a_kl_in_the_reward_is_refused_where_the_sum_of_rewards_is_not_read(grpo):
    settings = {"algorithm.advantage": "gdpo", "algorithm.kl_coef": 0.1, "algorithm.kl_in": "reward"}
    with pytest.raises(ConfigError, match=r"'gdpo' does not read. Set algorithm.kl_in = 'loss'"):
        trainer(grpo, settings)


def test_a_kl_in_the_reward_stands_at_its_token(grpo):
    settings = {"algorithm.advantage": "reinforce", "algorithm.kl_coef": 0.5, "algorithm.kl_in": "reward"}
    settings |= {"actor.optim.lr": 0.1}
    run, seen = trainer(grpo, settings), []
    original = run.with_advantages
    run.with_advantages = lambda batch: seen.append(original(batch)) or seen[-1]
    run.train()
    batch = seen[1]  # the policy has left the reference
    assert float(batch["kl_penalty"].abs().max()) > 0
    first = batch["loss_mask"] & ~batch["loss_mask"].roll(1)
    assert batch["advantages"][first].tolist() == pytest.approx(batch["rewards"].tolist(), abs=1e-5)
    later = batch["advantages"][batch["loss_mask"]].unique()
    assert len(later) > len(batch)
    run.close()


def test_truncated_responses_teach_nothing_but_count_in_their_group(grpo):
    run = trainer(grpo, {"algorithm.mask_truncated": True, "rollout.max_response_tokens": 3})
    run.setup()
    rollouts, _ = run.rollouts(1)
    for rollout in rollouts[::3]:  # a random model seldom stops by itself
        rollout.finish_reason = "stop"
    batch = run.with_advantages(run.batch(rollouts))
    learned = batch.sum_by_sequence(batch["loss_mask"].long()) > 0
    assert learned.tolist() == [rollout.finish_reason == "stop" for rollout in rollouts]
    rewards = [rollout.reward for rollout in rollouts[:4]]
    value = batch["advantages"][: batch.lengths[0]].abs().max()
    mean = sum(rewards) / 4
    std = (sum((r - mean) ** 2 for r in rewards) / 3) ** 0.5
    assert float(value) == pytest.approx(abs(rewards[0] - mean) / (std + 1e-6), rel=1e-4)
    run.close()


def test_dropped_groups_are_replaced_from_further_prompts(grpo):
    run = trainer(grpo, dynamic(), [even])
    lines = trained(run)
    assert any(line["stage/dynamic_sampling/dropped_groups"] for line in lines)
    for step, line in enumerate(lines, 1):
        kept = rollouts_of(run, step)
        groups = {r.group_id: {k.reward for k in kept if k.group_id == r.group_id} for r in kept}
        assert len(groups) == 4
        assert all(len(rewards) == 2 for rewards in groups.values())
        assert line["stage/dynamic_sampling/groups"] == 4 + line["stage/dynamic_sampling/dropped_groups"]
        assert line["stage/dynamic_sampling/missing_groups"] == 0
        assert line["rollouts"] == 2 * line["stage/dynamic_sampling/groups"]
        assert line["tokens/total"] == sum(len(r.token_ids) for r in kept)
    taken = sum(line["stage/dynamic_sampling/groups"] for line in lines)
    assert run.source.state()["position"] == taken


def test_resume_with_refills_is_the_uninterrupted_run(grpo):
    settings = dynamic(oversample=1.5) | {"run.steps": 4}
    whole = trainer(grpo, settings | {"run.name": "whole"}, [even])
    straight = trained(whole)
    assert sum(line["stage/dynamic_sampling/rounds"] for line in straight) > 4
    first = trainer(grpo, settings | {"run.steps": 2}, [even])
    trained(first)
    second = trainer(grpo, settings, [even])
    assert without_time(trained(second, resume=first.folder.path)) == without_time(straight)
    ends = [next(run.folder.checkpoints.glob("*04/actor/*.safetensors")) for run in (whole, second)]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def test_surplus_groups_of_an_oversampled_round_are_dropped(grpo):
    run = trainer(grpo, dynamic(oversample=4.0) | {"run.steps": 1}, [even])
    line = {name.rpartition("/")[2]: value for name, value in trained(run)[0].items() if "dynamic" in name}
    assert (line["rounds"], line["groups"]) == (1, 16)
    assert line["surplus_groups"] == 16 - line["dropped_groups"] - 4 > 0
    assert len({r.group_id for r in rollouts_of(run, 1)}) == 4
    assert run.source.state()["position"] == 16


def test_rounds_have_a_limit_and_a_step_without_a_group_updates_nothing(grpo, caplog):
    constant = [lambda completions: [1.0] * len(completions)]
    run = trainer(grpo, dynamic(max_rounds=3) | {"run.steps": 1}, constant)
    line = trained(run)[0]
    assert line["stage/dynamic_sampling/rounds"] == 3
    assert line["stage/dynamic_sampling/missing_groups"] == 4
    assert line["actor/empty_updates"] == 1
    assert "actor/grad_norm" not in line
    assert "4 of 4 groups are missing after 3 rounds" in caplog.text


def test_stages_after_a_refill_see_all_rounds_at_once(grpo):
    settings = dynamic() | {"run.steps": 1, "algorithm.advantage": "reinforce"}
    settings["stage"].append({"name": "pf_ppo_resample", "pf_ppo_resample": {"method": "pow"}})
    run = trainer(grpo, settings, [even])
    line = trained(run)[0]
    assert line["stage/dynamic_sampling/rounds"] > 1
    assert 0 < line["stage/pf_ppo_resample/distinct"] <= 0.5  # those whose reward is 0 are not drawn
    assert [r.reward for r in rollouts_of(run, 1)] == [1.0] * 8


def test_the_dapo_file_of_the_docs_is_all_of_dapo():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text("utf-8")
    text = page.split("```toml first/dapo.toml\n")[1].split("```")[0]
    table = tomllib.loads(text)
    assert [stage["name"] for stage in table["stage"]] == ["dynamic_sampling"]
    assert {reward["name"] for reward in table["reward"]} == {"numeric", "length"}
    algorithm = table["algorithm"]
    assert algorithm["mask_truncated"] is True
    assert algorithm["loss_aggregation"] == "token-mean"
    assert algorithm["ppo_clip"]["clip_ratio_high"] > algorithm["ppo_clip"]["clip_ratio_low"]


PLUGIN = """
from engine_core import hookimpl
from engine_core.specs import Advantage, Options, Stage

class Floor(Options):
    floor: float = 0.1
    \"\"\"Lowest.\"\"\"

def odd(batch, *, FLOOR):
    ESTIMATE

def cap(ROLLOUTS):
    RETURN

@hookimpl
def engine_advantages():
    return {"odd": Advantage(load=odd, config=Floor)}

@hookimpl
def engine_stages():
    return {"cap": Stage(load=cap)}
"""
GOOD = {
    "FLOOR": "floor",
    "ESTIMATE": "return batch.to_tokens(batch['rewards'])",
    "ROLLOUTS": "rollouts, step",
    "RETURN": "return rollouts, {'kept': len(rollouts)}",
}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({}, None),
        (
            {"FLOOR": "flor"},
            r"advantage estimator 'odd' must be callable as f\(batch, \*, floor\): missing .*'flor'",
        ),
        (
            {"ROLLOUTS": "rollouts"},
            r"stage 'cap' must be callable as f\(rollouts, step\): too many positional",
        ),
        (
            {"ESTIMATE": "return batch['rewards']"},
            r"must give advantages as \[T\] = \[\d+\], .*it gave \[16\]",
        ),
        ({"ESTIMATE": "return batch['reward']"}, r"'odd' failed: KeyError: .*no column 'reward'"),
        ({"RETURN": "return rollouts"}, r"Stage 'cap' must return \(rollouts, metrics\).*returned list"),
        ({"RETURN": "raise ValueError('no')"}, r"stage 'cap' failed: ValueError: no \(.*mine\.py:\d+"),
    ],
)
def test_what_a_plugins_function_does_wrong_is_said_with_its_name(grpo, tmp_path, broken, message):
    text = PLUGIN
    for place, code in (GOOD | broken).items():
        text = text.replace(place, code)
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "run.toml").write_text('plugins = ["mine.py"]\n[[stage]]\nname = "cap"\n')
    changes = {"algorithm.advantage": "odd", "run.steps": 1}
    with nullcontext() if message is None else pytest.raises(PluginError, match=message):
        run = Trainer(load_config(tmp_path / "run.toml", grpo | changes), rewards=[digits])
        with closing(run):
            assert run.train()["stage/cap/kept"] == 16
