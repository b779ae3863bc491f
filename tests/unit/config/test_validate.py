import pytest

from engine_core.config.choices import used_names
from engine_core.config.read import RawConfig
from engine_core.config.validate import validate
from engine_core.errors import ConfigError, nearest


def test_a_good_file_has_typed_tables_and_options(config_of, good):
    config = config_of(good)
    assert config.actor.options.param_dtype == "bf16"
    assert config.rollout.options is not None
    assert config.reward[1].options.pattern == "<answer>(.*)</answer>"
    assert config.reward[1].options.share == 1.0
    assert config.algorithm.advantage_options.normalize_by_std is True
    assert config.algorithm.loss_options.clip_ratio == 0.2
    assert config.tracking.options == {}
    assert config.runtime.options.offload_idle_roles is False
    assert config._source.unread == []


def test_one_changed_word_switches_the_backend(config_of, good):
    text = good + '[actor.fsdp]\nsharding = "none"\n'
    config = config_of(text)
    assert config._source.unread == ["[actor.fsdp]: the run uses 'torch'"]
    switched = config_of(text, "actor.backend=fsdp")
    assert switched.actor.options.sharding == "none"
    assert switched._source.unread == ["[actor.torch]: the run uses 'fsdp'"]


def test_a_name_with_its_distribution_has_the_table_of_the_bare_name(config_of, good):
    config = config_of(good + '[actor]\nbackend = "some-dist:torch"\n')
    assert config.actor.backend == "some-dist:torch"
    assert config.actor.options.param_dtype == "bf16"


def test_the_reference_is_like_the_actor_where_it_says_nothing(config_of, good):
    text = (
        good
        + '[actor]\nbackend = "fsdp"\nmax_tokens_per_rank = 99\n[actor.fsdp]\nsharding = "none"\n[ref]\npath = "x"\n'
    )
    config = config_of(text)
    assert config.ref.backend == "fsdp"
    assert config.ref.max_tokens_per_rank == 99
    assert config.ref.options.sharding == "none"
    assert config_of(text + '[ref.fsdp]\nsharding = "full"\n').ref.options.sharding == "full"


def test_an_advantage_and_a_loss_of_one_name_share_a_table(config_of, problems_of, good):
    text = (
        good + '[algorithm]\nadvantage = "twin"\nloss = "twin"\n[algorithm.twin]\nalpha = 2.0\nbeta = 3.0\n'
    )
    config = config_of(text)
    assert config.algorithm.advantage_options.alpha == 2.0
    assert config.algorithm.loss_options.beta == 3.0
    assert len(problems_of(text + "gamma = 1\n")) == 1


def test_the_options_of_sft_stand_at_the_top(config_of):
    config = config_of(
        'trainer = "sft"\n[sft]\nmax_tokens = 7\n[rollout]\nbackend = "gone"\n[rollout.vllm]\nx = 1\n'
    )
    assert config.options.max_tokens == 7
    assert config._source.unread == [
        "[rollout]: trainer 'sft' does not read it",
        "[rollout.vllm]: the run uses 'gone'",
    ]
    assert config_of("[sft]\nmax_tokens = 7\n")._source.unread == ["[sft]: the run uses 'rl'"]


def test_used_names_are_those_that_the_trainer_reads():
    data = {"trainer": "sft", "rollout": {"backend": "vllm"}, "reward": [{"name": "math"}], "ref": {}}
    shared = {"actor", "tracking", "runtime"}
    assert used_names(data, shared) == {
        "trainers": {"sft"},
        "train_engines": {"torch"},
        "runtimes": {"local"},
    }
    tracked = {**data, "tracking": {"trackers": ["tensorboard"]}}
    assert used_names(tracked, shared)["trackers"] == {"tensorboard"}
    names = used_names({**data, "actor": {"backend": "fsdp"}})
    assert names["train_engines"] == {"fsdp"}  # [ref] is like the actor
    assert names["rollout_engines"] == {"vllm"}
    assert names["rewards"] == {"math"}
    assert names["losses"] == {"ppo_clip"}


@pytest.mark.parametrize(
    "data", [{"actor": 3}, {"reward": 3}, {"reward": [3]}, {"trainer": 3}, {"tracking": {"trackers": [3]}}]
)
def test_used_names_leaves_wrong_types_to_validation(data, specs):
    used_names(data)
    with pytest.raises(ConfigError):
        validate(RawConfig(data), lambda kind, name: specs[kind][name], lambda kind: specs[kind])


def test_all_errors_come_at_once_in_the_order_of_the_file(problems_of):
    text = """\
[actor]
backend = "torch"
learning_rate = 1e-6
[actor.optim]
lr = "1e-6"
[actor.torch]
param_dtype = "fp8"
[rollout]
group_size = 0
[[reward]]
weight = 2
"""
    found = problems_of(text, "run.nme=x", env={"ENGINE__DATA__SHUFFLE": "7"})
    assert [line.split(": ")[:2] for line in found] == [
        ["3", "actor.learning_rate"],
        ["5", "actor.optim.lr"],
        ["7", "actor.torch.param_dtype"],
        ["9", "rollout.group_size"],
        ["10", "reward.0.name"],
        ["environment ENGINE__DATA__SHUFFLE", "data.shuffle"],
        ["--set run.nme", "unknown key. Did you mean 'name'? Known"],
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[actor.optim]\nlr = "1e-6"', "2: actor.optim.lr: got '1e-6', expected a number."),
        ("[rollout]\ngroup_size = 0", "2: rollout.group_size: got 0, expected a number above 0."),
        ("[rollout]\ngroup_size = true", "2: rollout.group_size: got true, expected a whole number."),
        ("[rollout]\ngroup_size = 1.5", "2: rollout.group_size: got 1.5, expected a whole number."),
        ("[rollout]\ntop_p = 2", "2: rollout.top_p: got 2, expected at most 1."),
        ("[rollout]\nstop = 'x'", "2: rollout.stop: got 'x', expected a list."),
        ("[rollout]\nstop = ['x', 3]", "2: rollout.stop.1: got 3, expected a text in quotes."),
        ("[actor.optim]\nlr = inf", "2: actor.optim.lr: got inf, expected at most 1."),
        ("[actor.optim]\nlr = 200", "2: actor.optim.lr: got 200, expected at most 1."),
        ("[rollout]\ntemperature = inf", "2: rollout.temperature: got inf, expected a finite number."),
        *(
            (f"[run]\nname = '{name}'", f"2: run.name: got '{name}': this is no name for a folder. Expected")
            for name in ("../a", "a/b", "..", "latest", "")
        ),
        ("[actor.optim]\nbetas = [0.9]", "2: actor.optim.betas: too few entries."),
        (
            "[actor.optim]\nbetas = [1, 1, 1]",
            "2: actor.optim.betas: got [1, 1, 1], expected at most 2 entries.",
        ),
        ("[data]\nshuffle = 'yes'", "2: data.shuffle: got 'yes', expected true or false."),
        ("[data]\ntrain = 3", "2: data.train: got 3, expected a text in quotes or a list."),
        (
            "[actor.torch]\nlog_prob_chunk_tokens = '8'",
            "2: actor.torch.log_prob_chunk_tokens: got '8', expected a whole number.",
        ),
        ("actor = 3", "1: actor: got 3, expected a table."),
        ("actor.torch = 3", "1: actor.torch: got 3, expected a table."),
        ("reward = 3", "1: reward: got 3, expected a list."),
        ("trainer = 3", "1: trainer: got 3, expected a text in quotes."),
        ("[algorithm]\nkl_in = 'los'", "2: algorithm.kl_in: got 'los', expected 'loss' or 'reward'."),
        ("[[reward]]\nweight = 1", "1: reward.0.name: missing, and it has no default."),
        ("[[reward]]\nname = 'math'\nclip = [2, 'x']", "3: reward.math.clip.1: got 'x', expected a number."),
        (
            "[schedule]\nx = 3",
            "2: schedule.x: got 3, expected a list of steps and values, such as [[1, 1e-4], [100, 1e-5]].",
        ),
    ],
)
def test_a_wrong_value_is_said_in_words(problems_of, text, expected):
    (problem,) = problems_of(text)
    assert problem.startswith(expected)
    assert "pydantic" not in problem
    assert "Input should" not in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[actor.optim]\nweight_decy = 1",
            "2: actor.optim.weight_decy: unknown key. Did you mean 'weight_decay'? Known: betas, decay_steps, eps, lr, "
            "max_grad_norm, max_skipped_steps, min_lr_ratio, schedule, warmup_steps, weight_decay. "
            "Table of the core; see: engine schema actor.optim",
        ),
        (
            "[actor.torch]\ndevce = 'cpu'",
            "2: actor.torch.devce: unknown key. Did you mean 'device'? Known: activation_checkpointing, compile, "
            "compute_dtype, device, log_prob_chunk_tokens, log_prob_recompute, loss_scale, param_dtype, quantize, share_prefixes. Table of train engine 'torch'; see: engine schema actor.torch",
        ),
        ("[actr]\nx = 1", "1: actr: unknown key. Did you mean 'actor'? Known: "),
        (
            "[actor.fspd]",
            "1: actor.fspd: unknown key. Did you mean 'fsdp'? Known: backend, fsdp, lora, max_tokens_per_rank, ",
        ),
        ("[actor]\ngroup_size = 1", "2: actor.group_size: unknown key. Known: "),
        ("[actor]\noptions = 1", "2: actor.options: unknown key. Did you mean 'optim'?"),
        (
            "[[reward]]\nname = 'math'\nwieght = 1",
            "3: reward.math.wieght: unknown key. Did you mean 'weight'?",
        ),
        ("extend = 'x'", "1: extend: unknown key."),
    ],
)
def test_an_unknown_key_has_its_nearest_and_its_owner(problems_of, text, expected):
    (problem,) = problems_of(text)
    assert problem.startswith(expected)


def test_a_key_of_another_table_is_said_to_be_so(problems_of):
    (problem,) = problems_of("[actor]\ngroup_size = 1\n")
    assert "'group_size' is a key of [rollout]." in problem
    (problem,) = problems_of("[actor]\nparam_dtype = 'bf16'\n")
    assert "'param_dtype' is a key of [actor.torch]" in problem


def test_options_of_a_plugin_are_checked_below_their_reward(problems_of):
    text = "[[reward]]\nname = 'format'\n[reward.format]\npattern = '('\nshare = 2\nbad = 1\n"
    found = problems_of(text)
    assert found[0].startswith(
        "4: reward.format.pattern: got '(': a bracket is not closed. Table of reward 'format'"
    )
    assert found[1].startswith("5: reward.format.share: got 2, expected at most 1.")
    assert found[2].startswith("6: reward.format.bad: unknown key. Known: pattern, share.")
    (problem,) = problems_of("[[reward]]\nname = 'format'\n")
    assert problem.startswith(
        "1: reward.format.pattern: missing, and it has no default. Table of reward 'format'"
    )


def test_a_nested_option_table_is_checked(problems_of):
    (problem,) = problems_of("[actor]\nbackend='fsdp'\n[actor.fsdp.inner]\nlo = 1\n")
    assert problem.startswith("4: actor.fsdp.inner.lo: unknown key. Did you mean 'low'? Known: high, low.")


def test_a_value_of_the_environment_or_of_a_secret_key_is_not_shown(problems_of):
    (problem,) = problems_of("", env={"ENGINE__RUN__STEPS": "hunter2"})
    assert problem.startswith(
        "environment ENGINE__RUN__STEPS: run.steps: got a value that is not shown, expected a whole number."
    )
    text = "[run]\nsteps = 'hunter2'\napi_key = 'hunter2'\n"
    assert "hunter2" not in problems_of(text)[1]


def test_a_text_that_looks_like_a_number_needs_quotes_on_the_command_line(problems_of):
    (problem,) = problems_of("", "run.name=7")
    assert (
        "got 7, expected a text in quotes (a text that looks like something else needs its own quotes: '\"7\"')"
        in problem
    )


def test_a_long_value_is_cut(problems_of):
    (problem,) = problems_of(f"[run]\nsteps = '{'x' * 500}'")
    assert len(problem) < 250


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[rollout]\ntemperature = 0",
            "2: rollout.temperature: got 0, expected more than 0: a greedy sampler gives",
        ),
        (
            "[data]\nprompts_per_step = 64\n[algorithm]\nmini_batch_prompts = 30",
            "4: algorithm.mini_batch_prompts: got 30, expected a divisor of data.prompts_per_step (64), such as 32; or 0 for all.",
        ),
        (
            "[[reward]]\nname='math'\n[[reward]]\nname='math'",
            "3: reward.math: 'math' is listed 2 times, expected once.",
        ),
        ("[tracking]\ntrackers = ['wandb', 'wandb']", "2: tracking.trackers: 'wandb' is listed 2 times"),
        ("[[reward]]\nname='math'\nclip=[1, 0]", "3: reward.math.clip: got [1.0, 0.0], expected [low, high]"),
        (
            "[actor.optim]\nwarmup_steps=5\ndecay_steps=4",
            "3: actor.optim.decay_steps: got 4, expected more than warmup_steps (5, included in it)",
        ),
    ],
)
def test_what_must_hold_between_keys_is_checked(problems_of, text, expected):
    (problem,) = problems_of(text)
    assert problem.startswith(expected)


def test_sections_that_are_not_read_are_not_judged(config_of):
    config_of('trainer = "sft"\n[rollout]\ntemperature = 0\n[algorithm]\nmini_batch_prompts = 7\n')


def test_validators_of_options_know_the_folder_of_the_run_file(specs, tmp_path):
    from pydantic import model_validator

    from engine_core.specs import NoOptions, Reward

    class Seen(NoOptions):
        @model_validator(mode="after")
        def look(self, info):
            raise ValueError(f"seen {info.context['folder']}")

    mine = {**specs, "rewards": {"r": Reward(load=print, config=Seen)}}
    raw = RawConfig({"reward": [{"name": "r"}]}, files=[tmp_path / "run.toml"])
    with pytest.raises(ConfigError, match=rf"seen {tmp_path}\. "):  # the rest is another sentence
        validate(raw, lambda kind, name: mine[kind][name], lambda kind: mine[kind])


def test_a_trainer_that_names_no_sections_reads_all(specs):
    from engine_core.specs import TrainerSpec

    mine = {**specs, "trainers": {"mine": TrainerSpec(load=print)}}
    raw = RawConfig({"trainer": "mine", "rollout": {"temperature": 0}})
    with pytest.raises(ConfigError, match="a greedy sampler"):
        validate(raw, lambda kind, name: mine[kind][name], lambda kind: mine[kind])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[reward]\nname = 'math'",
            "1: reward: got {'name': 'math'}, expected a list of tables, each below its own header: [[reward]].",
        ),
        (
            "[actor.optim]\nlearning_rate = 1e-6",
            "2: actor.optim.learning_rate: unknown key. Did you mean 'lr'?",
        ),
        (
            "[rollout]\nnum_generations = 4",
            "2: rollout.num_generations: unknown key. Did you mean 'group_size'?",
        ),
        ("[rollout]\nGroup_Size = 4", "2: rollout.Group_Size: unknown key. Did you mean 'group_size'?"),
    ],
)
def test_habits_from_elsewhere_are_led_to_the_right_key(problems_of, text, expected):
    (problem,) = problems_of(text)
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("GRPO", {"grpo", "gspo"}, "grpo"),
        ("ppo", {"rl", "dpo"}, "rl"),
        ("ppo", {"dpo"}, "dpo"),
        ("beta", {"alpha"}, None),
    ],
)
def test_the_nearest_name_is_found_in_any_case_and_by_what_others_call_it(name, known, meant):
    assert nearest(name, known) == meant


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("top_p = 0.5", "rollout.top_p: got 0.5, "),
        ("stop = ['x']", "rollout.stop: got ('x',), "),
        ("[schedule]\n'rollout.top_k' = [[0, 0], [9, 3]]", "rollout.top_k: got 3, "),
        ("[data]\nvalidation = 'v'\n[eval]\ntop_k = 7", "eval.top_k: got 7, "),
        ("[[eval.set]]\nname = 'v'\npath = 'v'\ntop_k = 8", "eval.set.v.top_k: got 8, "),
    ],
)
def test_a_sampling_option_that_the_sampler_does_not_implement_is_refused(problems_of, text, expected):
    (problem,) = problems_of(f"[rollout]\nbackend = 'whole'\n{text}\n")
    assert expected in problem
    assert "but rollout.backend = 'whole' does not implement this sampling option. Remove it" in problem


def test_an_option_at_its_default_or_that_is_not_read_asks_nothing_of_the_sampler(config_of):
    config_of("[rollout]\nbackend = 'whole'\ntop_p = 1.0\ntemperature = 0.5\nmax_response_tokens = 9\n")
    config_of("[rollout]\nbackend = 'whole'\n[[eval.set]]\nname = 'v'\npath = 'v'\ntemperature = 0.5\n")
    config_of("trainer = 'sft'\n[rollout]\nbackend = 'whole'\ntop_p = 0.5\n")


@pytest.mark.parametrize(
    ("variable", "unread"),
    [
        (
            "ENGINE_RUN_STEPS",
            ["ENGINE_RUN_STEPS: the environment variable of run.steps is ENGINE__RUN__STEPS"],
        ),
        (
            "engine_actor__optim_lr",
            [
                "engine_actor__optim_lr: the environment variable of actor.optim.lr is ENGINE__ACTOR__OPTIM__LR"
            ],
        ),
        ("ENGINE_TEST_FORK", []),
    ],
)
def test_an_environment_variable_with_too_few_underscores_is_listed_as_not_read(config_of, variable, unread):
    assert config_of("", env={variable: "3"})._source.unread == unread
