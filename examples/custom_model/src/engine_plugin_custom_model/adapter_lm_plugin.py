"""``plugins = ["adapter_lm"]``: adapters for the trainer and for samplers that build its model; others get merged weights."""

from engine_core import hookimpl

BUILDS = ("hf",)  # samplers that ask engine_build_model


@hookimpl
def engine_build_model(role, model_config):
    from engine_plugin_custom_model.adapter_lm import build

    return build(model_config) if role in ("actor", "ref", "rollout") else None


@hookimpl
def engine_map_weights(sampler, weights):
    if sampler in BUILDS:
        return weights
    from engine_plugin_custom_model.adapter_lm import merged

    return merged(weights)
