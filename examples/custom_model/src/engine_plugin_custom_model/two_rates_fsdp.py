"""The same two groups over a sharded model."""

from engine_plugin_custom_model.two_rates import TwoRates
from engine_plugin_fsdp.engine import FSDPEngine


class TwoRatesFSDP(TwoRates, FSDPEngine):
    """Over the ranks of the run."""
