"""Only for tests: products in 8 bits on a CPU, of layers of any size. torchao multiplies the rounded values in float32."""

from engine_core import hookimpl
from engine_core.specs import TrainBackend
from engine_plugin_fsdp import fp8
from engine_plugin_fsdp.engine import FSDPEngine
from engine_plugin_fsdp.options import FSDPOptions


def any_size(recipe, rows, columns):
    return rows % fp8.MULTIPLE == columns % fp8.MULTIPLE == 0


class EmulatedEngine(FSDPEngine):
    emulates_fp8 = True

    def _shard(self, module, units):
        kept, fp8.is_worth = fp8.is_worth, any_size
        try:
            return super()._shard(module, units)
        finally:
            fp8.is_worth = kept


@hookimpl
def engine_train_engines():
    capabilities = frozenset({"generation_module", "set_lr", "sleep"})
    return {"emulated": TrainBackend(load=EmulatedEngine, config=FSDPOptions, capabilities=capabilities)}
