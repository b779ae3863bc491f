"""A plugin in one file, as a stranger would write it: the engine lies beside it and is imported when used."""

import sys
from pathlib import Path

from engine_core import hookimpl
from engine_core.specs import TrainBackend
from engine_plugin_torch.options import TorchOptions

sys.path.insert(0, str(Path(__file__).parent))


@hookimpl
def engine_train_engines():
    spec = TrainBackend(
        load="data_parallel_engine:DataParallelEngine",
        config=TorchOptions,
        capabilities=frozenset({"generation_module", "set_lr", "sleep"}),
    )
    return {"data_parallel": spec}
