"""Suites of engines with another optimizer: the kit reads gradients by a function of the suite."""

import pytest

from engine_plugin_testing import TrainEngineSuite
from engine_plugin_testing.launcher import CaseFailed, Workers


class OfAdagrad(TrainEngineSuite):
    backend = "torch"
    plugins = ["adagrad_plugin.py"]
    gradients = "adagrad_plugin.py:gradients"


OF_GRADIENTS = (
    "the_gradient_is_that_of_the_global_sum",
    "the_policy_gradient_equals_the_reference",
    "micro_batches_change_neither_loss_nor_gradient",
    "gradients_of_other_outputs_equal_the_reference",
    "gradients_of_candidates_equal_the_reference",
    "other_models_are_as_right_as_the_first",
    "a_step_starts_from_weights_that_were_loaded",
)


@pytest.fixture(scope="module")
def run():
    """``run(suite, contract)`` in one worker for all tests."""
    workers = Workers(root=OfAdagrad.root(), deadline=100.0)
    yield lambda suite, name: workers.run(suite.bench, suite.contracts[f"test_{name}"].case, suite.settings())
    workers.close()


@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_gradients_of_another_optimizer_are_compared(run, name):
    run(OfAdagrad, name)


@pytest.mark.parametrize("gradients", ["", "adagrad_plugin.py:doubled"])
def test_without_the_function_or_with_wrong_gradients_the_contract_fails(run, gradients):
    suite = type("Mine", (OfAdagrad,), {"gradients": gradients, "__module__": __name__})
    with pytest.raises(CaseFailed, match="gradient"):
        run(suite, OF_GRADIENTS[0])
