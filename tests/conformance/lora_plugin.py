"""The reference engine with an adapter in every model that it trains."""

import sys
from pathlib import Path

from engine_core import hookimpl
from engine_core.specs import TrainBackend
from engine_plugin_torch.options import TorchOptions

sys.path.insert(0, str(Path(__file__).parent))


@hookimpl
def engine_train_engines():
    capabilities = frozenset({"generation_module", "lora", "set_lr", "sleep"})
    return {
        "adapted": TrainBackend(
            load="lora_engine:AdaptedEngine", config=TorchOptions, capabilities=capabilities
        )
    }
