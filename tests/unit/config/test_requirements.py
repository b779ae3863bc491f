import pytest
import torch

from engine_core.builtin import COLUMNS
from engine_core.config import AlgorithmConfig, EngineConfig
from engine_core.config.requirements import ROLLOUT_COLUMNS, optimizer_steps, plan, plan_run, producers_of
from engine_core.errors import ConfigError, PluginError
from engine_core.specs import Advantage, Column, Loss
from engine_plugin_trainers.options import ReplayCacheOptions

GRPO = Advantage(load=lambda: None)
CLIP = Loss(load=lambda: None)


def planned(advantage=GRPO, loss=CLIP, prompts=8, producers=COLUMNS, **algorithm):
    return plan(AlgorithmConfig(**algorithm), advantage, loss, prompts, producers)


def test_one_update_without_kl_needs_nothing_from_a_model():
    made = planned()
    assert made.columns == ()
    assert made.updates_per_step == 1
    assert not made.needs("ref")


@pytest.mark.parametrize(
    ("settings", "updates"),
    [({"epochs": 2}, 2), ({"mini_batch_prompts": 4}, 2), ({"mini_batch_prompts": 4, "epochs": 3}, 6)],
)
def test_a_policy_that_moves_between_updates_needs_old_log_probs(settings, updates):
    made = planned(**settings)
    assert made.columns == ("old_log_probs",)
    assert made.updates_per_step == updates


def test_a_level_with_bypass_is_refused_unless_the_loss_has_no_ratio():
    twice = {"correction": {"bypass": True, "level": "token"}}
    with pytest.raises(ConfigError, match="level = 'token' would weigh tokens twice"):
        planned(**twice)
    assert planned(loss=Loss(load=lambda: None, ratio=False), **twice).columns == ()
    assert planned(correction={"bypass": True}).columns == ()


def test_a_kl_in_the_loss_needs_the_reference_alone():
    assert planned(kl_coef=0.1).columns == ("ref_log_probs",)


def test_a_kl_in_the_reward_needs_both():
    assert planned(kl_coef=0.1, kl_in="reward").columns == ("old_log_probs", "ref_log_probs")


def test_an_entropy_bonus_is_differentiated():
    assert planned().outputs == ("log_probs",)
    assert planned(entropy_coef=0.01).outputs == ("log_probs", "entropy")


def test_what_an_estimator_declares_is_made():
    assert planned(advantage=Advantage(load=lambda: None, needs=frozenset({"ref_log_probs"}))).needs("ref")


def test_values_come_from_a_critic_which_learns_from_returns():
    needs, makes = frozenset({"rewards", "values"}), frozenset({"advantages", "returns"})
    made = planned(advantage=Advantage(load=lambda: None, needs=needs, makes=makes))
    assert made.needs("critic")
    assert made.inferred(torch.zeros(4), AlgorithmConfig()) == {"critic": {"values": "values"}}
    assert not planned().needs("critic")
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


def test_optimizer_steps_are_those_that_the_schedule_gives_each_step():
    config = EngineConfig(
        data={"prompts_per_step": 8},
        schedule={"algorithm.epochs": [(3, 2)], "algorithm.mini_batch_prompts": [(0, 8), (5, 3)]},
    )
    each = [1, 1, 2, 2, 6, 6]
    assert [optimizer_steps(config, steps) for steps in range(7)] == [sum(each[:n]) for n in range(7)]
    assert optimizer_steps(EngineConfig(algorithm={"epochs": 3}), 4) == 12


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
        "actor": {"old_log_probs": "log_probs", "sum_pi_squared": "sum_pi_squared"},
        "ref": {"ref_log_probs": "log_probs"},
    }


def test_a_kl_in_the_reward_needs_an_estimator_that_reads_the_reward():
    terms = needing("reward_terms", "group_ids")
    assert planned(advantage=terms, kl_coef=0.1).needs("ref")
    with pytest.raises(ConfigError, match=r"'grpo' does not read. Set algorithm.kl_in = 'loss'"):
        planned(advantage=terms, kl_coef=0.1, kl_in="reward")


def test_a_loss_may_need_what_the_estimator_makes():
    loss = Loss(load=lambda: None, needs=frozenset({"advantages", "surprise"}))
    with pytest.raises(ConfigError, match=r"algorithm.loss = 'ppo_clip' needs the column 'surprise'"):
        planned(loss=loss)
    planned(advantage=needing("rewards", makes=frozenset({"advantages", "surprise"})), loss=loss)


# ------------------------------------------------------------------ columns of plugins


class Offering:
    """A set of plugins that offers these columns; a broken one is an exception."""

    def __init__(self, **columns):
        self.columns, self.asked = columns, []

    def offered(self, kind, name):
        assert kind == "columns"
        self.asked.append(name)
        if isinstance(found := self.columns.get(name), Exception):
            raise found
        return found


def made_of(*needs):
    """A column that a function computes."""
    return Column(load=lambda batch: batch, needs=frozenset(needs))


def planned_with(plugins, *needs, loss=CLIP, **algorithm):
    advantage = needing("rewards", *needs)
    return planned(advantage, loss, producers=producers_of(plugins, advantage, loss), **algorithm)


CHAIN = {
    "surprise": made_of("old_log_probs"),
    "scaled": made_of("surprise", "lengths"),
    "lengths": made_of("response_lengths", "ref_entropy"),
    "ref_entropy": Column(role="ref", output="entropy"),
}


def test_each_column_stands_after_those_that_it_reads():
    found = list(producers_of(Offering(**CHAIN), needing("scaled"), CLIP))

    assert found.index("old_log_probs") < found.index("surprise") < found.index("scaled")
    assert found.index("ref_entropy") < found.index("lengths") < found.index("scaled")


def test_a_chain_is_planned_to_its_first_column():
    made = planned_with(Offering(**CHAIN), "scaled")

    assert set(made.columns) == {"old_log_probs", "ref_entropy"}
    assert sorted(made.derived) == ["lengths", "scaled", "surprise"]
    assert made.derived[-1] == "scaled"
    assert made.needs("ref")
    assert not made.needs("teacher")
    assert not made.needs("critic")
    calls = made.inferred(torch.tensor([0]), AlgorithmConfig())
    assert calls == {"actor": {"old_log_probs": "log_probs"}, "ref": {"ref_entropy": "entropy"}}


def test_columns_that_the_algorithm_does_not_need_are_not_looked_up():
    plugins = Offering(**CHAIN, unused=PluginError("broken"))

    assert planned_with(plugins, "ref_entropy").derived == ()
    assert not {"unused", "surprise", "scaled", *ROLLOUT_COLUMNS} & set(plugins.asked)
    with pytest.raises(PluginError, match="broken"):
        planned_with(plugins, "unused")


def test_a_loss_may_need_a_column_of_a_plugin():
    loss = Loss(load=lambda: None, needs=frozenset({"advantages", "surprise"}))

    assert planned_with(Offering(**CHAIN), loss=loss).derived == ("surprise",)


@pytest.mark.parametrize("role", ["actor", "ref", "teacher"])
def test_a_column_of_a_role_builds_that_role(role):
    made = planned_with(Offering(extra=Column(role=role, output="entropy")), "extra")

    wanted = {"ref": made.needs("ref"), "teacher": made.needs("teacher")}
    assert {name for name, needed in wanted.items() if needed} == {role} - {"actor"}
    assert not made.needs("critic")
    assert made.columns == ("extra",)
    assert made.derived == ()


def test_a_column_of_the_critic_is_made_next_to_its_values():
    advantage = needing("rewards", "values", "extra", makes=frozenset({"advantages", "returns"}))
    offered = Offering(extra=Column(role="critic", output="scores"))
    made = planned(advantage, producers=producers_of(offered, advantage, CLIP))

    assert made.needs("critic")
    calls = made.inferred(torch.tensor([0]), AlgorithmConfig())
    assert calls == {"critic": {"values": "values", "extra": "scores"}}


@pytest.mark.parametrize(
    "columns",
    [{"a": Column(role="critic", output="values")}, {"a": made_of("values")}],
    ids=["its own", "by way of values"],
)
def test_a_column_of_the_critic_without_values_for_the_estimator_is_refused(columns):
    said = "comes from the critic.* algorithm.advantage = 'grpo' must need 'values' itself and make 'returns'"
    with pytest.raises(ConfigError, match=said):
        planned_with(Offering(**columns), "a")


def test_what_every_batch_holds_is_not_a_plugins():
    made = planned_with(Offering(rewards=made_of(), old_log_probs=made_of()), "old_log_probs")

    assert (made.columns, made.derived) == (("old_log_probs",), ())


def test_a_column_may_read_what_the_rewards_gave():
    made = planned_with(Offering(length=made_of("reward/length", "reward_terms", "greedy_rewards")), "length")

    assert made.derived == ("length",)
    assert made.greedy


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"a": made_of("a")}, r"The column 'a' needs itself, by way of a\."),
        ({"a": made_of("b"), "b": made_of("c"), "c": made_of("a")}, "needs itself, by way of a and b and c"),
        (
            {"a": made_of("b"), "b": made_of("old_log_prob")},
            "The column 'b' needs 'old_log_prob', which nothing in this run makes. Did you mean 'old_log_probs'",
        ),
        ({"a": made_of("advantages")}, "The column 'a' needs 'advantages', which nothing in this run makes"),
        (
            {"a": Column(role="reff", output="entropy")},
            "The column 'a' has role = 'reff' and output = 'entropy', which no train engine computes",
        ),
        ({"a": Column(role="ref")}, "The column 'a' has role = 'ref' and output = ''"),
        ({"a": Column(role="critic", output="entropy")}, "'a' has role = 'critic' and output = 'entropy'"),
        ({"b": made_of()}, "algorithm.advantage = 'grpo' needs the column 'a'"),
    ],
)
def test_a_column_that_cannot_be_computed_is_refused_by_name(columns, said):
    with pytest.raises(ConfigError, match=said):
        planned_with(Offering(**columns), "a")


def test_a_derived_column_is_planned_for_all_steps_of_a_schedule():
    config = EngineConfig(data={"prompts_per_step": 8}, schedule={"algorithm.kl_coef": [(3, 0.1)]})
    advantage = needing("rewards", "surprise")
    made = plan_run(config, advantage, CLIP, producers_of(Offering(**CHAIN), advantage, CLIP))

    assert made.columns == ("old_log_probs", "ref_log_probs")
    assert made.derived == ("surprise",)


def test_two_columns_of_one_output_are_both_made():
    twice = Column(role="ref", output="log_probs")
    producers = {**COLUMNS, "again": twice}
    made = plan(AlgorithmConfig(kl_coef=0.1), needing("rewards", "again"), CLIP, 4, producers)
    calls = made.inferred(torch.tensor([0, 0]), AlgorithmConfig(kl_coef=0.1))
    assert calls["ref"] == {"ref_log_probs": "log_probs", "again": "log_probs"}


def test_updates_are_planned_for_batches_that_a_stage_enlarges():
    config = EngineConfig(
        data={"prompts_per_step": 4}, algorithm={"mini_batch_prompts": 2}, stage=[{"name": "replay_cache"}]
    )
    config.stage[0].options = ReplayCacheOptions(share=0.2)
    assert optimizer_steps(config, 10) == 10 * 3  # 5 groups a step
