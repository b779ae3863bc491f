"""``[teacher]``: what it takes from ``[actor]``, when it is read, what is said where it is missing; keys of a trainer in ``[schedule]``."""

import pytest

from engine_core.config.choices import used_names
from engine_core.config.completeness import check_complete
from engine_core.config.schedule import config_at, settings
from engine_core.errors import ConfigError

DISTILL = 'trainer = "distill"\n[model]\npath = "m"\n[data]\ntrain = "x.jsonl"\n'


def test_the_table_takes_backend_and_options_from_the_actor_where_it_says_nothing(config_of):
    actor = '[actor]\nmax_tokens_per_rank = 99\n[actor.torch]\ncompute_dtype = "bf16"\n'
    config = config_of(DISTILL + actor + '[teacher]\npath = "t"\n')
    assert (config.teacher.backend, config.teacher.max_tokens_per_rank) == ("torch", 99)
    assert config.role("teacher").options.compute_dtype == "bf16"
    own = config_of(DISTILL + actor + '[teacher]\npath = "t"\n[teacher.torch]\nparam_dtype = "bf16"\n')
    assert own.role("teacher").options.param_dtype == "bf16"
    assert used_names({"teacher": {"backend": "fsdp"}})["train_engines"] == {"torch", "fsdp"}


def test_changes_to_the_students_config_are_not_made_to_the_teachers(config_of):
    text = DISTILL.replace('path = "m"', 'path = "m"\noverride = { rope_theta = 1e6 }')
    config = config_of(text + '[teacher]\npath = "t"\n')
    assert config.model_of("actor").override == {"rope_theta": 1e6}
    assert config.model_of("teacher").override == {}


def test_an_estimator_that_asks_no_teacher_leaves_the_table_unread(config_of, good):
    config = config_of(good + '[teacher]\npath = "t"\n')
    assert config.teacher is None
    assert config.unread == ["[teacher]: algorithm.advantage = 'grpo' asks none"]
    asked = config_of(good + '[algorithm]\nadvantage = "distill"\n[teacher]\npath = "t"\n')
    assert asked.teacher.path == "t"


@pytest.mark.parametrize("chosen", ['advantage = "calm"', 'loss = "near"'])
def test_a_column_of_a_plugin_or_a_loss_may_ask_the_teacher(config_of, good, chosen):
    config = config_of(good + f'[algorithm]\n{chosen}\n[teacher]\npath = "t"\n')

    assert config.teacher.path == "t"
    assert config.unread == []


def test_what_learns_from_a_teacher_alone_needs_no_reward(config_of):
    text = '[model]\npath = "m"\n[data]\ntrain = "x.jsonl"\n[algorithm]\nadvantage = "distill"\n'
    check_complete(config_of(text + '[teacher]\npath = "t"\n'))
    with pytest.raises(ConfigError, match="reward: missing"):
        check_complete(config_of(text.replace("distill", "grpo")))


@pytest.mark.parametrize("table", ["", "[teacher]\n"])
def test_a_missing_teacher_is_named_with_its_key(config_of, table):
    with pytest.raises(
        ConfigError, match=r"teacher\.path: missing\. Trainer 'distill' learns from a teacher"
    ):
        check_complete(config_of(DISTILL + table))


def test_numbers_of_the_trainers_table_change_by_step_and_what_is_built_at_the_start_does_not(config_of):
    dpo = DISTILL.replace("distill", "dpo") + '[schedule]\n"dpo.beta" = [[5, 0.5]]\n'
    config = config_of(dpo)
    assert (config_at(config, 4).options.beta, config_at(config, 5).options.beta) == (0.1, 0.5)
    assert {"dpo.beta", "dpo.sft_coef"} <= set(settings(config))
    assert not {"dpo.max_tokens", "dpo.reference_free", "dpo.loss", "kto.beta"} & set(settings(config))


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            '"dpo.beta" = [[5, 0.0]]',
            "from step 5 on: got 0.0, expected a number above 0",
        ),
        (
            '"dpo.simpo_gamma" = [[5, 1.0]]',
            "from step 5 on: got 1.0: loss = 'sigmoid' does not read simpo_gamma",
        ),
        (
            '"dpo.reference_free" = [[5, true]]',
            "this cannot change during a run",
        ),
    ],
)
def test_a_change_that_the_table_would_not_take_is_refused(config_of, entry, expected):
    with pytest.raises(ConfigError) as error:
        config_of(DISTILL.replace("distill", "dpo") + f"[schedule]\n{entry}\n")
    assert expected in str(error.value)


def test_each_role_is_built_from_its_own_folder(config_of):
    config = config_of(
        '[model]\npath = "m"\n[ref]\npath = "r"\n[algorithm]\nadvantage = "gae"\n[critic]\npath = "c"\n'
    )
    paths = {role: config.model_of(role).path for role in ("actor", "ref", "critic", "rollout")}
    assert paths == {"actor": "m", "ref": "r", "critic": "c", "rollout": "m"}
