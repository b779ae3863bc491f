from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from engine_core.errors import PluginError
from engine_plugin_trainers.options import PAIR_LOSSES, DPOOptions, check_offered
from engine_plugin_trainers.preference import DPOTrainer
from engine_plugin_trainers.tables import PairLoss


def test_every_loss_of_the_table_can_be_chosen():
    for name in PAIR_LOSSES:
        smoothing = {"label_smoothing": 1e-3} if name == "exo_pair" else {}
        assert DPOOptions(loss=name, **smoothing).loss == name


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"loss": "ipo", "label_smoothing": 0.1},
            r"loss = 'ipo' does not read label_smoothing\. Remove it, or choose",
        ),
        (
            {"simpo_gamma": 1.0},
            r"loss = 'sigmoid' does not read simpo_gamma\. Remove it, or choose one of simpo\.",
        ),
        ({"discopop_tau": 1.0}, r"choose one of discopop\."),
        ({"loss": "apo_zero", "f_divergence": "js"}, r"loss = 'apo_zero' does not read f_divergence\."),
        ({"f_alpha": 0.2}, r"f_alpha is read with f_divergence = 'alpha' only\."),
        (
            {"loss": "simpo", "length_normalize": False},
            r"loss = 'simpo' uses means over tokens by definition\.",
        ),
        (
            {"loss": "ipo", "ld_alpha": 0.5},
            r"ld_alpha weights the tail of a sum .* loss = 'ipo' uses means here",
        ),
        ({"length_normalize": True, "ld_alpha": 0.5}, r"ld_alpha weights the tail of a sum"),
        ({"loss": "exo_pair"}, r"loss = 'exo_pair' needs label_smoothing over 0"),
    ],
)
def test_what_a_loss_does_not_read_is_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        DPOOptions(**keys)


def test_a_default_that_is_written_out_is_no_problem():
    DPOOptions(loss="ipo", label_smoothing=0.0, f_alpha=0.5)


@pytest.mark.parametrize(
    ("keys", "normalizes", "nll"),
    [
        ({}, False, 0.0),
        ({"length_normalize": True, "sft_coef": 0.2}, True, 0.2),
        ({"loss": "ipo"}, True, 0.0),
        ({"loss": "ipo", "length_normalize": False}, False, 0.0),
        ({"loss": "orpo"}, True, 1.0),
        ({"loss": "simpo"}, True, 0.0),
        ({"loss": "cpo"}, False, 1.0),
        ({"loss": "cpo", "sft_coef": 0.0}, False, 0.0),
    ],
)
def test_what_follows_from_the_loss(keys, normalizes, nll):
    options = DPOOptions(**keys)
    traits = PAIR_LOSSES[options.loss]
    assert (options.normalizes(traits), options.nll_weight(traits)) == (normalizes, nll)


def test_a_run_without_a_reference_uses_no_reference_model():
    for changes, needed in (({}, True), ({"reference_free": True}, False)):
        run = SimpleNamespace(spec=PAIR_LOSSES["sigmoid"], options=DPOOptions(**changes))
        assert DPOTrainer.needs_reference.fget(run) is needed


def test_the_losses_without_a_reference_model():
    assert {name for name, traits in PAIR_LOSSES.items() if not traits.reference} == {"cpo", "orpo", "simpo"}


def test_a_pair_loss_that_asks_for_what_it_is_not_given_is_refused():
    check_offered("mine", PairLoss(load=max, reads=frozenset({"label_smoothing"})))
    with pytest.raises(
        PluginError, match=r"Pair loss 'mine': it has an option table, but pair losses cannot have one"
    ):
        check_offered("mine", PairLoss(load=max, config=DPOOptions))
    with pytest.raises(
        PluginError,
        match=r"reads 'simpo_gama', which pair losses do not receive\. Did you mean 'simpo_gamma'\?",
    ):
        check_offered("mine", PairLoss(load=max, reads=frozenset({"simpo_gama"})))
