import logging

import pytest

from engine_core.config.rewards import RewardConfig
from engine_core.errors import ConfigError, DataError, PluginError, TrainingFailed
from engine_core.metrics import Sum
from engine_core.rewards.runner import reward_statistics


def config(name, **settings):
    return RewardConfig(name=name, **{"workers": 0} | settings)


def length(completion):
    return len(completion)


def ones(completions):
    return [1.0 for _ in completions]


def only_a(completion):
    return 5.0 if completion == "a" else None


def test_only_some_rewards_score_and_an_unknown_name_is_refused(runner, rollouts):
    both = runner(config("letters"), config("exact"))
    scored = rollouts("a", "bbb", answer=["a", "x"])
    both.only(["letters"]).score(scored, 1)
    assert [r.rewards for r in scored] == [{"letters": 1.0}, {"letters": 3.0}]
    with pytest.raises(ConfigError, match=r"eval: rewards: got 'leters', .* Did you mean 'letters'"):
        both.only(["leters"])


def test_other_data_does_not_have_the_columns_of_the_training_data(runner, rollouts):
    def styled(completions, style="plain"):
        return [float(style == "plain") for _ in completions]

    both = runner(live=[styled])
    both.check_columns({"style"})
    both.only(()).check_columns({"answer"})
    scored = rollouts("a", "bbb")
    both.score(scored, 1)
    assert [r.rewards["styled"] for r in scored] == [0.0, 0.0]  # a row without the column has None
    both.only(()).score(scored, 1)
    assert [r.rewards["styled"] for r in scored] == [1.0, 1.0]  # no row has it: the default
    assert list(both.columns) == ["style"]


# ---- sums, clipping, normalisation ---------------------------------------------------------------


def test_rewards_are_summed_by_weight_and_kept_by_name(runner, rollouts):
    scored = rollouts("a", "bbb", answer=["a", "x"])
    metrics = runner(config("letters", weight=0.5), config("exact", weight=2.0)).score(scored, 1)
    assert [r.rewards for r in scored] == [{"letters": 1.0, "exact": 1.0}, {"letters": 3.0, "exact": 0.0}]
    assert [r.reward for r in scored] == [2.5, 1.5]
    assert (metrics["reward/letters"], metrics["reward/exact"]) == (2.0, 0.5)
    assert (metrics["reward/mean"], metrics["reward/std"]) == (2.0, 0.5)


def test_values_are_clipped_in_the_sum_and_shown_as_they_were(runner, rollouts):
    scored = rollouts("a", "bbbbb")
    runner(config("letters", clip=(2, 4))).score(scored, 1)
    assert [r.reward for r in scored] == [2.0, 4.0]
    assert [r.rewards["letters"] for r in scored] == [1.0, 5.0]


def test_a_reward_that_gives_nothing_at_all_is_told_once(runner, rollouts, caplog):
    one = runner(live=[only_a, length])
    one.score(rollouts("b", "cc"), 1)
    one.score(rollouts("b", "cc"), 2)
    told = [r.getMessage() for r in caplog.records if "only_a" in r.getMessage()]
    assert len(told) == 1
    assert "Reward 'only_a' gave None (not applicable) for all 2 samples" in told[0]


def test_a_reward_that_does_not_apply_is_left_out_without_being_a_failure(runner, rollouts):
    scored = rollouts("a", "bb")
    metrics = runner(live=[only_a, length]).score(scored, 1)
    assert [r.rewards["only_a"] for r in scored] == [5.0, None]
    assert [r.reward for r in scored] == [6.0, 2.0]
    assert all(r.valid for r in scored)
    assert (metrics["reward/failures"], metrics["reward/only_a"]) == (0, 5.0)


def test_a_count_of_a_round_is_declared_a_sum_and_a_score_is_not(runner, rollouts):
    metrics = runner(live=[only_a, length]).score(rollouts("a", "bb"), 1)
    counts = {"reward/failures", "reward/timeouts", "reward/unrewarded"}
    counts |= {
        f"reward/{name}/{what}"
        for name in ("only_a", "length")
        for what in ("errors", "timeouts", "restarts")
    }
    assert {name for name, value in metrics.items() if isinstance(value, Sum)} == counts


def test_a_rollout_to_which_no_reward_applies_gives_no_gradient(runner, rollouts):
    scored = rollouts("a", "bb")
    metrics = runner(live=[only_a]).score(scored, 1)
    assert [r.valid for r in scored] == [True, False]
    assert metrics["reward/unrewarded"] == 1
    assert metrics["reward/mean"] == 5.0


def test_groups_without_differences_are_counted(runner, rollouts):
    metrics = runner(live=[length]).score(rollouts("a", "b", "c", "dd", "e", "f"), 1)
    assert metrics["reward/zero_variance_groups"] == pytest.approx(2 / 3)


def test_groups_of_one_response_lack_no_differences(rollouts):
    [first, other] = rollouts("a", "b")
    other.group_id = first.group_id + 1
    assert reward_statistics([first, other])["reward/zero_variance_groups"] == 0.0


def test_no_rollouts_give_finite_metrics(runner):
    metrics = runner("exact", live=[length]).score([], 1)
    assert metrics["reward/mean"] == metrics["reward/zero_variance_groups"] == 0.0


def test_an_empty_response_is_scored(runner, rollouts):
    scored = rollouts("", "a")
    runner(live=[length]).score(scored, 1)
    assert [r.reward for r in scored] == [0.0, 1.0]


# ---- policies ------------------------------------------------------------------------------------


def test_a_dropped_sample_is_not_valid_and_counts_in_no_mean(runner, rollouts):
    scored = rollouts("aa", "raise", "bb")
    metrics = runner(config("fragile", on_error="drop")).score(scored, 1)
    assert [r.valid for r in scored] == [True, False, True]
    assert metrics["reward/mean"] == metrics["reward/fragile"] == 2.0


def test_the_means_of_all_rewards_are_of_the_same_samples(runner, rollouts):
    scored = rollouts("aa", "raise", "bbb")
    metrics = runner(config("fragile", on_error="drop"), live=[length]).score(scored, 1)
    assert [r.rewards["length"] for r in scored] == [2.0, 5.0, 3.0]
    assert metrics["reward/length"] == 2.5
    assert metrics["reward/mean"] == metrics["reward/length"] + metrics["reward/fragile"]


def test_a_failed_sample_may_be_given_zero(runner, rollouts):
    scored = rollouts("aa", "nan", "bb")
    metrics = runner(config("fragile", on_error="zero")).score(scored, 1)
    assert [(r.valid, r.reward) for r in scored] == [(True, 2.0), (True, 0.0), (True, 2.0)]
    assert scored[1].rewards == {"fragile": 0.0}
    assert metrics["reward/fragile/errors"] == 1


def test_a_failed_sample_may_end_the_run(runner, rollouts):
    scored = rollouts("a", "raise", "bb", "cc")
    with pytest.raises(TrainingFailed) as error:
        runner(config("fragile", on_error="fail")).score(scored, 4)
    assert str(error.value) == (
        "Reward 'fragile' failed in step 4 on sample train:1 (1:0:1): ValueError: this one. "
        'The run ends because on_error = "fail". The weights were left alone.'
    )
    assert all(r.valid and r.rewards == {} for r in scored)


def test_a_measured_reward_of_weight_0_drops_nothing(runner, rollouts):
    scored = rollouts("aa", "raise", "bb")
    runner(config("fragile", weight=0.0), live=[length]).score(scored, 1)
    assert [r.valid for r in scored] == [True, True, True]
    assert [r.reward for r in scored] == [2.0, 5.0, 2.0]


def test_a_rollout_that_was_not_valid_stays_so(runner, rollouts):
    scored = rollouts("a", "b")
    scored[0].valid = False
    metrics = runner(live=[length]).score(scored, 1)
    assert [r.valid for r in scored] == [False, True]
    assert metrics["reward/mean"] == 1.0


def test_a_traceback_is_logged_once_and_the_rest_is_counted(runner, rollouts, caplog):
    with caplog.at_level(logging.WARNING):
        runner(config("fragile", max_failure_share=1.0)).score(rollouts("raise", "raise", "raise", "a"), 2)
    assert caplog.text.count("Traceback") == 1
    assert "Reward 'fragile' failed on 3 of 4 samples of step 2 (3 errors, 0 time-outs)" in caplog.text


# ---- in the controller ---------------------------------------------------------------------------


def test_a_live_function_of_lists_fails_on_all_samples_of_its_call(runner, rollouts):
    def delicate(completions):
        if "bad" in completions:
            raise RuntimeError("bad one")
        return [1.0] * len(completions)

    with pytest.raises(TrainingFailed, match=r"Reward 'delicate' failed on .*RuntimeError: bad one"):
        runner(live=[delicate]).score(rollouts("a", "bad", "b"), 1)


def test_a_live_function_cannot_exit_or_change_the_data(runner, rollouts):
    def leaving(completion, tags):
        tags.append("changed")
        if completion == "exit":
            raise SystemExit(3)
        return 1.0

    scored = rollouts("a", "exit", "b", tags=[[], [], []])
    metrics = runner(live=[leaving]).score(scored, 1)
    assert [r.prompt.columns["tags"] for r in scored] == [[], [], []]
    assert metrics["reward/leaving/errors"] == 1


def test_a_live_function_with_a_list_of_one_number_is_named(runner, rollouts):
    def total(completions):
        return [1.0]

    with pytest.raises(
        TrainingFailed, match=r"Reward 'total' must return a list of 3 numbers.*got a list of length 1"
    ):
        runner(live=[total]).score(rollouts("a", "b", "c"), 1)


# ---- bad input -----------------------------------------------------------------------------------


def test_two_rewards_of_one_name_are_refused(runner):
    with pytest.raises(ConfigError, match="Reward 'letters' is given 2 times"):
        runner("letters", "letters")


def test_a_name_that_is_a_metric_is_refused(runner):
    def mean(completion):
        return 1.0

    with pytest.raises(ConfigError, match="has the name of the metric 'reward/mean'"):
        runner(live=[mean])


def test_a_reward_that_no_plugin_offers_is_refused(runner):
    with pytest.raises(PluginError, match="Did you mean 'letters'"):
        runner("leters")


def test_a_missing_column_is_told_before_anything_is_scored(runner, rollouts):
    with pytest.raises(DataError, match="Reward 'exact' needs 'answer', which is no column of the data"):
        runner("exact").score(rollouts("a"), 1)


def test_a_response_without_text_is_decoded(runner, rollouts):
    class Decoder:
        def decode(self, ids, skip_special_tokens):
            assert skip_special_tokens
            return "-".join(str(int(i)) for i in ids)

    scored = rollouts("ab")
    scored[0].text = ""
    runner(live=[length], tokenizer=Decoder()).score(scored, 1)
    assert (scored[0].text, scored[0].reward) == ("0-1", 3.0)


def test_a_column_that_a_reward_needs_is_asked_for_before_the_first_step(runner):
    one = runner("exact")
    one.check_columns(["answer"])
    one.check_columns(["question", "answer"])
    with pytest.raises(
        DataError, match=r"'exact' needs 'answer', which is no column of the data\. Did you mean 'answers'"
    ):
        one.check_columns(["answers"])


def test_a_message_that_ends_with_a_full_stop_does_not_get_a_second_one(runner, rollouts):
    def judge(completions):
        raise ValueError("The judge is ill.")

    with pytest.raises(TrainingFailed) as error:
        runner(live=[judge]).score(rollouts("a", "b"), 1)
    assert "The judge is ill. The weights" in str(error.value)
    assert ".." not in str(error.value)


def test_rewards_that_rollouts_bring_join_the_sum_by_weight(runner, rollouts):
    made = rollouts("a", "bb")
    made[0].rewards, made[1].rewards = {"solved": 1.0}, {"solved": 0.5, "steps": 4.0}
    both = runner(live=[length], given={"solved": 10.0, "steps": -0.5, "seen": 0.0})
    metrics = both.score(made, step=1)
    assert [r.reward for r in made] == [1 + 10, 2 + 5 - 2]
    assert made[0].rewards == {"length": 1.0, "solved": 1.0, "steps": None, "seen": None}
    assert metrics["reward/solved"] == 0.75
    assert metrics["reward/steps"] == 4.0
    assert [(name, weight) for name, weight, _ in both.terms()] == [
        ("length", 1.0), ("solved", 10.0), ("steps", -0.5), ("seen", 0.0)
    ]  # fmt: skip


def test_rewards_that_rollouts_bring_are_enough(runner, rollouts):
    made = rollouts("a", "bb", "c")
    made[0].rewards, made[1].rewards = {"solved": 1.0}, {"solved": 0.0}
    metrics = runner(given={"solved": 1.0}).score(made, step=1)
    assert [r.valid for r in made] == [True, True, False]
    assert metrics["reward/unrewarded"] == 1.0
    assert metrics["reward/mean"] == 0.5


def test_a_failed_episode_is_worth_nothing_whatever_its_rewards_say(runner, rollouts):
    made = rollouts("aaaa", "bb", "c")
    made[0].failure, made[1].failure, made[1].valid = "error", "timeout", False
    metrics = runner(live=[length], given={"solved": 1.0}).score(made, step=1)
    assert [(r.reward, r.valid) for r in made] == [(0.0, True), (0.0, False), (1.0, True)]
    assert made[0].rewards == {"length": 0.0, "solved": 0.0}
    assert made[1].rewards == {"length": None, "solved": None}
    assert metrics["reward/unrewarded"] == 0.0
    assert metrics["reward/mean"] == 0.5


def test_a_reward_that_rollouts_bring_may_not_have_the_name_of_another(runner):
    with pytest.raises(ConfigError, match="Reward 'length' is given 2 times"):
        runner(live=[length], given={"length": 1.0})


def test_rewards_see_what_was_said_by_whom(runner, rollouts):
    seen = []

    def look(dialogues):
        seen.extend(dialogues)
        return [float(len(dialogue)) for dialogue in dialogues]

    def last(dialogue):
        return float(dialogue[-1]["content"] == "4")

    made = rollouts("2+2 is 4", "plain")
    made[0].messages = [
        {"role": "assistant", "content": "2+2"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4"},
    ]
    runner(live=[look, last]).score(made, step=1)
    assert [r.rewards for r in made] == [{"look": 3.0, "last": 1.0}, {"look": 1.0, "last": 0.0}]
    assert seen[1] == [{"role": "assistant", "content": "plain"}]


def test_the_last_turn_is_the_policys_and_never_the_answer_of_a_tool(runner, rollouts):
    seen = []

    def look(last_turns):
        seen.extend(last_turns)
        return [0.0] * len(last_turns)

    made = rollouts("2+2 is 4", "<call> 4", "plain")
    made[0].messages = [{"role": "tool", "content": "4"}, {"role": "assistant", "content": "is 4"}]
    made[1].messages = [{"role": "assistant", "content": "<call>"}, {"role": "tool", "content": "4"}]
    runner(live=[look]).score(made, step=1)
    assert seen == ["is 4", "", "plain"]
