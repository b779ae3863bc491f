"""Units of a module: the submodules that are sharded, recomputed or compiled as one."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine_core.errors import near
from engine_plugin_torch.attention import is_packed, packed

log = logging.getLogger("engine")

_PLAIN: set[CodeType] = set()  # code of functions that could not be compiled, see `compiled_where_possible`
VARIANTS = 64  # most graphs of one function: roles, with and without gradient, kinds of layers


def decoder_layers(module: nn.Module) -> list[str]:
    """Return the names of the members of the longest ``ModuleList``, which are the default units."""
    lists = [(name, child) for name, child in module.named_modules() if isinstance(child, nn.ModuleList)]
    if not lists:
        return []
    name, layers = max(lists, key=lambda pair: len(pair[1]))
    return [f"{name}.{index}" for index in range(len(layers))]


def checkpoint_units(
    module: nn.Module, units: Sequence[str], wanted: Callable[[], bool] = lambda: True
) -> None:
    """Make each unit recompute its activations in the backward pass. Parameter names stay the same.

    Compile the units first, so that the compiled forward is what runs again.

    Args:
        module: the model; changed in place.
        units: names of the submodules.
        wanted: called in each forward pass; if it returns False, activations are kept.
    """
    for name in units:
        unit = module.get_submodule(name)
        unit.forward = functools.partial(_recomputed, wanted, unit.forward)


def _recomputed(wanted: Callable[[], bool], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not wanted():
        return forward(*args, **kwargs)
    return checkpoint(
        forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=as_before, **kwargs
    )


def as_before() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for a forward pass and its recomputation, which restores ``packed`` in the backward pass."""
    return contextlib.nullcontext(), packed() if is_packed() else contextlib.nullcontext()


def compile_units(module: nn.Module, units: Sequence[str]) -> None:
    """Compile each unit for packed forward passes. Parameter names stay the same."""
    for name in units:
        unit = module.get_submodule(name)
        unit.forward = CompiledForward(unit.forward, name)


class CompiledForward:
    """A function that is compiled while sequences are packed, for any number of tokens.

    A sampler that uses the same module runs the function without compilation, because it would need a graph for
    each length of its cache. A function that cannot be compiled runs without from then on, and the log says so.

    Args:
        plain: the function.
        name: name of the unit, for the log.
    """

    def __init__(self, plain: Callable[..., Any], name: str) -> None:
        self.plain, self.name = plain, name
        self.compiled: Callable[..., Any] | None = compiled(plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.compiled is None or not is_packed():
            return self.plain(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and torch.is_grad_enabled() and not first.requires_grad:
            # behind frozen embeddings; a graph for the first layer alone takes as long to compile as that of all others
            args = (first.detach().requires_grad_(first.is_floating_point()), *args[1:])
        try:
            return self.compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            _say_that_it_runs_plain(self.name, error)
            self.compiled = None
            return self.plain(*args, **kwargs)


def compiled_where_possible(
    function: Callable[..., Any],
    name: str,
    around: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Return ``around(function)`` compiled, with a fallback to ``around(function)`` after a failure.

    For functions that are created for each use. torch keeps graphs by a function's code, so failures are remembered by
    code too.

    Args:
        function: a function from a ``def``.
        name: name for the log.
        around: a wrapper such as ``checkpoint``; the fallback uses a fresh one without the state of the failed call.
    """
    run, plain, code = around(compiled(function)), around(function), function.__code__

    def call(*args: Any) -> Any:
        """Call the compiled function, or the plain one once compilation has failed."""
        if code in _PLAIN:
            return plain(*args)
        try:
            return run(*args)
        except torch._dynamo.exc.TorchDynamoException as error:
            _say_that_it_runs_plain(name, error)
            _PLAIN.add(code)
            return plain(*args)

    return call


def _say_that_it_runs_plain(name: str, error: Exception) -> None:
    log.warning(
        "%s cannot be compiled and runs as it is, which is slower. compile = false says so at once. (%s: %s)",
        name,
        type(error).__name__,
        str(error).strip().partition("\n")[0],
    )


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` wrapped in ``torch.compile`` for inputs of any length; the first call compiles it."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    return torch.compile(function, dynamic=True)


def units_problem(units: Any, module: nn.Module) -> str:
    """Return what is wrong with a result of ``engine_wrap_policy``; "" if nothing is."""
    if not isinstance(units, (list, tuple)) or not all(isinstance(name, str) for name in units):
        return f"returned {units!r:.200}; expected a list of names of submodules, or None for the decoder layers."
    known = {name for name, _ in module.named_modules() if name}
    for name in units:
        if name not in known:
            return f"named '{name}', which is no submodule of {type(module).__name__}." + near(name, known)
    for name in units:
        outer = next((other for other in units if name.startswith(f"{other}.")), None)
        if outer is not None:
            return f"named '{name}', which lies inside '{outer}', named too. Name one of the two."
    repeated = next((name for name in units if units.count(name) > 1), None)
    return "" if repeated is None else f"named '{repeated}' twice. Name each submodule once."
