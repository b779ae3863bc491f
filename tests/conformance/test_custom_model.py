from engine_core.testing import TrainEngineSuite

NOT_OF_TRANSFORMERS = "the model is a module of its own, which from_pretrained does not know"


class TestRunningMean(TrainEngineSuite):
    """The torch engine with a model of a plugin, compared with the plugin's own reference."""

    backend = "torch"
    plugins = ["custom_model_plugin.py"]
    write_model = "custom_model_plugin.py:write"
    reference = "custom_model_plugin.py:load"
    unsupported = {
        "test_export_is_loaded_by_from_pretrained": NOT_OF_TRANSFORMERS,
        "test_the_generation_module_gives_the_logits_of_the_policy": NOT_OF_TRANSFORMERS,
        "test_hooks_load_without_heavy_imports": "the plugin is one file, and the model lies in it",
    }
