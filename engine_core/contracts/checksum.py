"""The checksum of an update of weights, which sender and receivers compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from engine_core.contracts.weight_names import some_values

IN_CHECKSUM = 64  # values sampled from each tensor, in addition to a sum
WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per value


class Checksum:
    """A checksum of names, shapes and values of weights, computed on the weights' device.

    Of a floating-point tensor it covers a sum over all values and some sampled values, of an integer tensor all bytes.
    A hash of every byte would copy all weights to the host, which takes a hundred times as long as the
    update itself. Only the samples detect a reordering of values within a tensor.

    The sum is an integer sum of the values' bits: it does not depend on the order of additions, so all devices, numbers of
    threads and hosts agree.
    """

    def __init__(self) -> None:
        self._words = hashlib.blake2b(digest_size=16)
        self._values: list[Tensor] = []

    def of(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights unchanged (tensors ``[D1, ..., Dn]``), each after it was added."""
        for entry in stream:
            self.add([entry])
            yield entry

    def add(self, bucket: list[tuple[str, Tensor]]) -> None:
        """Add names and tensors ``[D1, ..., Dn]`` of one device."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for name, tensor in bucket:
            self._words.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
            if tensor.is_floating_point():
                by_type.setdefault(tensor.dtype, []).append(tensor.detach())
            else:  # integers: a config or a table, which is small
                self._words.update(tensor.detach().cpu().numpy().tobytes())
        for dtype, tensors in by_type.items():
            whole = WHOLE[dtype.itemsize]
            sums = torch.stack([_bits(tensor, whole).sum(dtype=torch.int64) for tensor in tensors])
            samples = torch.cat([some_values(tensor, IN_CHECKSUM) for tensor in tensors]).float()
            self._values += [_bits(sums, torch.uint8), _bits(samples, torch.uint8)]

    def result(self) -> str:
        """Return the checksum in hexadecimal; the only call that synchronizes with the device."""
        if self._values:
            values = torch.cat([v.to(self._values[0].device) for v in self._values]).cpu()
            self._words.update(values.numpy().tobytes())
        return self._words.hexdigest()


def _bits(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bits of the tensor's N values as a flat integer tensor [M]; M = N if the item sizes are equal."""
    return tensor.detach().contiguous().reshape(-1).view(dtype)
