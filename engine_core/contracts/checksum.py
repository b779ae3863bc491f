"""The checksum of an update of weights, which sender and receivers compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from engine_core.contracts.weight_names import some_values

IN_CHECKSUM = 64  # values of each tensor, in addition to a sum
WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a value


class Checksum:
    """Of names, shapes, and values where they lie: a sum over each tensor and some of its values; all bytes of one of integers.

    A hash of every byte would bring all weights to the host, which takes a hundred times as long as the
    update itself. Two orders of the same values within one tensor are told apart by the samples alone.

    On a CPU the sum is of the values' bits, as whole numbers: it does not depend on how many threads share the work, so
    that unlike hosts agree. On an accelerator it is the L1 norm, one kernel for many tensors.
    """

    def __init__(self) -> None:
        self._words = hashlib.blake2b(digest_size=16)
        self._values: list[Tensor] = []

    def of(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass weights on, each once it was added."""
        for entry in stream:
            self.add([entry])
            yield entry

    def add(self, bucket: list[tuple[str, Tensor]]) -> None:
        """Tensors of one device."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for name, tensor in bucket:
            self._words.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
            if tensor.is_floating_point():
                by_type.setdefault(tensor.dtype, []).append(tensor.detach())
            else:  # a config, a table: small
                self._words.update(_bits(tensor.cpu(), torch.uint8).numpy().tobytes())
        for dtype, tensors in by_type.items():
            if tensors[0].is_cpu:
                whole = WHOLE[dtype.itemsize]
                sums = [int(_bits(tensor, whole).sum(dtype=torch.int64)) for tensor in tensors]
                self._words.update(str(sums).encode())
            else:
                self._values.append(_norms(tensors))
            self._values.append(torch.cat([some_values(tensor, IN_CHECKSUM) for tensor in tensors]).float())

    def result(self) -> str:
        """Hexadecimal; the device is waited for once, here."""
        if self._values:
            values = torch.cat([v.to(self._values[0].device) for v in self._values]).cpu()
            self._words.update(values.numpy().tobytes())
        return self._words.hexdigest()


def _norms(tensors: list[Tensor]) -> Tensor:
    """[len(tensors)] float32: the L1 norm of each; of one type, which a norm may not be narrower than."""
    wide = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(tensors, 1, dtype=wide)).float()


def _bits(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """[n] of whole numbers: what lies in it."""
    return tensor.detach().contiguous().reshape(-1).view(dtype)
