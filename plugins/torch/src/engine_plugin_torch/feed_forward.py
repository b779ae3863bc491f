"""Feed-forward layers computed in chunks of tokens, for sequences whose widest activations do not fit.

A feed-forward of width F keeps about ``4 F`` numbers per token for its backward pass, most of what a layer keeps.
It treats each token independently, so it can run on one chunk of tokens at a time. Each chunk is computed again in the
backward pass (ALST's tiled computation, https://arxiv.org/abs/2506.13996). ALST uses a custom autograd function. Here
each chunk is an activation checkpoint, so adapters and quantized layers need no special code.
The head has ``log_prob_chunk_tokens``.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine_core.errors import ConfigError
from engine_plugin_torch.units import CompiledForward, as_before

log = logging.getLogger("engine")

MIXES = (nn.modules.conv._ConvNd, nn.RNNBase, nn.MultiheadAttention)  # modules that mix tokens


def chunk_feed_forwards(module: nn.Module, chunk: int, key: str, mode: str | None = None) -> list[str]:
    """Make each feed-forward run on at most ``chunk`` tokens at a time. Parameter names stay the same.

    Call it before units are compiled, recomputed or sharded. Outputs and gradients change only by rounding.

    Args:
        module: the model; changed in place.
        chunk: number of tokens; 0 changes nothing.
        key: key of the run file, for messages.
        mode: mode of ``torch.compile``; None: not compiled. The unit around a feed-forward is compiled in two parts,
            before and after it.

    Returns:
        Names of the feed-forwards.

    Raises:
        ConfigError: the model has no feed-forward that is known to treat each token independently.
    """
    if not chunk:
        return []
    names = feed_forwards(module)
    if not names:
        raise ConfigError(
            f"{key}: {type(module).__name__} has no feed-forward that is known to take each token alone (a module "
            "of a class '...MLP' with one input). Leave the key out."
        )
    for name in names:
        part = module.get_submodule(name)
        run = part.forward if mode is None else CompiledForward(part.forward, name, mode)
        part.forward = functools.partial(_in_chunks, run, chunk)
    log.info("%s: %d feed-forwards run at most %d tokens at a time.", key, len(names), chunk)
    return names


def feed_forwards(module: nn.Module) -> list[str]:
    """Return the names of the outermost modules of a class ``...MLP`` with one input that do not mix tokens.

    A mixture of experts is excluded, because its routing depends on all tokens.
    """
    found: list[str] = []
    for name, part in module.named_modules():
        if not type(part).__name__.endswith("MLP") or any(name.startswith(f"{one}.") for one in found):
            continue
        one_input = len(inspect.signature(part.forward).parameters) == 1
        matrices = all(p.ndim <= 2 for p in part.parameters())
        if one_input and matrices and not any(isinstance(inner, MIXES) for inner in part.modules()):
            found.append(name)
    return found


@torch.compiler.disable
def _in_chunks(forward: Callable[[Tensor], Tensor], chunk: int, hidden: Tensor) -> Tensor:
    """Compute ``forward(hidden)`` in chunks for hidden states [..., T, H]."""
    if hidden.shape[-2] <= chunk:
        return forward(hidden)
    pieces = [piece.contiguous() for piece in hidden.split(chunk, dim=-2)]
    if not torch.is_grad_enabled():
        return torch.cat([forward(piece) for piece in pieces], dim=-2)
    again = functools.partial(
        checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=as_before
    )
    return torch.cat([again(piece) for piece in pieces], dim=-2)
