"""A plugin that shards the units by itself."""

from torch.distributed.fsdp import fully_shard

from engine_core import hookimpl


@hookimpl
def engine_shard_model(role, module, units, options):
    for name in units:
        fully_shard(module.get_submodule(name))
    return module
