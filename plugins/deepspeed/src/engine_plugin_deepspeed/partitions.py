"""The weights and the optimizer's state that ZeRO keeps in parts, whole again one tensor at a time.

DeepSpeed lays all parameters of a group end to end and cuts the whole in as many parts as there are ranks, so that no
rank's part has the shape of a tensor. Everything goes by the functions that it offers to read and write a parameter's
share of that (``deepspeed.utils.safe_get_full_...``). All methods are collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.contracts.weight_names import own_parameters
from engine_core.contracts.weight_sync import buckets
from engine_core.errors import DataError

WEIGHTS = (
    "lp_param_buffer",
    "bit16_groups_flat",
    "fp32_partitioned_groups_flat",
    "single_partition_of_fp32_groups",
)
"""Attributes of DeepSpeed's optimizers that hold weights, and the float32 copies that are stepped."""


class Partitions:
    """What one role's model is kept in.

    Args:
        module: the model, under DeepSpeed or plain.
        optimizer: that of DeepSpeed around ours; None where nothing is kept in parts by it.
        plain: ours.
    """

    def __init__(self, module: nn.Module, optimizer: Any, plain: torch.optim.Optimizer | None) -> None:
        self.own = own_parameters(module)
        self.zero, self.plain = optimizer, plain
        self.module = module

    @property
    def spread(self) -> bool:
        """Whether the weights themselves lie in parts (stage 3)."""
        return any(hasattr(p, "ds_id") for p in self.own.values())

    # -- weights ------------------------------------------------------------

    def weights(self, limit: int, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Those that compute, in their type, on every rank.

        Args:
            limit: bytes of whole tensors gathered at one time; a larger tensor is gathered alone.
            only: names; all of them by default.
        """
        for bucket in buckets(self._chosen(only), limit, bytes_of):
            with gathered(tensor for _, tensor in bucket):
                copies = [
                    (name, tensor.detach().clone() if hasattr(tensor, "ds_id") else tensor.detach())
                    for name, tensor in bucket
                ]
            while copies:
                yield copies.pop(0)

    def exact_weights(self, limit: int, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Those that a step changes: float32 where DeepSpeed keeps such a copy. See ``weights``."""
        return self.weights(limit, only) if self.zero is None else self._mixed(only)

    def _mixed(self, only: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        for name, tensor in self._chosen(only):
            if self._is_kept(tensor):
                yield name, safe_get_full_fp32_param(tensor).detach()
            else:
                with gathered([tensor]):
                    whole = tensor.detach().clone()
                yield name, whole

    def _chosen(self, only: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in self.own.items() if only is None or name in only)

    def places(self) -> dict[str, Place]:
        """Where ``take_weights`` puts whole weights."""
        return {name: Place(self, tensor) for name, tensor in self.own.items()}

    @torch.no_grad()
    def store(self, tensor: Tensor, new: Tensor, mix: float) -> None:
        """``w <- (1 - mix) * w + mix * new`` of one weight, in the copy that a step changes."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

        if self._is_kept(tensor):
            old = safe_get_full_fp32_param(tensor) if mix != 1.0 else None
            new = new.to(device=tensor.device, dtype=torch.float32)
            new = new if old is None else old.lerp(new, mix)
            safe_set_full_fp32_param(tensor, new.contiguous())
        with gathered([tensor], changed=True):
            target = tensor.detach()
            part = new.to(device=target.device, dtype=target.dtype)
            if mix == 1.0 or self._is_kept(tensor) or not target.is_floating_point():
                target.copy_(part)
            else:
                target.lerp_(part, mix)

    def _is_kept(self, tensor: Tensor) -> bool:
        return self.zero is not None and tensor.requires_grad

    # -- optimizer ----------------------------------------------------------

    def state_names(self) -> dict[str, list[str]]:
        """Of each trained weight what the optimizer keeps: tensors of its shape, and single numbers."""
        found: dict[str, list[str]] = {}
        if self.plain is not None and any(self.plain.state.values()):
            self._link()
        for name, tensor in self.own.items():
            if self._is_kept(tensor):
                state = self._state(tensor)
                found[name] = sorted(key for key, value in state.items() if isinstance(value, Tensor))
        return found

    def state(self, tensor: Tensor, key: str) -> Tensor:
        """One of them, whole."""
        from deepspeed.utils import safe_get_full_optimizer_state

        held = self._state(tensor)[key]
        if held.ndim == 0:
            return held.detach()
        found: Tensor = safe_get_full_optimizer_state(tensor, key)
        return found.detach()

    @torch.no_grad()
    def set_state(self, values: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace the optimizer's tensors, by weight and key; a mapping may read each when it is asked for.

        Raises:
            DataError: weights that lie in one part of the optimizer have taken different numbers of steps.
        """
        from deepspeed.utils import safe_set_full_optimizer_state

        self._allocate(values)
        numbers: dict[tuple[int, str], float] = {}
        for name, keys in values.items():
            tensor = self.own[name]
            state = self._state(tensor)
            for key in keys:
                value = keys[key]
                if value.ndim:
                    safe_set_full_optimizer_state(tensor, value.to(tensor.device).contiguous(), key)
                    continue
                if numbers.setdefault((id(state), key), float(value)) != float(value):
                    raise DataError(
                        f"The optimizer's '{key}' of '{name}' is {float(value)}, that of others {numbers[id(state), key]}; "
                        "DeepSpeed keeps one for all weights of a group. Take another checkpoint."
                    )
                state[key].fill_(float(value))

    def plain_values(self) -> dict[str, Any]:
        """What the optimizer keeps of each weight that is no tensor, as ``name/key``."""
        kept = {name: self._state(tensor) for name, tensor in self.own.items() if self._is_kept(tensor)}
        return {
            f"{name}/{key}": value
            for name, state in kept.items()
            for key, value in state.items()
            if not isinstance(value, Tensor)
        }

    def set_plain_values(self, values: Mapping[str, Any]) -> None:
        """The inverse of ``plain_values``."""
        for path, value in values.items():
            name, _, key = path.rpartition("/")
            self._state(self.own[name])[key] = value

    def move(self, device: torch.device) -> None:
        """Take this rank's parts of weights that no optimizer steps (stage 3) to another device."""
        for tensor in self.own.values():
            if (part := getattr(tensor, "ds_tensor", None)) is not None:
                part.data = part.data.to(device)

    def memory(self, part: str, device: torch.device) -> list[Tensor]:
        """What lies on a device of the weights and their float32 copies, of gradients, or of the optimizer's state."""
        if part == "weights":
            own = [*self.module.parameters()]
            parts = [getattr(p, name, None) for p in own for name in ("ds_tensor", "ds_secondary_tensor")]
            found = [*own, *parts, *self._zeros(*WEIGHTS)]
        elif part == "gradients":
            buckets_ = getattr(self.zero, "ipg_buckets", {}).values()
            found = [
                *self._zeros("grad_partitions_flat_buffer"),
                *_flat(bucket.buffer for bucket in buckets_),
            ]
        else:
            assert self.plain is not None
            found = [value for state in self.plain.state.values() for value in state.values()]
        tensors = (one.detach() for one in found if isinstance(one, Tensor) and one.ndim)
        return [tensor for tensor in tensors if tensor.device.type == device.type]

    def _zeros(self, *names: str) -> list[Any]:
        """DeepSpeed's own buffers: some are of one stage."""
        return _flat(getattr(self.zero, name, None) for name in names)

    def _allocate(self, values: Mapping[str, Mapping[str, Tensor]]) -> None:
        """An optimizer that has not stepped has no state yet."""
        assert self.plain is not None
        for name, keys in values.items():
            flat = self._flat(self.own[name])
            state = self.plain.state[flat]
            for key in keys:
                if key not in state:
                    single = keys[key].ndim == 0
                    state[key] = torch.zeros((), dtype=torch.float32) if single else torch.zeros_like(flat)
                    if single and getattr(self.plain, "defaults", {}).get("fused"):
                        state[key] = state[key].to(flat.device)
        if values:
            self._link()

    def _link(self) -> None:
        """DeepSpeed (stages 1 and 2) finds state by links that it makes when the first group has stepped, and none of the others."""
        if hasattr(self.zero, "_hp_optimizer_states_linked"):
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def _state(self, tensor: Tensor) -> dict[str, Any]:
        assert self.plain is not None
        found: dict[str, Any] = self.plain.state[self._flat(tensor)]  # made where there is none yet
        return found

    def _flat(self, tensor: Tensor) -> Any:
        """The tensor that lies in the optimizer, of which this rank's share of the weight is a part."""
        if hasattr(tensor, "ds_id"):
            group = self.zero.grad_position[self.zero.get_param_id(tensor)][0]
            return self.zero.fp32_partitioned_groups_flat[group]
        groups = enumerate(self.zero.bit16_groups)
        number = next(i for i, members in groups if any(tensor is member for member in members))
        return self.zero.single_partition_of_fp32_groups[number]


class Place:
    """One weight, for ``take_weights``."""

    def __init__(self, partitions: Partitions, tensor: Tensor) -> None:
        self.partitions, self.tensor = partitions, tensor
        self.shape = shape_of(tensor)

    def store(self, new: Tensor, mix: float = 1.0) -> None:
        self.partitions.store(self.tensor, new, mix)


def _flat(found: Iterable[Any]) -> list[Any]:
    """Tensors, and those of lists of tensors."""
    return [one for some in found for one in (some if isinstance(some, list | tuple) else [some])]


def shape_of(tensor: Tensor) -> torch.Size:
    """Of the whole weight."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


@contextlib.contextmanager
def gathered(tensors: Iterable[Tensor], changed: bool = False) -> Iterator[None]:
    """Within it these weights are whole; what the first rank changes of them stays.

    Args:
        changed: they are written to, with the same values on every rank.
    """
    spread = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    if not spread:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(spread, modifier_rank=0 if changed else None):
        yield


def bytes_of(tensor: Tensor) -> int:
    """Of the whole weight."""
    return shape_of(tensor).numel() * tensor.element_size()


def release(zero: Any, module: nn.Module) -> None:
    """Give back the memory of stage 3, of an engine that DeepSpeed has destroyed: its own hooks and the parameters it
    changed go on holding each other."""
    for parameter in module.parameters():
        parameter.grad = None
        parameter.data = parameter.data.new_empty(0)
        if hasattr(parameter, "ds_tensor"):
            parameter.ds_tensor.data = parameter.ds_tensor.data.new_empty(0)
    for wrapped in (getattr(zero.optimizer, "optimizer", None), zero.optimizer):
        if wrapped is not None:
            wrapped.__dict__.clear()
    zero.optimizer = None
