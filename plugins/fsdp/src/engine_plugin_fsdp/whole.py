"""Modules that stay whole on every rank (`exclude`) while the rest of the model is sharded.

Their parameters are ``DTensor`` with a copy on each rank, so the optimizer, the norm, checkpoints and weight
streams treat them like all others. While a unit computes, its modules hold the plain copies, in the type in which FSDP
would have gathered them. Until ``sum_gradients``, a rank's gradient covers only its own sequences.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from engine_core.errors import ConfigError, did_you_mean, nearest
from engine_plugin_torch.sharded import here

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Place = tuple[nn.Module, str]
"""A module and the name of a parameter that it holds itself."""


def excluded(module: nn.Module, patterns: Sequence[str], role: str) -> list[str]:
    """Return the names of the modules that match `exclude`, in the model's order.

    Args:
        module: the model.
        patterns: classes, or names with ``*`` for any text.
        role: the role's name, for messages.

    Raises:
        ConfigError: a pattern fits no module with parameters.
    """
    found: list[str] = []
    holders = [
        (n, part) for n, part in module.named_modules() if n and next(part.parameters(), None) is not None
    ]
    for pattern in patterns:
        fits = [n for n, part in holders if pattern == type(part).__name__ or fnmatch.fnmatchcase(n, pattern)]
        if not fits:
            classes = sorted({type(part).__name__ for _, part in holders})
            match = nearest(pattern, [n for n, _ in holders])
            hint = f" Did you mean '{match}'?" if match else did_you_mean(pattern, classes)
            raise ConfigError(
                f"{role}.fsdp.exclude: '{pattern}' is neither the class nor (with * for any text) the name of a module "
                f"of {type(module).__name__} that has weights.{hint}"
            )
        found += fits
    return [n for n, _ in holders if n in set(found)]


class Whole:
    """The parameters of some modules, as copies on each rank.

    Args:
        module: the model before it is sharded; the parameters become ``DTensor`` in place.
        names: names of the modules that stay whole.
        mesh: the mesh that the rest is sharded over.
        device: device of the copies; copies on ``meta`` stay there.
        compute: type of the forward pass; None if the weights are not cast.

    Attributes:
        places: modules and names of the parameters, by the name of the module that holds them.
        parameters: the parameters that ``fully_shard`` must ignore.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        mesh: DeviceMesh,
        device: torch.device,
        compute: torch.dtype | None,
    ) -> None:
        self.mesh, self.compute = mesh, compute
        chosen = {id(p) for name in names for p in module.get_submodule(name).parameters()}
        made: dict[int, nn.Parameter] = {}
        self.places: dict[str, list[Place]] = {}  # by the module's name
        for name, owner in module.named_modules():
            for leaf, parameter in list(owner._parameters.items()):
                if parameter is None or id(parameter) not in chosen:
                    continue
                if id(parameter) not in made:
                    made[id(parameter)] = self._copied(parameter, device)
                owner._parameters[leaf] = made[id(parameter)]
                self.places.setdefault(name, []).append((owner, leaf))
        self.parameters = set(made.values())

    def _copied(self, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        local = parameter.detach()
        local = local if local.device.type == "meta" else local.to(device)
        every = [Replicate()] * self.mesh.ndim
        made = DTensor.from_local(local, self.mesh, every, run_check=False)
        return nn.Parameter(made, requires_grad=parameter.requires_grad)

    def compute_locally(self, module: nn.Module, units: Sequence[str]) -> None:
        """Make each unit compute with the plain copies. Call it before ``recompute``, which then uses them too.

        A unit may lie in another one, as a part that is recomputed separately.
        """
        for unit in units:
            if places := self._of(unit):
                part = module.get_submodule(unit)
                run = functools.partial(self._run, part.forward, places)
                part.forward = functools.update_wrapper(run, part.forward)  # its signature is read

    def outside(self, units: Sequence[str]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the modules that are in no unit hold the plain copies."""
        inside = {name for unit in units for name in self._names(unit)}
        return self._local(
            [place for name, held in self.places.items() if name not in inside for place in held]
        )

    def sum_gradients(self, kind: torch.dtype) -> None:
        """Sum the gradients over ranks in place. Collective.

        Args:
            kind: type in which gradients are summed.
        """
        held = [owner._parameters[leaf] for places in self.places.values() for owner, leaf in places]
        parameters = [p for p in dict.fromkeys(held) if p is not None and p.requires_grad]
        if not parameters:
            return
        device = here(parameters[0]).device
        known = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32, device=device)
        self._reduce(known)
        used = [p for p, count in zip(parameters, known.tolist(), strict=True) if count]
        if not used:
            return
        for parameter in used:  # None for an expert that got no token on this rank
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [here(p.grad) for p in used if p.grad is not None]
        flat = torch.cat([grad.flatten().to(kind) for grad in grads])
        self._reduce(flat)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    def _reduce(self, values: Tensor) -> None:
        for dim in range(self.mesh.ndim):
            dist.all_reduce(values, group=self.mesh.get_group(dim))

    def _names(self, unit: str) -> list[str]:
        return [name for name in self.places if name == unit or name.startswith(f"{unit}.")]

    def _of(self, unit: str) -> list[Place]:
        return [place for name in self._names(unit) for place in self.places[name]]

    def _run(self, forward: Callable[..., Any], places: Sequence[Place], *args: Any, **kwargs: Any) -> Any:
        with self._local(places):
            return forward(*args, **kwargs)

    @contextlib.contextmanager
    def _local(self, places: Sequence[Place]) -> Iterator[None]:
        held: list[tuple[nn.Module, str, nn.Parameter | None]] = []
        copies: dict[int, Tensor] = {}
        try:
            for owner, leaf in places:
                parameter: Any = owner._parameters[leaf]
                if not isinstance(parameter, DTensor):  # an outer unit has already put in its copy
                    continue
                if id(parameter) not in copies:
                    copies[id(parameter)] = self._plain(parameter)
                held.append((owner, leaf, parameter))
                owner._parameters[leaf] = copies[id(parameter)]  # type: ignore[assignment]
            yield
        finally:
            for owner, leaf, parameter in held:
                owner._parameters[leaf] = parameter

    def _plain(self, parameter: DTensor) -> Tensor:
        local = parameter.to_local(grad_placements=parameter.placements)
        casts = self.compute is not None and local.is_floating_point()
        return local.to(self.compute) if casts else local
