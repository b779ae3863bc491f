"""The units of a model and their sharding over ranks with ``fully_shard`` (FSDP2).

A ``Root`` wraps the whole model. Its forward runs any function of the engine: the decoder, then the head on some
rows. Weights in no unit (embeddings, last norm, head) form the root's unit. It is gathered for the whole pass, so that
tied weights are one tensor and every chunk of the head can use it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from engine_core.errors import ConfigError, did_you_mean
from engine_plugin_fsdp.tensor_parallel import count_once, split_unit
from engine_plugin_torch.precision import NAMED
from engine_plugin_torch.units import decoder_layers

if TYPE_CHECKING:
    from engine_plugin_fsdp.options import FSDPOptions
    from engine_plugin_fsdp.ranks import Ranks
    from engine_plugin_fsdp.tensor_parallel import Plan
    from engine_plugin_fsdp.whole import Whole
    from engine_plugin_torch.precision import Precision


class Root(nn.Module):
    """A wrapper of the model that runs a function inside its forward, where the root's weights are gathered."""

    def __init__(
        self,
        module: nn.Module,
        around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        super().__init__()
        self.module, self.around = module, around

    def forward(self, compute: Callable[[], Any]) -> Any:
        """Call ``compute`` with the root's weights gathered."""
        with self.around():
            return compute()


def units_of(module: nn.Module, options: FSDPOptions, role: str) -> list[str]:
    """Return the names of the units: modules of the classes in ``wrap``, else the decoder layers.

    Raises:
        ConfigError: the model has no module of a class.
    """
    chosen = options.wrap.layer_classes
    if not chosen:
        return decoder_layers(module)
    classes = {type(part).__name__ for part in module.modules()}
    for name in chosen:
        if name not in classes:
            raise ConfigError(
                f"{role}.fsdp.wrap.layer_classes: {type(module).__name__} has no module of the class '{name}'."
                + did_you_mean(name, classes)
            )
    found = [name for name, part in module.named_modules() if name and type(part).__name__ in chosen]
    return [name for name in found if not any(name.startswith(f"{other}.") for other in found)]


def check(module: nn.Module, units: Sequence[str], role: str) -> None:
    """Refuse a model that would compute wrong results when it is sharded.

    Raises:
        ConfigError: the model has a batch norm, or a weight that two units share.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"[{role}.fsdp]: '{name}' is a {type(part).__name__}, whose statistics are of one rank's sequences "
                "only, so that the result would depend on the number of ranks. Use a norm over features."
            )
    holders: dict[int, tuple[str, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        unit = next((unit for unit in units if name.startswith(f"{unit}.")), "")
        first, known = holders.setdefault(id(parameter), (unit, name))
        if first != unit:
            raise ConfigError(
                f"{role}.fsdp.wrap: '{known}' and '{name}' are one weight (tied), but they would lie in two units "
                f"('{first or 'the rest of the model'}' and '{unit or 'the rest of the model'}'). "
                "Choose units that hold both or none of them."
            )


def shard(
    module: nn.Module,
    units: Sequence[str],
    options: FSDPOptions,
    precision: Precision,
    ranks: Ranks,
    plan: Plan | None = None,
    whole: Whole | None = None,
) -> Root:
    """Shard a module over the ranks; its parameters become ``DTensor`` in place.

    Args:
        module: the model on the CPU, on ``meta`` or on the device; each unit moves to the device when it is sharded.
        units: names of submodules; ``wrap.layers_per_unit`` neighbors form one unit.
        options: the role's table.
        precision: the role's types.
        ranks: the role's meshes.
        plan: the split of layers over ``tp``; None without ``tp``.
        whole: the parameters that stay whole on each rank; None if there are none.

    Returns:
        The sharded root, which contains the module.
    """
    root = Root(module) if whole is None else Root(module, functools.partial(whole.outside, units))
    size = options.wrap.layers_per_unit
    settings: dict[str, Any] = {
        "mp_policy": policy(options, precision),
        "offload_policy": offload(options, ranks.device),
        "ignored_params": None if whole is None else whole.parameters,
    }
    made, split = [], []
    for start in range(0, len(units), size):
        names, mesh = units[start : start + size], ranks.mesh
        if plan is not None and ranks.tp is not None and any(plan.splits(name) for name in names):
            for name in names:
                split_unit(module, name, plan, ranks.tp, ranks.device)
            split += names
            mesh = ranks.split_mesh
        part = [module.get_submodule(name) for name in names]
        last = start + size >= len(units)  # stays gathered: the backward pass begins with it
        fully_shard(
            part if len(part) > 1 else part[0],
            mesh=mesh,
            **settings,
            reshard_after_forward=not (options.keeps_gathered or last),
        )
        made.append(part[0])
    if plan is not None and ranks.tp is not None:
        count_once(module, split, plan, ranks.tp.get_group())
    fully_shard(root, mesh=ranks.mesh, **{**settings, "mp_policy": policy(options, precision, root=True)})
    for holder in sharded_modules(root):
        sum_gradients(holder)
    _prefetch(made, options)
    return root


def sum_gradients(holder: FSDPModule) -> None:
    """Make FSDP sum gradients over ranks instead of taking their mean: a loss is a sum over the whole batch."""
    holder.set_gradient_divide_factor(1.0)
    holder.set_force_sum_reduction_for_comms(True)


def policy(options: FSDPOptions, precision: Precision, root: bool = False) -> MixedPrecisionPolicy:
    """Return the types of gathered weights and of reduced gradients, and for the root the type of its outputs."""
    given = options.mixed_precision.output_dtype
    return MixedPrecisionPolicy(
        param_dtype=gathered_dtype(precision),
        reduce_dtype=NAMED[options.mixed_precision.reduce_dtype],
        output_dtype=NAMED[given] if root and given != "auto" else None,
    )


def gathered_dtype(precision: Precision) -> torch.dtype | None:
    """Return the type that weights are cast to for a forward pass; None if they are not cast."""
    return None if precision.param == precision.compute else precision.compute


def offload(options: FSDPOptions, device: torch.device) -> OffloadPolicy:
    """Return the policy for weights between uses: on the device, or in (pinned) host memory."""
    if options.cpu_offload != "params":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device.type != "cpu")


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    """Return the sharded modules: the root and the units."""
    return [part for part in root.modules() if isinstance(part, FSDPModule)]


def _prefetch(units: Sequence[Any], options: FSDPOptions) -> None:
    """Set the units to prefetch if the table asks for more than FSDP's default."""
    for index, unit in enumerate(units):
        ahead = units[index + 1 : index + 1 + options.forward_prefetch]
        if ahead:
            unit.set_modules_to_forward_prefetch(list(ahead))
        behind = units[max(0, index - options.backward_prefetch) : index]
        if options.backward_prefetch and behind:
            unit.set_modules_to_backward_prefetch(list(behind[::-1]))
