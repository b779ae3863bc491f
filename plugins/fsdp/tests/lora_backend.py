"""Only for the kit: the engine as a run file with ``[actor.lora]`` makes it."""

from engine_core import hookimpl
from engine_core.config.roles import LoRAConfig
from engine_core.specs import TrainBackend
from engine_plugin_fsdp.engine import FSDPEngine
from engine_plugin_fsdp.options import FSDPOptions


class AdaptedEngine(FSDPEngine):
    def __init__(self, config, model_config, context, *, trainable=True):
        config = config.model_copy(update={"lora": config.lora or LoRAConfig(rank=4)})
        super().__init__(config, model_config, context, trainable=trainable)


@hookimpl
def engine_train_engines():
    capabilities = frozenset({"generation_module", "lora", "set_lr", "sleep"})
    return {"adapted": TrainBackend(load=AdaptedEngine, config=FSDPOptions, capabilities=capabilities)}
