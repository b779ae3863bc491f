"""``[critic]``: when a run has one, what it takes from ``[actor]``, what of it cannot be followed."""

import pytest

from engine_core.config.choices import used_names
from engine_core.config.schedule import config_at

GAE = '[algorithm]\nadvantage = "gae"\n'


def test_a_run_that_needs_values_has_a_critic_on_the_actors_backend(config_of, good):
    config = config_of(good + GAE + "[actor]\nmax_tokens_per_rank = 77\n")
    critic = config.critic
    assert (critic.backend, critic.max_tokens_per_rank, critic.path) == ("torch", 77, None)
    assert critic.options is config.actor.options
    assert (critic.optim.lr, critic.clip_ratio, critic.warmup_steps) == (1e-5, 0.5, 0)


def test_its_own_optimizer_table_keeps_its_own_rate(config_of, good):
    critic = config_of(good + GAE + "[critic.optim]\nweight_decay = 0.1\n").critic
    assert (critic.optim.lr, critic.optim.weight_decay) == (1e-5, 0.1)


def test_the_table_takes_backend_and_options_from_the_actor_where_it_says_nothing(config_of, good):
    text = (
        good + GAE + '[actor]\nbackend = "fsdp"\nmax_tokens_per_rank = 99\n[actor.fsdp]\nsharding = "none"\n'
    )
    critic = config_of(text + "[critic]\nwarmup_steps = 3\n").critic
    assert (critic.backend, critic.max_tokens_per_rank, critic.options.sharding) == ("fsdp", 99, "none")
    other = config_of(text + '[critic]\nbackend = "torch"\n[critic.torch]\nparam_dtype = "bf16"\n').critic
    assert (other.backend, other.options.param_dtype) == ("torch", "bf16")


@pytest.mark.parametrize("table", ["", "[critic]\nwarmup_steps = 3\n"])
def test_the_actors_base_may_be_quantised_and_the_critic_that_is_trained_whole_is_not(config_of, good, table):
    quantized = good.replace('param_dtype = "bf16"', 'quantize = "nf4"\nactivation_checkpointing = true')
    text = quantized + GAE + "[actor.lora]\nrank = 2\n"
    config = config_of(text + table)
    assert config.actor.options.quantize == "nf4"
    assert (config.critic.options.quantize, config.critic.options.activation_checkpointing) == (None, True)
    adapted = config_of(text + "[critic.lora]\nrank = 2\n").critic
    assert adapted.options.quantize == "nf4"


def test_a_critics_backend_is_a_name_that_the_run_uses():
    data = {"actor": {"backend": "fsdp"}, "critic": {"backend": "torch"}}
    assert used_names(data)["train_engines"] == {"fsdp", "torch"}
    assert used_names({"actor": {"backend": "fsdp"}})["train_engines"] == {"fsdp"}


def test_a_table_that_nothing_needs_is_said_to_be_unread(config_of, good):
    config = config_of(good + "[critic]\nwarmup_steps = 3\n")
    assert config.critic is None
    assert config.unread == ["[critic]: algorithm.advantage = 'grpo' needs no values"]


def test_another_trainer_does_not_read_it(config_of):
    config = config_of('trainer = "sft"\n[critic]\nwarmup_steps = 3\n[data]\ntrain = "x"\n')
    assert config.unread == ["[critic]: trainer 'sft' does not read it"]
    assert config.critic is None  # also a trainer with a critic builds it as without the table


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[critic]\nwarmup_steps = 5\n[run]\nsteps = 5\n",
            "critic.warmup_steps: got 5, expected less than run.steps (5)",
        ),
        (
            "[critic.optim]\nwarmup_steps = 5\ndecay_steps = 4\n",
            "critic.optim.decay_steps: got 4, expected more than warmup_steps (5, included in it)",
        ),
        ("[critic]\nclip_rato = 1\n", "critic.clip_rato: unknown key. Did you mean 'clip_ratio'?"),
        ("[critic]\nclip_ratio = -1\n", "critic.clip_ratio: got -1"),
    ],
)
def test_what_cannot_be_followed_is_refused(problems_of, good, text, expected):
    assert expected in "\n".join(problems_of(good + GAE + text))


def test_its_rate_and_budget_can_be_scheduled(config_of, good):
    text = (
        good + GAE + '[schedule]\n"critic.optim.lr" = [[3, 0.5]]\n"critic.max_tokens_per_rank" = [[2, 9]]\n'
    )
    config = config_of(text)
    assert [config_at(config, step).critic.optim.lr for step in (1, 2, 3)] == [1e-5, 1e-5, 0.5]
    assert [config_at(config, step).critic.max_tokens_per_rank for step in (1, 2, 3)] == ["auto", 9, 9]


def test_without_a_critic_there_is_nothing_to_schedule(problems_of, good):
    problems = problems_of(good + '[schedule]\n"critic.optim.lr" = [[3, 0.5]]\n')
    assert 'schedule."critic.optim.lr": this cannot change during a run' in problems[0]
