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

from engine_core.contracts.weight_names import near
from engine_plugin_torch.attention import is_packed, packed

log = logging.getLogger("engine")

_PLAIN: set[CodeType] = set()  # of functions that could not be compiled, see `compiled_where_possible`
VARIANTS = 64  # graphs of one function: roles, with and without gradient, kinds of layers


def decoder_layers(module: nn.Module) -> list[str]:
    """Names of the members of the longest ``ModuleList``: the default units."""
    lists = [(name, child) for name, child in module.named_modules() if isinstance(child, nn.ModuleList)]
    if not lists:
        return []
    name, layers = max(lists, key=lambda pair: len(pair[1]))
    return [f"{name}.{index}" for index in range(len(layers))]


def checkpoint_units(
    module: nn.Module, units: Sequence[str], wanted: Callable[[], bool] = lambda: True
) -> None:
    """Recompute each unit in the backward pass. Parameter names stay as they are.

    Units are compiled before, so that the compiled forward is what runs again.

    Args:
        wanted: asked in each forward pass; where it is False, activations are kept.
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
    """Contexts of a forward pass and of its repetition in the backward pass, which runs outside of ``packed``."""
    return contextlib.nullcontext(), packed() if is_packed() else contextlib.nullcontext()


def compile_units(module: nn.Module, units: Sequence[str], mode: str = "default") -> None:
    """Compile each unit for packed forward passes. Parameter names stay as they are."""
    for name in units:
        unit = module.get_submodule(name)
        unit.forward = CompiledForward(unit.forward, name, mode)


class CompiledForward:
    """A function that is compiled while sequences are packed, for any number of tokens.

    A sampler that uses the same module runs the plain one: it would need a graph of its own for each
    length of its cache. What cannot be compiled runs plain from then on, and the log says so.

    Args:
        plain: the function.
        name: of the unit, for the log.
        mode: see ``compiled``.
    """

    def __init__(self, plain: Callable[..., Any], name: str, mode: str = "default") -> None:
        self.plain, self.name = plain, name
        self.compiled: Callable[..., Any] | None = compiled(plain, mode)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.compiled is None or not is_packed():
            return self.plain(*args, **kwargs)
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
    mode: str = "default",
) -> Callable[..., Any]:
    """``around(function)``, compiled, or as it is once that has failed; for a function that is made anew for each use.

    torch keeps graphs by a function's code, and so it is remembered here which ones cannot be compiled.

    Args:
        function: of a ``def``.
        name: for the log.
        around: what it runs in, such as ``checkpoint``, which nothing of a failed try may stay in.
        mode: see ``compiled``.
    """
    run, plain, code = around(compiled(function, mode)), around(function), function.__code__

    def call(*args: Any) -> Any:
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


def compiled(function: Callable[..., Any], mode: str = "default") -> Callable[..., Any]:
    """``function`` by ``torch.compile``, for inputs of any length. Compiled when it is first called.

    Args:
        mode: of ``torch.compile``; one without CUDA graphs, which would need inputs at fixed places.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    return torch.compile(function, dynamic=True, mode=None if mode == "default" else mode)


def units_problem(units: Any, module: nn.Module) -> str:
    """What is wrong with an answer of ``engine_wrap_policy``; "" where nothing is."""
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
