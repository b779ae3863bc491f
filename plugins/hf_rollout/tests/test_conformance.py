import pytest

from engine_plugin_testing import RolloutEngineSuite


class TestHF(RolloutEngineSuite):
    backend = "hf"


@pytest.mark.slow
class TestHFInBf16(RolloutEngineSuite):
    backend = "hf"
    options = {"dtype": "bf16"}
    tolerance = 0.2  # nats: a logit of 16 is known to 0.06 in 8 bits
    unsupported = {
        "test_a_response_goes_on_to_the_same_end": "no greedy response is certain in 8 bits",
        "test_any_workload_is_answered_right": "several supports are right where logits are nearly equal",
    }


@pytest.mark.slow  # a process for nearly every contract
class TestHFInAProcessOfItsOwn(RolloutEngineSuite):
    backend = "hf"
    process = {}
    unsupported = {
        "test_a_shared_module_is_followed_without_transport": "a module does not reach another process",
        "test_a_shared_module_changes_under_responses_in_flight": "a module does not reach another process",
    }


@pytest.mark.slow  # two processes for nearly every contract
class TestHFInTwoProcesses(TestHFInAProcessOfItsOwn):
    process = {"engines": 2}
    deadline = 300.0
