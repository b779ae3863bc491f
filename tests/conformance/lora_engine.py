"""Only for the kit: ``TorchEngine`` as a run file with ``[actor.lora]`` makes it."""

from engine_core.config.roles import LoRAConfig
from engine_plugin_torch.engine import TorchEngine


class AdaptedEngine(TorchEngine):
    def __init__(self, config, model_config, context, *, trainable=True):
        config = config.model_copy(update={"lora": config.lora or LoRAConfig(rank=4)})
        super().__init__(config, model_config, context, trainable=trainable)
