"""The engine of two rates in one process (no torch here: read by ``engine validate``)."""

from pydantic import Field

from engine_core import hookimpl
from engine_core.specs import TrainBackend
from engine_plugin_torch.options import TorchOptions

KEPT = frozenset({"common_checkpoints", "generation_module", "set_lr"})


class TwoRatesOptions(TorchOptions):
    vector_rate: float = Field(default=0.25, gt=0, le=1)
    """Learning rate of norms and biases, as a share of that of matrices."""


@hookimpl
def engine_train_engines():
    load = "engine_plugin_custom_model.two_rates:TwoRatesTorch"
    return {"two_rates": TrainBackend(load=load, config=TwoRatesOptions, capabilities=KEPT)}
