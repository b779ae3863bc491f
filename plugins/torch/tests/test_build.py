"""What step hooks may answer, and what the reference engine makes of it."""

from __future__ import annotations

import pytest
import torch

from engine_core.errors import PluginError
from engine_core.types import LossCall


def rates(engine, batch, steps):
    """``StepOutput.lr`` of some steps."""
    found = []
    for _ in range(steps):
        engine.forward_backward(batch, LossCall("nll"))
        found.append(engine.optimizer_step().lr)
    return found


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("model.layers.0", r"returned 'model.layers.0'; expected a list of names"),
        (["model.layers", "model.layers.0"], r"named 'model.layers.0', which lies inside 'model.layers'"),
        (["model.layers.0.mlp", "model.layers.0"], r"named 'model.layers.0.mlp', which lies inside"),
        (["model.layers.0", "model.layers.0"], r"named 'model.layers.0' twice"),
        ([0, 1], r"returned \[0, 1\]; expected a list of names"),
    ],
)
def test_units_that_are_no_separate_submodules_are_refused_with_plugin_and_hook(make_engine, named, message):
    with pytest.raises(PluginError, match=rf"^Plugin of a test: engine_wrap_policy \(actor\) {message}"):
        make_engine(hooks={"engine_wrap_policy": lambda: named})


def two_rates(module, optim_config):
    """Two groups, the slow one first, falling to 0 in ``decay_steps``."""
    bodies = [p for name, p in module.named_parameters() if "embed" not in name]
    embedding = [p for name, p in module.named_parameters() if "embed" in name]
    groups = [{"params": embedding, "lr": optim_config.lr / 4}, {"params": bodies}]
    sgd = torch.optim.SGD(groups, lr=optim_config.lr)
    return sgd, torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1 - step / optim_config.decay_steps)


@pytest.mark.parametrize(
    ("decay_steps", "expected", "rate_after"), [(0, [0.4, 0.3, 0.2], 0.1), (5, [0.4, 0.32, 0.24], 0.16)]
)
def test_a_plugins_optimizer_is_told_the_length_of_its_schedule_and_reports_its_fastest_rate(
    make_engine, batch, decay_steps, expected, rate_after
):
    engine = make_engine(
        hooks={"engine_build_optimizer": two_rates},
        optim={"lr": 0.4, "decay_steps": decay_steps},
        total_steps=4,
    )
    assert rates(engine, batch, steps=3) == pytest.approx(expected)
    engine.set_lr(0.8)
    assert engine.lr == pytest.approx(2 * rate_after)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (lambda optimizer: optimizer, "SGD"),
        (lambda optimizer: (optimizer,), r"tuple of 1 \(SGD\)"),
        (lambda optimizer: (None, optimizer), r"tuple of 2 \(NoneType, SGD\)"),
        (lambda optimizer: (optimizer, lambda step: 1), r"tuple of 2 \(SGD, function\)"),
        (lambda optimizer: False, "bool"),
    ],
)
def test_an_optimizer_hook_that_returns_something_else_is_told_so(make_engine, answer, found):
    def engine_build_optimizer(module):
        return answer(torch.optim.SGD(module.parameters(), lr=0.1))

    with pytest.raises(
        PluginError,
        match=rf"^Plugin of a test: engine_build_optimizer \(actor\) returned {found}; expected "
        r"\(optimizer, lr_scheduler\), or \(optimizer, None\)",
    ):
        make_engine(hooks={"engine_build_optimizer": engine_build_optimizer})


def test_an_optimizer_that_leaves_trainable_parameters_out_is_refused(make_engine):
    def engine_build_optimizer(module):
        return torch.optim.SGD([p for p in module.parameters() if p.ndim >= 2], lr=0.1), None

    with pytest.raises(
        PluginError,
        match=r"The optimizer \(SGD\) of the role 'actor' has 9 of its 24 trainable parameters in no group: "
        r"'model\.layers\.0\.self_attn\.q_norm\.weight', '[^']+', '[^']+' and 6 more\. Put them in a group, or set "
        "requires_grad to False",
    ):
        make_engine(hooks={"engine_build_optimizer": engine_build_optimizer})


@pytest.mark.parametrize("factor", [5.0, 0.5])
def test_an_optimizer_whose_highest_rate_is_not_that_of_the_run_file_is_refused(make_engine, factor):
    def engine_build_optimizer(module, optim_config):
        head, *rest = module.parameters()
        groups = [{"params": [head], "lr": factor * optim_config.lr}, {"params": rest, "lr": 1e-9}]
        return torch.optim.SGD(groups), None

    with pytest.raises(
        PluginError, match=r"groups is .*, and actor\.optim\.lr is .*: set it to the highest rate"
    ):
        make_engine(hooks={"engine_build_optimizer": engine_build_optimizer})


def test_frozen_parameters_may_be_in_no_group(make_engine, batch):
    def engine_build_optimizer(module, optim_config):
        module.get_input_embeddings().requires_grad_(False)
        return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=optim_config.lr), None

    engine = make_engine(hooks={"engine_build_optimizer": engine_build_optimizer})
    assert rates(engine, batch, steps=1) == [engine.config.optim.lr]
