import json

import pytest

from engine_plugin_testing import RolloutEngineSuite, TrainEngineSuite
from engine_plugin_testing.bench import EngineBench
from engine_plugin_testing.launcher import CaseFailed, Workers

NOT_OF_TRANSFORMERS = "the model is a module of its own, which from_pretrained does not know"
ONE_FILE = "the plugin is one file, and the model lies in it"


class TestRunningMean(TrainEngineSuite):
    """The torch engine with a model of a plugin, compared with the plugin's own reference."""

    backend = "torch"
    plugins = ["custom_model_plugin.py"]
    write_model = "custom_model_plugin.py:write"
    reference = "custom_model_plugin.py:load"
    lora = ({}, {"rslora": True}, {"dora": True})  # it has no lm_head
    unsupported = {
        "test_export_is_loaded_by_from_pretrained": NOT_OF_TRANSFORMERS,
        "test_hooks_load_without_heavy_imports": ONE_FILE,
    }


class TestItsSampler(RolloutEngineSuite):
    """A sampler whose model ``torch`` cannot build: it follows the train engine of its own plugin."""

    backend = train_backend = "mean"
    plugins = ["own_sampler_plugin.py"]
    write_model = "custom_model_plugin.py:write"
    reference = "custom_model_plugin.py:load"
    unsupported = {"test_hooks_load_without_heavy_imports": ONE_FILE}


@pytest.fixture(scope="module")
def fails():
    """``fails(suite, contract)``: what a contract says that must fail; all in one worker."""
    workers = Workers(root=TestItsSampler.root(), deadline=100.0)

    def told(suite, contract):
        with pytest.raises(CaseFailed) as caught:
            workers.run(suite.bench, suite.contracts[f"test_{contract}"].case, suite.settings())
        return str(caught.value)

    yield told
    workers.close()


def test_a_sampler_of_its_own_model_cannot_follow_torch(fails):
    suite = type("Mine", (TestItsSampler,), {"train_backend": "torch", "__module__": __name__})
    assert "config.json" in fails(suite, "a_trained_policy_reaches_the_sampler")


def test_a_model_of_another_vocabulary_is_one_sentence(fails):
    own = {"write_model": "custom_model_plugin.py:write_small", "__module__": __name__}
    for suite in (TestRunningMean, TestItsSampler):
        told = fails(type("Mine", (suite,), own), "log_probs_equal_the_reference")
        assert "write_model wrote a config.json with vocab_size 64; expected 97, which it is given as" in told


def test_a_vocabulary_that_is_too_small_for_the_kit_is_refused(fails):
    suite = type("Mine", (TrainEngineSuite,), {"model": {"vocab_size": 64}, "__module__": __name__})
    assert "has vocab_size 64; the kit's tokens need 97" in fails(suite, "log_probs_equal_the_reference")


def test_a_model_that_repeats_itself_is_told_what_to_change(fails):
    own = {"write_model": "custom_model_plugin.py:write_dull", "__module__": __name__}
    told = fails(type("Mine", (TestItsSampler,), own), "a_stop_string_ends_a_response")
    assert "The model repeats itself" in told
    assert "larger embeddings" in told


def test_write_model_is_given_every_size_that_it_needs(tmp_path):
    place = type("Place", (), {"folder": tmp_path, "cache": tmp_path, "rank": 0, "world_size": 1})
    settings = TestRunningMean.settings() | {"write_model": "custom_model_plugin.py:write_what_is_given"}
    folder = EngineBench(settings, place).model(tied=False, num_hidden_layers=3)
    given = json.loads((tmp_path / folder / "given.json").read_text())
    sizes = (
        "vocab_size",
        "max_position_embeddings",
        "eos_token_id",
        "tie_word_embeddings",
        "num_hidden_layers",
    )
    assert [given[name] for name in sizes] == [97, 128, 1, False, 3]
