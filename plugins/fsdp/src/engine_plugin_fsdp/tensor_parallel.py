"""Tensor parallelism: several ranks share each layer (Megatron-LM, https://arxiv.org/abs/1909.08053).

The plan of transformers for a model (``tp_plan``) says which layers are split and how. This module carries it out on
each rank's own part of a weight, as a plain tensor, for three reasons. All weights of a unit stay sharded tensors of
one mesh. Norms of heads, whose gradient is a sum over ranks, get the right gradient over several micro-batches too
(transformers reduces ``.grad`` in a hook and so counts earlier micro-batches again). No operator uses the dispatch of
sharded tensors.

The plan's entries for embeddings and head are ignored. Their weights are sharded over all ranks and gathered whole
like a unit, and each rank computes the logits of its share of the rows (``slices``). With a split over the vocabulary,
either every chunk of logits would be gathered ([rows, vocabulary], the largest tensor of training), or each output
would need a variant for a part of the vocabulary.

A unit with split layers is sharded on the mesh without ``tp``. Each rank of ``tp`` has a copy of the unit's unsplit
weights, with the same gradient. Other units are sharded over all ranks, and their gradients are summed over all ranks,
so only one rank of ``tp`` contributes a gradient.

Not supported: experts of a mixture, layers without a plan in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from transformers import PreTrainedModel

from engine_core.errors import ConfigError
from engine_core.model_config import VALUE_HEAD as HEAD
from engine_plugin_fsdp.ranks import nearest_fit
from engine_plugin_torch.rank_group import Together, gather_last

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FACTORS = ("lora_A", "lora_B")  # weights of an adapter over a layer


@dataclass(frozen=True)
class Style:
    """The split of one layer: the dimension of its weight, and the form of its input and output on each rank."""

    dim: int | None  # None: not split, used on a part of the heads
    cuts: bool = False  # the input is whole, and each rank takes its part
    gathers: bool = False  # the parts of the output are gathered


STYLES = {
    "colwise": Style(0),
    "colwise_gather_output": Style(0, gathers=True),
    "colwise_rep": Style(0, gathers=True),
    "rowwise": Style(1),
    "rowwise_split_input": Style(1, cuts=True),
    "rowwise_rep": Style(1, cuts=True),
    "replicated_with_grad_allreduce": Style(None),
}
"""Names of transformers' plans that are carried out here."""


@dataclass(frozen=True)
class Rule:
    """The split of one weight: its dimension (None: not split), and whether its gradient is summed over ranks."""

    dim: int | None = None
    summed: bool = False


@dataclass(frozen=True)
class Plan:
    """The split of a model over the ranks of ``tp``.

    Attributes:
        styles: styles of layers, by name.
        rules: rules of weights, by name; weights without a rule are whole.
        heads: names of modules whose rows are divided among the ranks.
    """

    styles: Mapping[str, Style] = field(default_factory=dict)
    rules: Mapping[str, Rule] = field(default_factory=dict)
    heads: tuple[str, ...] = ()

    @property
    def layers(self) -> list[str]:
        """Names of the layers of which each rank has a part."""
        return [name for name, style in self.styles.items() if style.dim is not None]

    def splits(self, unit: str) -> bool:
        """Return whether a unit contains a layer of the plan."""
        return any(name.startswith(f"{unit}.") or name == unit for name in self.styles)


# -- what is split ------------------------------------------------------------


def check_config(config: Any, size: int, role: str) -> None:
    """Refuse, by its config, a model that cannot be split, before anything is built.

    Raises:
        ConfigError: transformers has no plan for the model, or ``size`` does not divide its heads or its wide layers.
    """
    text, key = config.get_text_config(decoder=True), f"{role}.fsdp.tp"
    if not getattr(text, "base_model_tp_plan", None):
        raise _without_plan(f"a model of type '{text.model_type}'", key)
    _check_styles(text.base_model_tp_plan, text.model_type, key)
    counts = {
        "attention heads": getattr(text, "num_attention_heads", None),
        "key-value heads": getattr(text, "num_key_value_heads", None),
        "intermediate size": getattr(text, "intermediate_size", None),
    }
    known = {what: count for what, count in counts.items() if isinstance(count, int)}
    fits = [n for n in range(1, max(known.values(), default=1) + 1) if not any(c % n for c in known.values())]
    for what, count in known.items():
        if count % size:
            sized = f"{count} {what}" if what.endswith("heads") else f"{what} of {count}"
            raise ConfigError(
                f"{key} is {size}, which does not divide the model's {sized}. {nearest_fit(size, fits)}"
            )


def plan_of(module: nn.Module, size: int, role: str) -> Plan:
    """Return the plan to split a module over ``size`` ranks. The module is not sharded yet and may be on ``meta``.

    Raises:
        ConfigError: the module cannot be split.
    """
    key = f"{role}.fsdp.tp"
    if not isinstance(module, PreTrainedModel):
        raise _without_plan(type(module).__name__, key)
    layers = dict(module.named_modules())
    heads = tuple(n for n, part in layers.items() if part is module.get_output_embeddings() or n == HEAD)
    _check_styles(module.tp_plan or {}, type(module).__name__, key)
    check_config(module.config, size, role)
    asked = {p: style for p, style in module.tp_plan.items() if style in STYLES and not _is_head(p)}
    styles: dict[str, Style] = {}
    rules: dict[str, Rule] = {}
    for name, part in layers.items():
        pattern = ".".join("*" if word.isdigit() else word for word in name.split("."))
        if pattern in asked:
            styles[name] = STYLES[asked[pattern]]
            rules |= _rules_of(name, part, styles[name], size, key)
    if not styles:
        raise _without_plan(type(module).__name__, key)
    return Plan(styles, rules, heads)


def _without_plan(what: str, key: str) -> ConfigError:
    return ConfigError(
        f"{key}: transformers has no plan by which the layers of {what} are split. Leave {key} out; "
        "sharding spreads any model."
    )


def _check_styles(plan: Mapping[str, str], what: str, key: str) -> None:
    for pattern, style in plan.items():
        if style not in STYLES and not style.startswith("embedding") and not _is_head(pattern):
            raise ConfigError(
                f"{key}: the plan of {what} has '{style}' for '{pattern}', which is not carried out here (experts of a "
                "mixture are not split). Leave it out; sharding spreads any model."
            )


def _is_head(pattern: str) -> bool:
    return pattern.rpartition(".")[2] in ("lm_head", "embed_out", HEAD)


def _rules_of(name: str, part: nn.Module, style: Style, size: int, key: str) -> dict[str, Rule]:
    """Return the rules of a layer's weights, including those of its adapter (peft)."""
    if style.dim is None:
        return {f"{name}.{leaf}": Rule(summed=True) for leaf, _ in part.named_parameters()}
    base = getattr(part, "base_layer", part)
    if not isinstance(base, nn.Linear) or getattr(part, "lora_magnitude_vector", None):
        kind = (
            "has an adapter of DoRA" if base is not part else f"is a {type(base).__name__}, not an nn.Linear"
        )
        raise ConfigError(f"{key}: '{name}', which its plan splits, {kind}. Leave one of them out.")
    width = base.weight.shape[style.dim]
    if width % size:
        fits = [n for n in range(1, width + 1) if width % n == 0]
        raise ConfigError(
            f"{key} is {size}, which does not divide the {width} {'outputs' if style.dim == 0 else 'inputs'} of "
            f"'{name}'. {nearest_fit(size, fits)}"
        )
    prefix = name if base is part else f"{name}.base_layer"
    rules = {f"{prefix}.weight": Rule(style.dim)}
    if base.bias is not None:
        rules[f"{prefix}.bias"] = Rule(0) if style.dim == 0 else Rule()
    for leaf, _ in part.named_parameters():
        factor = leaf.partition(".")[0]
        if factor in FACTORS:  # the factor on the layer's split side is split too
            split = factor == ("lora_B" if style.dim == 0 else "lora_A")
            rules[f"{name}.{leaf}"] = Rule(style.dim) if split else Rule(summed=True)
    return rules


# -- splitting ----------------------------------------------------------------


def check_units(module: nn.Module, plan: Plan, units: Collection[str], role: str) -> None:
    """Refuse units and modules that do not work with a split.

    Raises:
        ConfigError: a split layer is in no unit, a unit holds a head and a split layer, or a module's weights are used
            outside its own forward, so that their gradient would be counted several times.
    """
    for name in plan.styles:
        if not any(name == unit or name.startswith(f"{unit}.") for unit in units):
            raise ConfigError(
                f"{role}.fsdp.wrap: '{name}' is split over {role}.fsdp.tp and lies in no unit. Choose units that hold every "
                "split layer, such as the decoder layers (leave wrap out)."
            )
    for head in plan.heads:
        if any(head.startswith(f"{unit}.") and plan.splits(unit) for unit in units):
            raise ConfigError(
                f"{role}.fsdp.wrap: a unit holds '{head}' together with layers that {role}.fsdp.tp splits. "
                "Choose smaller units."
            )
    for name, part in module.named_modules():
        if isinstance(part, (nn.ParameterDict, nn.ParameterList)) and len(part):
            raise ConfigError(
                f"{role}.fsdp.tp cannot be combined with the weights in '{name}' (as of an adapter over embeddings): take "
                f"them out of {role}.lora.target_modules, or leave tp out."
            )


def split_unit(module: nn.Module, name: str, plan: Plan, mesh: DeviceMesh, device: torch.device) -> None:
    """Keep this rank's part of a unit's layers; every weight of the unit becomes a ``DTensor`` over ``mesh``.

    Args:
        module: the whole model, which has the names of the plan.
        name: name of the unit.
        plan: the split of the model.
        mesh: the ranks that share layers.
        device: the device of the parts; parts on ``meta`` stay there.
    """
    made: dict[int, nn.Parameter] = {}
    for path, part in _parts(module, name):
        rules = {leaf: plan.rules.get(f"{path}.{leaf}", Rule()) for leaf in part._parameters}
        for leaf, parameter in part._parameters.items():
            if parameter is not None:
                known = made.get(id(parameter))
                fresh = _split(parameter, rules[leaf], mesh, device) if known is None else known
                part._parameters[leaf] = fresh
                made[id(parameter)] = part._parameters[leaf]  # type: ignore[assignment]
        if any(parameter is not None for parameter in part._parameters.values()):
            group = mesh.get_group()
            _use(
                part,
                {leaf: SumGradient.apply if rule.summed else None for leaf, rule in rules.items()},
                group,
            )
    for path, part in _parts(module, name):
        if path in plan.styles and plan.styles[path].dim is not None:
            _around(part, plan.styles[path], mesh.get_group())


def count_once(module: nn.Module, names: Collection[str], plan: Plan, group: dist.ProcessGroup) -> None:
    """Count only the first rank's gradient of modules that all ranks of a group compute alike.

    Args:
        module: the whole model.
        names: names of split units; their modules do not change.
        plan: the split of the model; its heads do not change either.
        group: the ranks that share layers.
    """
    for path, part in module.named_modules():
        inside = any(path == unit or path.startswith(f"{unit}.") for unit in (*names, *plan.heads))
        if not inside and any(parameter is not None for parameter in part._parameters.values()):
            _use(part, dict.fromkeys(part._parameters, FirstGradient.apply), group)


def _parts(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    return [
        (path, part) for path, part in module.named_modules() if path == name or path.startswith(f"{name}.")
    ]


def _split(parameter: nn.Parameter, rule: Rule, mesh: DeviceMesh, device: torch.device) -> nn.Parameter:
    placement: Placement = Replicate() if rule.dim is None else Shard(rule.dim)
    local = parameter.detach()
    if rule.dim is not None:
        local = local.chunk(mesh.size(), rule.dim)[mesh.get_local_rank()]
    local = local.contiguous() if local.device.type == "meta" else local.to(device, copy=True).contiguous()
    made = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(made, requires_grad=parameter.requires_grad)


def _use(
    part: nn.Module, gradients: Mapping[str, Callable[..., Tensor] | None], group: dist.ProcessGroup
) -> None:
    """Make a module's forward use this rank's parts of its weights as plain tensors."""
    forward = part.forward

    def on_parts(*args: Any, **kwargs: Any) -> Any:
        """Run the forward pass on the parts; restore the weights afterwards."""
        held = {leaf: p for leaf, p in part._parameters.items() if p is not None}
        seen = {leaf: _plain(p) for leaf, p in held.items()}
        for leaf, tensor in seen.items():
            function = gradients.get(leaf)
            seen[leaf] = tensor if function is None else function(tensor, group)
        part._parameters.update(seen)  # type: ignore[arg-type]
        try:
            return forward(*args, **kwargs)
        finally:
            part._parameters.update(held)

    part.forward = on_parts


def _around(part: nn.Module, style: Style, group: dist.ProcessGroup) -> None:
    """Add the communication of a split layer's input and output. The bias is added once, after a sum."""
    base: Any = getattr(part, "base_layer", part)
    forward, inner = part.forward, base.forward

    def without_bias(*args: Any, **kwargs: Any) -> Any:
        """Run the inner forward pass without the bias."""
        bias, base._parameters["bias"] = base._parameters["bias"], None
        try:
            return inner(*args, **kwargs)
        finally:
            base._parameters["bias"] = bias

    def rows(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a layer that is split over its outputs: ``[..., I]`` -> ``[..., O / tp]``; ``[..., O]`` if gathered."""
        out = forward(SumGradient.apply(hidden, group), *args, **kwargs)
        return Gather.apply(out, group) if style.gathers else out

    def columns(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a layer that is split over its inputs: ``[..., I / tp]``, or ``[..., I]`` to cut, -> ``[..., O]``."""
        out = Together.apply(
            forward(Cut.apply(hidden, group) if style.cuts else hidden, *args, **kwargs), group
        )
        return out if base.bias is None else out + _plain(base.bias)

    if style.dim == 1 and base.bias is not None:
        base.forward = without_bias
        forward = without_bias if base is part else forward
    part.forward = rows if style.dim == 0 else columns


def _plain(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# -- over ranks ---------------------------------------------------------------


class SumGradient(torch.autograd.Function):
    """The identity, with the gradient summed over a group whose ranks compute different things from the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the tensor ``[D0, ...]``."""
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Sum the gradient ``[D0, ...]`` over the group."""
        return _summed(gradients[0], ctx.group), None


class FirstGradient(torch.autograd.Function):
    """The identity, with the gradient set to 0 on all ranks of a group except the first."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the tensor ``[D0, ...]``."""
        ctx.counts = group.rank() == 0
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient ``[D0, ...]`` on the first rank, 0 on the others."""
        return gradients[0] if ctx.counts else torch.zeros_like(gradients[0]), None


class Gather(torch.autograd.Function):
    """The gather of a group's parts along the last dimension; the gradient is this rank's part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Gather ``[..., D / size]`` to ``[..., D]``."""
        ctx.group = group
        return gather_last(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return this rank's part ``[..., D / size]`` of the gradient ``[..., D]``."""
        return _cut(gradients[0], ctx.group), None


class Cut(torch.autograd.Function):
    """This rank's part of the last dimension; the gradient is gathered from all parts."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return this rank's part: ``[..., D]`` -> ``[..., D / size]``."""
        ctx.group = group
        return _cut(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gather the gradient ``[..., D / size]`` to ``[..., D]``."""
        return gather_last(gradients[0], ctx.group), None


def _summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _cut(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return tensor.chunk(group.size(), -1)[group.rank()].contiguous()
