import math
from functools import partial

import pytest
import torch

from engine_core.algorithms.correction import Correction
from engine_core.algorithms.losses import ppo_clip
from engine_core.algorithms.objectives import nll, policy, resolve_loss, with_weights
from engine_core.errors import PluginError
from engine_core.plugins import PluginSet
from engine_core.types import Batch, LossCall


def batch(**tokens):
    base = Batch(
        token_ids=torch.zeros(4, dtype=torch.int64),
        lengths=torch.tensor([4]),
        tokens={
            "loss_mask": torch.tensor([False, False, True, True]),
            "rollout_log_probs": torch.tensor([0.0, 0.0, -1.0, -2.0]),
            "advantages": torch.tensor([0.0, 0.0, 2.0, -1.0]),
            **tokens,
        },
    )
    return with_weights(base, "token-mean")


LOG_PROBS = torch.tensor([0.0, 0.0, -1.0, -2.0])


def test_nll_is_the_mean_over_loss_tokens():
    total, metrics = nll({"log_probs": LOG_PROBS}, batch())
    assert total.item() == pytest.approx(1.5)
    assert metrics["actor/nll"].item() == pytest.approx(1.5)


def test_the_policy_objective_adds_kl_and_takes_off_entropy():
    ref = torch.tensor([0.0, 0.0, -1.5, -2.0])
    outputs = {"log_probs": LOG_PROBS, "entropy": torch.tensor([9.0, 9.0, 0.4, 0.6])}
    total, metrics = policy(
        outputs,
        batch(ref_log_probs=ref),
        token_loss=ppo_clip,
        kl_coef=0.1,
        kl_estimator="k2",
        entropy_coef=0.01,
    )
    surrogate, kl, entropy = (-2.0 + 1.0) / 2, 0.5 * 0.5**2 / 2, (0.4 + 0.6) / 2
    assert total.item() == pytest.approx(surrogate + 0.1 * kl - 0.01 * entropy)
    assert metrics["actor/kl"].item() == pytest.approx(kl)
    assert metrics["actor/entropy"].item() == pytest.approx(entropy)


def test_the_importance_weight_multiplies_the_loss_after_the_clip():
    rollout = torch.tensor([0.0, 0.0, -2.0, -2.0])  # ratio e on the first token, capped at 2
    total, metrics = policy(
        {"log_probs": LOG_PROBS},
        batch(rollout_log_probs=rollout),
        token_loss=ppo_clip,
        correction=Correction(level="token", cap=2.0),
    )
    assert total.item() == pytest.approx((2.0 * -2.0 + 1.0) / 2)
    assert metrics["correction/capped_share"].item() == pytest.approx(0.5)
    assert metrics["correction/weight_mean"].item() == pytest.approx(1.5)
    assert metrics["max/correction/weight_max"].item() == pytest.approx(2.0)
    assert metrics["correction/weight_square"].item() == pytest.approx((4 + 1) / 2)


def test_a_masked_token_costs_nothing_and_keeps_its_place_in_the_mean():
    rollout = torch.tensor([0.0, 0.0, -8.0, -2.0])  # ratio e^7 on the first token
    total, metrics = policy(
        {"log_probs": LOG_PROBS},
        batch(rollout_log_probs=rollout),
        token_loss=ppo_clip,
        correction=Correction(mask="token"),
    )
    assert total.item() == pytest.approx((0.0 + 1.0) / 2)
    assert metrics["correction/masked_share"].item() == pytest.approx(0.5)


def test_a_token_that_is_masked_adds_nothing_even_when_its_loss_is_not_finite():
    log_probs = torch.tensor([0.0, 0.0, float("inf"), -2.0])
    total, _ = policy(
        {"log_probs": log_probs},
        batch(old_log_probs=LOG_PROBS, learned=torch.tensor([True, True, False, True])),
        token_loss=lambda outputs, batch: (-batch["advantages"] * outputs["log_probs"], {}),
    )
    assert total.item() == pytest.approx(-2.0 / 2)


def test_tokens_that_are_not_learned_still_pay_kl_and_earn_entropy():
    outputs = {"log_probs": LOG_PROBS, "entropy": torch.tensor([9.0, 9.0, 0.4, 0.6])}
    ref = torch.tensor([0.0, 0.0, -1.5, -2.0])
    learned = torch.tensor([False, False, False, True])
    total, metrics = policy(
        outputs,
        batch(ref_log_probs=ref, learned=learned),
        token_loss=ppo_clip,
        kl_coef=0.1,
        kl_estimator="k2",
        entropy_coef=0.01,
    )
    assert total.item() == pytest.approx(1.0 / 2 + 0.1 * 0.125 / 2 - 0.01 * 0.5)
    assert metrics["actor/learned_share"].item() == pytest.approx(0.5)


def test_with_bypass_the_gap_is_between_the_sampler_and_the_current_policy():
    rollout = torch.tensor([0.0, 0.0, -1.5, -2.0])
    found = batch(rollout_log_probs=rollout, old_log_probs=rollout)
    loss = partial(policy, {"log_probs": LOG_PROBS}, found, token_loss=ppo_clip)
    assert loss(bypass=True)[1]["mismatch/mean_abs"].item() == pytest.approx(0.25)
    assert loss()[1]["mismatch/mean_abs"].item() == 0.0


def test_bad_samples_that_the_policy_has_left_cost_nothing():
    rollout = torch.tensor([0.0, 0.0, 0.0, -1.0])  # 1 nat above the policy on both
    total, metrics = policy(
        {"log_probs": LOG_PROBS},
        batch(rollout_log_probs=rollout, old_log_probs=rollout),
        token_loss=lambda outputs, batch: (-batch["advantages"], {}),
        correction=Correction(off_policy_threshold=0.9),
    )
    assert total.item() == pytest.approx(-2.0 / 2)
    assert metrics["correction/off_policy_share"].item() == pytest.approx(0.5)


def test_a_token_without_weight_adds_nothing_even_when_its_loss_is_not_finite():
    log_probs = torch.tensor([float("nan"), 0.0, -1.0, -2.0])
    total, metrics = nll({"log_probs": log_probs}, batch())
    assert total.item() == pytest.approx(1.5)
    assert metrics["actor/nll"].isfinite()


def test_sums_over_parts_are_those_of_the_whole():
    whole = Batch(
        token_ids=torch.zeros(4, dtype=torch.int64),
        lengths=torch.tensor([2, 2]),
        tokens={"loss_mask": torch.tensor([False, True, False, True])},
    )
    whole = with_weights(whole, "token-mean")
    total, metrics = nll({"log_probs": LOG_PROBS}, whole)
    parts = [nll({"log_probs": LOG_PROBS[i : i + 2]}, whole.select([i // 2])) for i in (0, 2)]
    assert sum(part[0] for part in parts).item() == pytest.approx(total.item())
    assert sum(part[1]["actor/nll"] for part in parts).item() == pytest.approx(metrics["actor/nll"].item())


def test_a_loss_is_resolved_by_name_with_its_options():
    plugins = PluginSet.load({"losses": ["ppo_clip"]})
    rollout = torch.tensor(
        [0.0, 0.0, -1.05, -2.05]
    )  # ratios of exp(0.05), within one clip and outside of the other
    totals = []
    for width in (0.2, 0.01):
        options = {"clip_ratio_low": width, "clip_ratio_high": width}
        call = LossCall("policy", {"loss": "ppo_clip", "loss_options": options, "kl_coef": 0.0})
        total, _ = resolve_loss(call, plugins)(
            {"log_probs": LOG_PROBS}, batch(rollout_log_probs=rollout, old_log_probs=rollout)
        )
        totals.append(total.item())
    ratio = math.exp(0.05)
    assert totals == pytest.approx([(-2.0 * ratio + ratio) / 2, (-2.0 * 1.01 + ratio) / 2])


@pytest.mark.parametrize("added", [0.0, math.inf, -math.inf, math.nan])
def test_the_gradient_of_a_loss_that_is_not_finite_is_nan_and_that_of_another_is_exact(install, added):
    source = """
        from engine_core import hookimpl
        from engine_core.specs import Objective

        def shifted(outputs, batch, added):
            return (batch["weights"] * outputs["log_probs"]).sum() + added, {}

        @hookimpl
        def engine_objectives():
            return {"shifted": Objective(load=shifted)}
    """
    install("acme", {"objectives": {"shifted": "mod_acme"}}, {"mod_acme": source})
    log_probs = LOG_PROBS.clone().requires_grad_()
    given = batch()
    resolve_loss(LossCall("shifted", {"added": added}), PluginSet())({"log_probs": log_probs}, given)[
        0
    ].backward()
    if added == 0:
        assert torch.equal(log_probs.grad, given["weights"])
    else:
        assert bool(log_probs.grad.isnan().all())


def test_an_objective_of_a_plugin_is_resolved_by_name_with_its_parameters(install):
    source = """
        from engine_core import hookimpl
        from engine_core.specs import Objective

        def squared(outputs, batch, scale):
            losses = scale * outputs["log_probs"] ** 2
            return (batch["weights"] * losses).sum(), {"noted": losses.max()}

        def make(plugins, scale):
            return lambda outputs, batch: squared(outputs, batch, scale * len(plugins.plugins))

        @hookimpl
        def engine_objectives():
            return {"squared": Objective(load=squared), "made": Objective(load=make, factory=True)}
    """
    install("acme", {"objectives": dict.fromkeys(("squared", "made"), "mod_acme")}, {"mod_acme": source})
    plugins = PluginSet()
    for name in ("squared", "made"):
        total, metrics = resolve_loss(LossCall(name, {"scale": 3.0}), plugins)(
            {"log_probs": LOG_PROBS}, batch()
        )
        assert total.item() == pytest.approx(3.0 * (1.0 + 4.0) / 2)
        assert metrics["noted"].item() == pytest.approx(12.0)


def test_a_policy_loss_that_no_key_of_the_run_names_is_loaded_by_its_name():
    objective = resolve_loss(LossCall("policy", {"loss": "ppo_clip", "loss_options": {}}), PluginSet())
    given = batch(old_log_probs=LOG_PROBS)
    named = partial(ppo_clip, clip_ratio_low=0.2, clip_ratio_high=0.2)
    torch.testing.assert_close(
        objective({"log_probs": LOG_PROBS}, given)[0],
        policy({"log_probs": LOG_PROBS}, given, token_loss=named)[0],
    )


def test_an_unknown_objective_is_named(without_our_plugins):
    with pytest.raises(PluginError) as caught:
        resolve_loss(LossCall("nlll"), PluginSet())
    assert str(caught.value) == "Unknown objective 'nlll'. Did you mean 'nll'? Known: nll, policy, value."


def test_an_objective_of_ours_that_is_absent_comes_with_its_install_command(without_our_plugins):
    with pytest.raises(PluginError) as caught:
        resolve_loss(LossCall("kto"), PluginSet())
    assert str(caught.value) == "Objective 'kto' is not installed. Try: pip install engine-plugin-trainers"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return losses.mean(), {}", r"losses \[T\] = \[4\], one value a token.*It returned \[\]\.$"),
        ("return losses", r"It returned \[4\] and no dict of metrics"),
        ("return losses[:2], {}", r"It returned \[2\]\.$"),
        ("return None", "It returned NoneType and no dict"),
        ("return losses.detach(), {}", "without a gradient: nothing would be learned"),
        ("return losses, {'max/lr': losses}", "metric 'max/lr' has the name of one that the engine logs"),
        ("return losses, {'odd': 0.5}", r"metric 'odd' is a float, expected a tensor \[T\]"),
    ],
)
def test_a_policy_loss_that_is_no_loss_of_each_token_is_refused_by_name(install, body, said):
    source = f"""
        from engine_core import hookimpl
        from engine_core.specs import Loss

        def odd(outputs, batch):
            losses = -outputs["log_probs"] * batch["advantages"]
            {body}

        @hookimpl
        def engine_losses():
            return {{"odd": Loss(load=odd)}}
    """
    install("acme", {"losses": {"odd": "mod_odd"}}, {"mod_odd": source})
    objective = resolve_loss(
        LossCall("policy", {"loss": "odd", "loss_options": {}}), PluginSet.load({"losses": ["odd"]})
    )
    with pytest.raises(PluginError, match=rf"algorithm\.loss = 'odd'.*{said}"):
        objective({"log_probs": LOG_PROBS.clone().requires_grad_()}, batch())


def test_a_policy_loss_gets_only_the_outputs_that_it_declares(install):
    source = """
        from engine_core import hookimpl
        from engine_core.specs import Loss

        def bonus(outputs, batch):
            return -outputs["log_probs"] - outputs["entropy"], {}

        @hookimpl
        def engine_losses():
            return {"bonus": Loss(load=bonus), "declared": Loss(load=bonus, outputs=("log_probs", "entropy"))}
    """
    install("acme", {"losses": dict.fromkeys(("bonus", "declared"), "mod_bonus")}, {"mod_bonus": source})
    plugins = PluginSet.load({"losses": ["bonus", "declared"]})
    outputs = {"log_probs": LOG_PROBS.clone().requires_grad_(), "entropy": torch.ones(4)}
    call = {"loss_options": {}}
    total, _ = resolve_loss(LossCall("policy", {"loss": "declared", **call}), plugins)(outputs, batch())
    assert total.item() == pytest.approx(1.5 - 1.0)
    with pytest.raises(PluginError, match=r"policy loss 'bonus' failed.*'entropy'"):
        resolve_loss(LossCall("policy", {"loss": "bonus", **call}), plugins)(outputs, batch())
