"""A one-file plugin with a step hook that freezes the embedding, unless its option says otherwise."""

from engine_core import hookimpl
from engine_core.specs import Options


class FreezingOptions(Options):
    freeze: bool = True
    """Whether the embedding is frozen."""


@hookimpl
def engine_options():
    return FreezingOptions


@hookimpl
def engine_build_model(role, model_config, plugin_options):
    import torch

    from engine_plugin_torch.model_loading import load_model

    model = load_model(model_config, torch.device("cpu"), torch.float32)
    model.model.embed_tokens.requires_grad_(not plugin_options.freeze)
    return model
