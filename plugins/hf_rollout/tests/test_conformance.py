import pytest

from engine_plugin_testing import RolloutEngineSuite


class TestHF(RolloutEngineSuite):
    backend = "hf"


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
