"""Access to the weights, the optimizer's state and the adapter that ZeRO partitions: one whole tensor at a time.

DeepSpeed concatenates all parameters of a group and cuts the result into one part per rank, so a rank's part does not
have the shape of a tensor. This module reads and writes parameters through DeepSpeed's own functions
(``deepspeed.utils.safe_get_full_...``). All methods are collective.

Of a model with a LoRA adapter only the adapter is trained, so ZeRO's optimizer holds nothing else. At stage 3 the
frozen weights are partitioned too, and gathered one layer at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.contracts.weight_names import BASE, OF_ADAPTER, SAVED, base_name, own_parameters
from engine_core.contracts.weight_sync import buckets
from engine_core.errors import DataError
from engine_plugin_torch.adapter import FACTORS, NAME, Adapter, file_name, merged_weight
from engine_plugin_torch.weights import identity

WEIGHTS = (
    "lp_param_buffer",
    "bit16_groups_flat",
    "fp32_partitioned_groups_flat",
    "single_partition_of_fp32_groups",
)
"""Attributes of DeepSpeed's optimizers that hold weights, and the float32 copies that are stepped."""


class Partitions:
    """The partitioned weights and optimizer state of one role's model.

    Args:
        module: the model, under DeepSpeed or plain.
        optimizer: DeepSpeed's ZeRO optimizer, which wraps ``plain``; None where DeepSpeed partitions no optimizer.
        plain: the optimizer of torch that the engine built.
    """

    def __init__(self, module: nn.Module, optimizer: Any, plain: torch.optim.Optimizer | None) -> None:
        self.own = own_parameters(module)
        self.zero, self.plain = optimizer, plain
        self.module = module

    @property
    def spread(self) -> bool:
        """Whether the weights themselves are partitioned (stage 3)."""
        return any(hasattr(p, "ds_id") for p in self.own.values())

    # -- weights ------------------------------------------------------------

    def weights(self, limit: int, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights of the forward pass, in their compute type, on every rank.

        Args:
            limit: bytes of whole tensors gathered at one time; a larger tensor is gathered alone.
            only: names of the weights; all by default.

        Yields:
            Each weight's name and tensor, in the shape of the unpartitioned weight (``[OUT, IN]`` of a linear layer).
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
        """Yield the whole weights that the optimizer updates: float32 where DeepSpeed keeps such a copy.

        Arguments and shapes (``[OUT, IN]`` of a linear layer) are those of ``weights``.
        """
        return self.weights(limit, only) if self.zero is None else self._mixed(only)

    def _mixed(self, only: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        for name, tensor in self._chosen(only):
            if self._is_kept(tensor):
                yield name, safe_get_full_fp32_param(tensor).detach()
            else:
                yield name, _copied(tensor)

    def _chosen(self, only: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in self.own.items() if only is None or name in only)

    def places(self) -> dict[str, Place]:
        """Return by name the places into which ``take_weights`` stores whole weights."""
        return {name: Place(self, tensor) for name, tensor in self.own.items()}

    @torch.no_grad()
    def store(self, tensor: Tensor, new: Tensor, mix: float) -> None:
        """Set ``w <- (1 - mix) * w + mix * new``, in the compute weight and in its float32 copy.

        Args:
            tensor: the parameter, whole or partitioned.
            new: the whole new value, in the unpartitioned shape (``[OUT, IN]`` of a linear layer), on any device.
            mix: share of ``new``; 1 replaces the weight.
        """
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
        """Return for each trained weight the keys of its optimizer tensors: some have its shape, some are scalars."""
        found: dict[str, list[str]] = {}
        if self.plain is not None and any(self.plain.state.values()):
            self._link()
        for name, tensor in self.own.items():
            if self._is_kept(tensor):
                state = self._state(tensor)
                found[name] = sorted(key for key, value in state.items() if isinstance(value, Tensor))
        return found

    def state(self, tensor: Tensor, key: str) -> Tensor:
        """Return the whole optimizer tensor ``key`` of a weight: in the weight's shape (``[OUT, IN]``) or a scalar."""
        from deepspeed.utils import safe_get_full_optimizer_state

        held = self._state(tensor)[key]
        if held.ndim == 0:
            return held.detach()
        found: Tensor = safe_get_full_optimizer_state(tensor, key)
        return found.detach()

    @torch.no_grad()
    def set_state(self, names: Mapping[str, Sequence[str]], read: Callable[[str], Tensor]) -> None:
        """Replace the optimizer's tensors.

        Args:
            names: the keys of the state of each weight.
            read: returns the tensor of ``name/key``: whole (``[OUT, IN]`` of a linear layer), or a scalar.

        Raises:
            DataError: a scalar, such as the step count, differs between weights of one optimizer group.
        """
        from deepspeed.utils import safe_set_full_optimizer_state

        if not names and self.plain is not None:  # saved before the first step
            self.plain.state.clear()
        self._allocate(names, read)
        numbers: dict[tuple[int, str], float] = {}
        for name, keys in names.items():
            tensor = self.own[name]
            state = self._state(tensor)
            for key in keys:
                value = read(f"{name}/{key}")
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
        """Return the optimizer's values that are not tensors, keyed ``name/key``."""
        kept = {name: self._state(tensor) for name, tensor in self.own.items() if self._is_kept(tensor)}
        return {
            f"{name}/{key}": value
            for name, state in kept.items()
            for key, value in state.items()
            if not isinstance(value, Tensor)
        }

    def set_plain_values(self, values: Mapping[str, Any]) -> None:
        """Set the values that ``plain_values`` returned."""
        for path, value in values.items():
            name, _, key = path.rpartition("/")
            self._state(self.own[name])[key] = value

    def move(self, device: torch.device) -> None:
        """Move this rank's parts of the weights (stage 3) to another device; for a role without ZeRO optimizer."""
        for tensor in self.own.values():
            if (part := getattr(tensor, "ds_tensor", None)) is not None:
                part.data = part.data.to(device)

    def memory(self, part: str, device: torch.device) -> list[Tensor]:
        """Return this rank's tensors of one kind on a device.

        Args:
            part: ``weights`` (with their float32 copies), ``gradients`` or ``optimizer``.
            device: only tensors on devices of this type are returned.

        Returns:
            The tensors as DeepSpeed stores them: parameters, and flat ``[N]`` buffers. Scalars are left out.
        """
        if part == "weights":
            own = [*self.module.parameters()]
            found = [*own, *(getattr(p, "ds_tensor", None) for p in own), *self._zeros(*WEIGHTS)]
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
        """Return DeepSpeed's buffers of these attribute names; a stage may lack some of them."""
        return _flat(getattr(self.zero, name, None) for name in names)

    def _allocate(self, names: Mapping[str, Sequence[str]], read: Callable[[str], Tensor]) -> None:
        """Create the optimizer's missing state: before its first step it has none."""
        assert self.plain is not None
        for name, keys in names.items():
            flat = self._flat(self.own[name])
            state = self.plain.state[flat]
            for key in keys:
                if key not in state:
                    single = read(f"{name}/{key}").ndim == 0
                    state[key] = torch.zeros((), dtype=torch.float32) if single else torch.zeros_like(flat)
                    if single and getattr(self.plain, "defaults", {}).get("fused"):
                        state[key] = state[key].to(flat.device)
        if names:
            self._link()

    def _link(self) -> None:
        """Rebuild DeepSpeed's links from parameters to optimizer state (stages 1 and 2).

        DeepSpeed makes the links once, after the first group's step, when other groups have no state yet.
        """
        if hasattr(self.zero, "_hp_optimizer_states_linked"):
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def _state(self, tensor: Tensor) -> dict[str, Any]:
        assert self.plain is not None
        found: dict[str, Any] = self.plain.state[self._flat(tensor)]  # created if missing
        return found

    def _flat(self, tensor: Tensor) -> Any:
        """Return the optimizer's flat tensor that contains this rank's part of the weight."""
        if hasattr(tensor, "ds_id"):
            group = self.zero.grad_position[self.zero.get_param_id(tensor)][0]
            return self.zero.fp32_partitioned_groups_flat[group]
        groups = enumerate(self.zero.bit16_groups)
        number = next(i for i, members in groups if any(tensor is member for member in members))
        return self.zero.single_partition_of_fp32_groups[number]


class Place:
    """The place of one weight, into which ``take_weights`` stores new values."""

    def __init__(self, partitions: Partitions, tensor: Tensor) -> None:
        self.partitions, self.tensor = partitions, tensor
        self.shape = shape_of(tensor)

    def store(self, new: Tensor, mix: float = 1.0) -> None:
        """Set ``w <- (1 - mix) * w + mix * new``; ``new`` has the whole weight's shape (``[OUT, IN]``)."""
        self.partitions.store(self.tensor, new, mix)


def _flat(found: Iterable[Any]) -> list[Any]:
    """Return tensors and lists of tensors as one flat list."""
    return [one for some in found for one in (some if isinstance(some, list | tuple) else [some])]


def shape_of(tensor: Tensor) -> torch.Size:
    """Return the shape of the whole weight, e.g. ``[OUT, IN]``, of a parameter that may be partitioned."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


@contextlib.contextmanager
def gathered(tensors: Iterable[Tensor], changed: bool = False) -> Iterator[None]:
    """Gather weights for the duration of the context.

    Args:
        tensors: parameters; those that are not partitioned are left as they are. Inside, each has its whole shape
            (``[OUT, IN]`` of a linear layer).
        changed: the caller writes to the weights, with the same values on every rank. DeepSpeed keeps rank 0's.
    """
    spread = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    if not spread:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(spread, modifier_rank=0 if changed else None):
        yield


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of the whole weight (e.g. ``[OUT, IN]``), of a parameter that may be partitioned."""
    return shape_of(tensor).numel() * tensor.element_size()


def release(zero: Any, module: nn.Module) -> None:
    """Free the memory that a destroyed stage 3 engine still holds.

    DeepSpeed's hooks and the parameters that it changed keep references to each other.
    """
    for parameter in module.parameters():
        parameter.grad = None
        parameter.data = parameter.data.new_empty(0)
        if hasattr(parameter, "ds_tensor"):
            parameter.ds_tensor.data = parameter.ds_tensor.data.new_empty(0)
    for wrapped in (getattr(zero.optimizer, "optimizer", None), zero.optimizer):
        if wrapped is not None:
            wrapped.__dict__.clear()
    zero.optimizer = None


TRAINED_WHOLE, LENGTHS = f".modules_to_save.{NAME}.", ".lora_magnitude_vector."


class AdapterInParts(Adapter):
    """An ``Adapter`` over ``Partitions``.

    Args:
        adapter: the result of ``lora.attach``; its base's identity was computed while the model was whole.
        partitions: those of the same module.
        limit: bytes of tensors gathered at one time.
    """

    def __init__(self, adapter: Adapter, partitions: Partitions, limit: int) -> None:
        super().__init__(adapter.module, adapter.config, adapter.base_identity())
        self.partitions, self.limit = partitions, limit

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapter's whole tensors (factors: ``[R, IN]`` and ``[OUT, R]``) in float32, on every rank."""
        names = [name for name in self.partitions.own if OF_ADAPTER.search(name)]
        return {file_name(name): tensor for name, tensor in self.partitions.exact_weights(self.limit, names)}

    def places(self) -> dict[str, Place]:
        """Return the places of the adapter's tensors, by the names of an adapter file."""
        own = self.partitions.places()
        return {file_name(name): place for name, place in own.items() if OF_ADAPTER.search(name)}

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged weights (``[OUT, IN]``) in their compute type; one layer is gathered at a time."""
        for name, tensor in self.partitions.own.items():
            if not OF_ADAPTER.search(name):
                yield base_name(name), self._merged(name, tensor)

    def _merged(self, name: str, tensor: Tensor) -> Tensor:
        owner, _, leaf = name.rpartition(BASE)
        if leaf == "weight" and owner:
            layer = self.module.get_submodule(owner)
            with gathered(layer.parameters()):
                return merged_weight(layer)
        if SAVED in name:
            return _copied(self.partitions.own[name.replace(SAVED, TRAINED_WHOLE)]).to(tensor.dtype)
        return _copied(tensor)

    def base_identity(self) -> str:
        """Return the hash of the base's weights, gathered one at a time; the hash is cached."""
        if self._base is None:
            own = self.partitions.own.items()
            base = {base_name(name): tensor for name, tensor in own if not OF_ADAPTER.search(name)}
            self._base = identity(base, _copied)
        return self._base

    def _base_places(self) -> dict[str, Place]:
        own = self.partitions.places()
        return {base_name(name): place for name, place in own.items() if not OF_ADAPTER.search(name)}

    @torch.no_grad()
    def _begin_again(self) -> None:
        self._base = None
        for name, place in self.partitions.places().items():
            if not OF_ADAPTER.search(name):
                continue
            if any(f".{factor}" in name for factor in FACTORS):
                place.store(torch.zeros(place.shape))
            elif TRAINED_WHOLE in name:
                place.store(_copied(self.partitions.own[name.replace(TRAINED_WHOLE, SAVED)]))
            elif LENGTHS in name:
                layer = self.module.get_submodule(name.partition(LENGTHS)[0])
                with gathered(layer.parameters()):
                    lengths = merged_weight(layer, lengths=False).norm(dim=1)
                place.store(lengths)


def _copied(tensor: Tensor) -> Tensor:
    """Return a whole copy ``[D0, ...]`` of one weight, in its compute type."""
    with gathered([tensor]):
        return tensor.detach().clone()
