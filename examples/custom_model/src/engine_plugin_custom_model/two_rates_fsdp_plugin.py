"""The engine of two rates over ranks: apart, so that the one in a process needs no engine-plugin-fsdp."""

from pydantic import Field

from engine_core import hookimpl
from engine_core.specs import TrainBackend
from engine_plugin_custom_model.two_rates_plugin import KEPT
from engine_plugin_fsdp.options import FSDPOptions


class TwoRatesFSDPOptions(FSDPOptions):
    vector_rate: float = Field(default=0.25, gt=0, le=1)
    """Learning rate of norms and biases, as a share of that of matrices."""


@hookimpl
def engine_train_engines():
    load = "engine_plugin_custom_model.two_rates_fsdp:TwoRatesFSDP"
    return {"two_rates_fsdp": TrainBackend(load=load, config=TwoRatesFSDPOptions, capabilities=KEPT)}
