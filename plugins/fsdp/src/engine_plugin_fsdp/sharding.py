"""The units of a model and their sharding over ranks with ``fully_shard`` (FSDP2).

A ``Root`` wraps the whole model. Its forward runs any function of the engine: the decoder, then the head on some
rows. Weights in no unit (embeddings, last norm, head) form the root's unit. It is gathered for the whole pass, so that
tied weights are one tensor and every chunk of the head can use it.
"""

from __future__ import annotations

import functools
import weakref
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
from torch.distributed.tensor import DTensor

from engine_core.errors import ConfigError, did_you_mean
from engine_plugin_fsdp.tensor_parallel import count_once, split_unit
from engine_plugin_torch.data_parallel import Root
from engine_plugin_torch.precision import NAMED
from engine_plugin_torch.sharded import here
from engine_plugin_torch.units import decoder_layers

if TYPE_CHECKING:
    from engine_plugin_fsdp.options import FSDPOptions
    from engine_plugin_fsdp.ranks import Ranks
    from engine_plugin_fsdp.tensor_parallel import Plan
    from engine_plugin_torch.precision import Precision

ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW)


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
) -> Root:
    """Shard a module over the ranks; its parameters become ``DTensor`` in place.

    Args:
        module: the model on the CPU, on ``meta`` or on the device; each unit moves to the device when it is sharded.
        units: names of submodules; ``wrap.layers_per_unit`` neighbors form one unit.
        options: the role's table.
        precision: the role's types.
        ranks: the role's meshes.
        plan: the split of layers over ``tp``; None without ``tp``.

    Returns:
        The sharded root, which contains the module.
    """
    root = Root(module)
    size = options.wrap.layers_per_unit
    settings: dict[str, Any] = {
        "mp_policy": policy(options, precision),
        "offload_policy": offload(options, ranks.device),
    }
    split: list[str] = []
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
    if plan is not None and ranks.tp is not None:
        count_once(module, split, plan, ranks.tp.get_group())
    fully_shard(root, mesh=ranks.mesh, **settings)
    for holder in sharded_modules(root):
        sum_gradients(holder)
    return root


def sum_gradients(holder: FSDPModule) -> None:
    """Make FSDP sum gradients over ranks instead of taking their mean: a loss is a sum over the whole batch."""
    holder.set_gradient_divide_factor(1.0)
    holder.set_force_sum_reduction_for_comms(True)


def policy(options: FSDPOptions, precision: Precision) -> MixedPrecisionPolicy:
    """Return the types of gathered weights (as kept, or cast for the forward pass) and of reduced gradients."""
    return MixedPrecisionPolicy(
        param_dtype=None if precision.param == precision.compute else precision.compute,
        reduce_dtype=NAMED[options.mixed_precision.reduce_dtype],
    )


def offload(options: FSDPOptions, device: torch.device) -> OffloadPolicy:
    """Return the policy for weights between uses: on the device, or in (pinned) host memory."""
    if options.cpu_offload != "params":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device.type != "cpu")


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    """Return the sharded modules: the root and the units."""
    return [part for part in root.modules() if isinstance(part, FSDPModule)]


def forget_forwards(part: FSDPModule) -> None:
    """Clear FSDP's record of forward passes, which only a backward pass clears: without one it grows."""
    order = part._get_fsdp_state()._comm_ctx.post_forward_order
    for group in order:
        group._post_forward_indices.clear()
    order.clear()


def offload_activations(module: nn.Module, units: Sequence[str], pin: bool) -> None:
    """Keep the activations that units save for their backward pass in host memory, pinned if ``pin``."""

    def offloaded(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass with its saved tensors in host memory."""
        with torch.autograd.graph.save_on_cpu(pin_memory=pin):
            return forward(*args, **kwargs)

    for name in units:
        unit = module.get_submodule(name)
        unit.forward = functools.partial(offloaded, unit.forward)


def step_on_parts(optimizer: Any) -> bool:
    """Make torch's Adam or AdamW update local parts; return whether ``optimizer`` is one of them.

    An operator over lists of ``DTensor`` runs Python code for every tensor. For hundreds of weights this takes longer
    than the arithmetic on their shards, and the device waits. Adam works element by element, so a step on the parts
    gives the same result.

    Parameters, groups and state stay ``DTensor``, so checkpoints, hooks and schedules see no difference. Other
    optimizers, including subclasses, do not change, because they may use whole matrices.
    """
    collect = getattr(type(optimizer), "_init_group", None)
    if type(optimizer) not in ELEMENTWISE or collect is None:
        return False
    owner = weakref.ref(optimizer)  # no cycle: the state is freed with the last reference to the optimizer
    optimizer._init_group = functools.partial(_collected_parts, collect, owner)
    return True


def _collected_parts(
    collect: Callable[..., Any], owner: weakref.ref[Any], group: Any, *lists: list[Any]
) -> Any:
    """Call ``Adam._init_group``, which fills lists of parameters, gradients, moments and steps; put local parts in."""
    answer = collect(owner(), group, *lists)
    for tensors in lists:
        tensors[:] = [here(tensor) if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return answer
