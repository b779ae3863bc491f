import pytest
import torch

from engine_core.algorithms.requirements import plan, plan_run
from engine_core.config import AlgorithmConfig, EngineConfig
from engine_core.errors import ConfigError
from engine_core.specs import Advantage, Loss

GRPO = Advantage(load=lambda: None)
CLIP = Loss(load=lambda: None)


def planned(advantage=GRPO, loss=CLIP, prompts=8, **algorithm):
    return plan(AlgorithmConfig(**algorithm), advantage, loss, prompts)


def test_one_update_without_kl_needs_nothing_from_a_model():
    made = planned()
    assert made.columns == ()
    assert made.updates_per_step == 1
    assert not made.needs_ref


@pytest.mark.parametrize(
    ("settings", "updates"),
    [({"epochs": 2}, 2), ({"mini_batch_prompts": 4}, 2), ({"mini_batch_prompts": 4, "epochs": 3}, 6)],
)
def test_a_policy_that_moves_between_updates_needs_old_log_probs(settings, updates):
    made = planned(**settings)
    assert made.columns == ("old_log_probs",)
    assert made.updates_per_step == updates


def test_a_kl_in_the_loss_needs_the_reference_alone():
    assert planned(kl_coef=0.1).columns == ("ref_log_probs",)


def test_a_kl_in_the_reward_needs_both():
    assert planned(kl_coef=0.1, kl_in="reward").columns == ("old_log_probs", "ref_log_probs")


def test_an_entropy_bonus_is_differentiated():
    assert planned().outputs == ("log_probs",)
    assert planned(entropy_coef=0.01).outputs == ("log_probs", "entropy")


def test_what_an_estimator_declares_is_made():
    assert planned(advantage=Advantage(load=lambda: None, needs=frozenset({"ref_log_probs"}))).needs_ref


def test_values_come_from_a_critic_which_learns_from_returns():
    needs, makes = frozenset({"rewards", "values"}), frozenset({"advantages", "returns"})
    made = planned(advantage=Advantage(load=lambda: None, needs=needs, makes=makes))
    assert made.needs_critic
    assert made.inferred(torch.zeros(4), AlgorithmConfig()) == {"critic": {"values": "values"}}
    assert not planned().needs_critic
    with pytest.raises(ConfigError, match=r"algorithm.advantage = 'grpo' makes no column 'returns'"):
        planned(advantage=Advantage(load=lambda: None, needs=needs))


def test_a_column_that_nobody_makes_is_refused_by_name():
    wrong = Advantage(load=lambda: None, needs=frozenset({"rewards", "old_log_prob"}))
    with pytest.raises(
        ConfigError,
        match=r"algorithm.advantage = 'grpo' needs the column 'old_log_prob'.*Did you mean 'old_log_probs'",
    ):
        planned(advantage=wrong)


def test_a_schedule_is_planned_for_all_its_steps():
    config = EngineConfig(
        data={"prompts_per_step": 8},
        schedule={
            "algorithm.kl_coef": [(0, 0.0), (5, 0.1)],
            "algorithm.epochs": [(3, 2)],
            "algorithm.entropy_coef": [(4, 0.1)],
        },
    )
    made = plan_run(config, GRPO, CLIP)
    assert made.columns == ("old_log_probs", "ref_log_probs")
    assert made.outputs == ("log_probs", "entropy")
    assert made.updates_per_step == 2


def test_an_output_that_no_engine_computes_is_refused_by_name():
    wrong = Loss(load=lambda: None, outputs=("log_probs", "values"))
    with pytest.raises(
        ConfigError, match=r"algorithm.loss = 'ppo_clip' needs the output 'values'.*Known: entropy, log_probs"
    ):
        planned(loss=wrong)


def needing(*columns, **arguments):
    return Advantage(load=lambda: None, needs=frozenset(columns), **arguments)


def test_a_greedy_baseline_is_sampled_where_it_is_needed_alone():
    assert not planned().greedy
    made = planned(advantage=needing("rewards", "greedy_rewards"))
    assert made.greedy
    assert made.columns == ()


def test_one_call_of_a_role_makes_all_of_its_columns():
    made = planned(advantage=needing("rewards", "old_log_probs", "sum_pi_squared"), kl_coef=0.1)
    calls = made.inferred(torch.tensor([0, 0]), AlgorithmConfig(kl_coef=0.1))
    assert calls == {
        "actor": {"log_probs": "old_log_probs", "sum_pi_squared": "sum_pi_squared"},
        "ref": {"log_probs": "ref_log_probs"},
    }


def test_a_kl_in_the_reward_needs_an_estimator_that_reads_the_reward():
    terms = needing("reward_terms", "group_ids")
    assert planned(advantage=terms, kl_coef=0.1).needs_ref
    with pytest.raises(ConfigError, match=r"'grpo' does not read. Set algorithm.kl_in = 'loss'"):
        planned(advantage=terms, kl_coef=0.1, kl_in="reward")


def test_a_loss_may_need_what_the_estimator_makes():
    loss = Loss(load=lambda: None, needs=frozenset({"advantages", "surprise"}))
    with pytest.raises(ConfigError, match=r"algorithm.loss = 'ppo_clip' needs the column 'surprise'"):
        planned(loss=loss)
    planned(advantage=needing("rewards", makes=frozenset({"advantages", "surprise"})), loss=loss)


def test_an_estimator_that_reads_the_samplers_log_probs_has_them_in_every_step():
    config = EngineConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "rollout": {"log_probs_every_steps": 4},
        }
    )
    reads = Advantage(load=lambda: None, needs=frozenset({"rewards", "rollout_log_probs"}))
    plan_run(config, GRPO, CLIP)
    with pytest.raises(
        ConfigError, match=r"log_probs_every_steps: got 4, expected 1: algorithm.advantage = 'grpo' reads"
    ):
        plan_run(config, reads, CLIP)
