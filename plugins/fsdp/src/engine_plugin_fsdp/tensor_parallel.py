"""Tensor parallelism: several ranks share each layer (Megatron-LM, https://arxiv.org/abs/1909.08053).

Which layers are split, and how, is the plan that transformers keeps with its models (``tp_plan``). It is carried
out here, on each rank's own part of a weight as a plain tensor, for three reasons: all weights of a unit stay
sharded tensors of one mesh; norms of heads, whose gradient is a sum over ranks, have the right one over
several micro-batches too (transformers adds up ``.grad`` in a hook, what is in it already once more); and no
operator goes through the dispatch of sharded tensors.

What the plan says of embeddings and head is not followed. Their weights are spread over these ranks as over all
others, gathered whole like a unit, and each rank computes the logits of its share of the rows (``slices``). Split
over the vocabulary, either every chunk of logits would be gathered ([rows, vocabulary], the largest tensor
of training), or each output would need a form of its own for a part of the vocabulary.

A unit that holds split layers lies on the mesh without ``tp``; what is whole in it is a copy on each of these
ranks, with the same gradient. Other units lie on all ranks, and gradients of them are summed over all: so one rank
of ``tp`` alone gives them.

Left out: experts of a mixture, layers that transformers has no plan for.
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

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FACTORS = ("lora_A", "lora_B")  # of an adapter over a layer


@dataclass(frozen=True)
class Style:
    """How one layer is split: the dimension of its weight, and what its input and output are on each rank."""

    dim: int | None  # None: whole, used on a part of the heads
    cuts: bool = False  # the input is whole, and this rank's part of it is taken
    gathers: bool = False  # the parts of the output are put together


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
    """What becomes of one weight: the dimension it is split along, and whether its gradient is a sum over ranks."""

    dim: int | None = None
    summed: bool = False


@dataclass(frozen=True)
class Plan:
    """How a model is split.

    Attributes:
        styles: of layers, by name.
        rules: of weights, by name; those that are not in it are whole.
        heads: names of modules whose output is computed a share of the rows on each rank.
    """

    styles: Mapping[str, Style] = field(default_factory=dict)
    rules: Mapping[str, Rule] = field(default_factory=dict)
    heads: tuple[str, ...] = ()

    @property
    def layers(self) -> list[str]:
        """Names of layers of which each rank has a part."""
        return [name for name, style in self.styles.items() if style.dim is not None]

    def splits(self, unit: str) -> bool:
        """Whether a unit holds a layer that is split."""
        return any(name.startswith(f"{unit}.") or name == unit for name in self.styles)


# -- what is split ------------------------------------------------------------


def check_config(config: Any, size: int, role: str) -> None:
    """Refuse by its config, before anything is built, a model that cannot be split.

    Raises:
        ConfigError: transformers has no plan for it, or heads or wide layers do not divide.
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
            told = f"{count} {what}" if what.endswith("heads") else f"{what} of {count}"
            raise ConfigError(
                f"{key} is {size}, which does not divide the model's {told}. {nearest_fit(size, fits)}"
            )


def plan_of(module: nn.Module, size: int, role: str) -> Plan:
    """How a module is split over ``size`` ranks. It is not sharded yet, and may be on ``meta``.

    Raises:
        ConfigError: it cannot be.
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
    """Rules of a layer's weights; of one with an adapter (peft), of the adapter's too."""
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
        if factor in FACTORS:  # the one that has the layer's split side is split with it
            split = factor == ("lora_B" if style.dim == 0 else "lora_A")
            rules[f"{name}.{leaf}"] = Rule(style.dim) if split else Rule(summed=True)
    return rules


# -- splitting ----------------------------------------------------------------


def check_units(module: nn.Module, plan: Plan, units: Collection[str], role: str) -> None:
    """Refuse units that leave a split layer to the rest of the model, or hold a head beside one, and what has weights
    that are used past its own forward, so that nobody would count their gradient once.

    Raises:
        ConfigError: they do.
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
                f"{role}.fsdp.wrap: a unit holds '{head}' beside layers that {role}.fsdp.tp splits. "
                "Choose smaller units."
            )
    for name, part in module.named_modules():
        if isinstance(part, (nn.ParameterDict, nn.ParameterList)) and len(part):
            raise ConfigError(
                f"{role}.fsdp.tp cannot be combined with the weights in '{name}' (as of an adapter over embeddings): take "
                f"them out of {role}.lora.target_modules, or leave tp out."
            )


def split_unit(module: nn.Module, name: str, plan: Plan, mesh: DeviceMesh, device: torch.device) -> None:
    """Leave each rank its part of a unit's layers; every weight of it becomes a ``DTensor`` over ``mesh``.

    Args:
        module: the whole model, so that the plan's names hold.
        name: of the unit.
        mesh: the ranks that share layers.
        device: where the parts are wanted; those of ``meta`` stay there.
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
    """Modules that are whole and computed alike on all ranks of a group: the first one's gradient counts.

    Args:
        module: the whole model.
        names: units that are split, whose modules are left alone. So are heads.
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
    """Have a module's own forward see this rank's parts of its weights as plain tensors."""
    forward = part.forward

    def on_parts(*args: Any, **kwargs: Any) -> Any:
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
    """Bring a split layer's input and output over the ranks. The bias of a sum is added once, behind it."""
    base: Any = getattr(part, "base_layer", part)
    forward, inner = part.forward, base.forward

    def without_bias(*args: Any, **kwargs: Any) -> Any:
        bias, base._parameters["bias"] = base._parameters["bias"], None
        try:
            return inner(*args, **kwargs)
        finally:
            base._parameters["bias"] = bias

    def rows(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = forward(SumGradient.apply(hidden, group), *args, **kwargs)
        return Gather.apply(out, group) if style.gathers else out

    def columns(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = Sum.apply(forward(Cut.apply(hidden, group) if style.cuts else hidden, *args, **kwargs), group)
        return out if base.bias is None else out + _plain(base.bias)

    if style.dim == 1 and base.bias is not None:
        base.forward = without_bias
        forward = without_bias if base is part else forward
    part.forward = rows if style.dim == 0 else columns


def _plain(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# -- over ranks ---------------------------------------------------------------


class Sum(torch.autograd.Function):
    """The sum over a group; what follows is the same on all its ranks, and so is the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class SumGradient(torch.autograd.Function):
    """The tensor itself; each rank of a group computes something else of it, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _summed(gradients[0], ctx.group), None


class FirstGradient(torch.autograd.Function):
    """The tensor itself; its gradient is that of the group's first rank, and 0 on the others."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.counts = group.rank() == 0
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] if ctx.counts else torch.zeros_like(gradients[0]), None


class Gather(torch.autograd.Function):
    """The group's parts of the last dimension put together; the gradient is this rank's part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _cut(gradients[0], ctx.group), None


class Cut(torch.autograd.Function):
    """This rank's part of the last dimension; the gradient is that of all parts."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _cut(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _gathered(gradients[0], ctx.group), None


def _summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    # A copy: what is summed may be kept for the backward pass (selective recomputation).
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _cut(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return tensor.chunk(group.size(), -1)[group.rank()].contiguous()
