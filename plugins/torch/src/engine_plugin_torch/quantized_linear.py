"""Linear layers whose weights are kept in 8 or 4 bits, for weights that are not trained.

The weights are dequantized to the type of the input in the forward pass and again in the backward pass, so no
full-precision copy outlives a layer. A row's result does not depend on the rest of the batch and is the same with and
without gradient, so an unchanged policy has ratio 1.

``int8`` and ``fp8`` (e4m3) have one scale per row. ``nf4`` and ``fp4`` have one scale per 64 weights, which is itself
quantized to 8 bits (QLoRA, https://arxiv.org/abs/2305.14314), by bitsandbytes.

Not supported: quantized activations (their scale, or the set of outliers, may depend on the batch),
embeddings, heads, and the fused experts of a mixture.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine_plugin_torch.sharded import write

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about a kernel that is not called here

BLOCK, OUTER_BLOCK = 64, 256  # weights per scale, and scales per outer scale: 4.127 bits per weight
FOUR_BITS = ("nf4", "fp4")
Pieces = dict[str, Tensor]


class QuantizedLinear(nn.Linear):
    """A linear layer ``x W^T + b`` with a quantized weight.

    Args:
        whole: the unquantized layer, on the final device.
        method: ``int8``, ``fp8``, ``nf4`` or ``fp4``.

    Attributes:
        dtype: type of the unquantized weight, and of ``weight``.
    """

    def __init__(self, whole: nn.Linear, method: str) -> None:
        nn.Module.__init__(self)  # the weight is no parameter here
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.method, self.dtype = method, whole.weight.dtype
        self.bias = whole.bias
        for name, piece in pack(whole.weight.detach(), method).items():
            self.register_buffer(name, piece)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Dequantized weight ``[O, I]`` in its original type, computed at each access."""
        return self.dequantized(self.dtype)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight ``[O, I]`` in ``dtype``."""
        return unpack(dict(self.named_buffers(recurse=False)), self.method, dtype, self.shape)

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight, [out, in]."""
        return torch.Size([self.out_features, self.in_features])

    @torch.no_grad()
    def store(self, weight: Tensor, mix: float = 1.0) -> None:
        """Replace the weight by ``(1 - mix) * own + mix * weight``, quantized the same way; ``weight: [O, I]``."""
        own = self.weight
        write(own, weight, mix)
        for name, piece in pack(own, self.method).items():
            getattr(self, name).copy_(piece)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer, ``[..., I]`` -> ``[..., O]``, in the type of ``x`` or of autocast."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        product: Tensor = _Product.apply(x.to(dtype), self)
        return product if bias is None else product + bias

    def extra_repr(self) -> str:
        """Add the method to the module's representation."""
        return f"{super().extra_repr()}, method={self.method}"


class _Product(torch.autograd.Function):
    """The product ``x W^T``, and ``grad W`` in the backward pass; neither keeps the dequantized weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        """Compute ``x W^T``: ``[..., I]`` -> ``[..., O]``."""
        ctx.layer = layer
        return linear(x, layer.dequantized(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Compute ``grad W``: ``[..., O]`` -> ``[..., I]``."""
        return grad @ ctx.layer.dequantized(grad.dtype), None


def pack(weight: Tensor, method: str) -> Pieces:
    """Quantize a weight ``[O, I]`` to packed tensors and their scales, by name."""
    if method in FOUR_BITS:
        from bitsandbytes.functional import quantize_4bit

        # Flat, because the library's CPU code gives other values for a matrix with rows shorter than a block.
        packed, state = quantize_4bit(
            weight.flatten(), blocksize=BLOCK, compress_statistics=True, quant_type=method
        )
        outer = state.state2
        scales = {"scales": state.absmax, "offset": state.offset, "outer_scales": outer.absmax}
        return {
            "packed": packed,
            **scales,
            "codes": state.code.clone(),  # the library shares one tensor between all layers
            "outer_codes": outer.code.clone(),
        }
    whole = weight.float()
    largest = 127.0 if method == "int8" else torch.finfo(torch.float8_e4m3fn).max
    # divide by a tensor: by a number, CUDA would multiply by the rounded 1 / largest and differ from the CPU
    scale = whole.abs().amax(1, keepdim=True) / whole.new_tensor(largest)
    scale = torch.where(scale > 0, scale, 1.0)
    if method == "int8":
        return {"packed": (whole / scale).round().to(torch.int8), "scales": scale}
    return {"packed": (whole / scale).clamp(-largest, largest).to(torch.float8_e4m3fn), "scales": scale}


def unpack(pieces: Pieces, method: str, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Dequantize the tensors of ``pack`` to a weight ``[O, I]``."""
    if method not in FOUR_BITS:
        return (pieces["packed"].float() * pieces["scales"]).to(dtype)
    from bitsandbytes.functional import QuantState, dequantize_4bit

    outer = QuantState(
        absmax=pieces["outer_scales"], code=pieces["outer_codes"], blocksize=OUTER_BLOCK, dtype=torch.float32
    )
    state = QuantState(
        absmax=pieces["scales"],
        shape=torch.Size([shape.numel()]),
        code=pieces["codes"],
        blocksize=BLOCK,
        quant_type=method,
        dtype=torch.float32 if dtype == torch.float64 else dtype,  # the library has no float64
        offset=pieces["offset"],
        state2=outer,
    )
    return dequantize_4bit(pieces["packed"], state).to(dtype).view(shape)
