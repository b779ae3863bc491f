"""Two hooks, and every train engine trains the model: ``plugins = ["conv_lm"]``."""

from engine_core import hookimpl


@hookimpl
def engine_build_model(role, model_config):
    from engine_plugin_custom_model.conv_lm import build

    return build(model_config.path, model_config.override, model_config.seed)


@hookimpl
def engine_wrap_policy(module):
    return [f"blocks.{index}" for index in range(len(module.blocks))]
