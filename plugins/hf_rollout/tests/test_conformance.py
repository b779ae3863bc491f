from engine_core.testing import RolloutEngineSuite


class TestHF(RolloutEngineSuite):
    backend = "hf"
