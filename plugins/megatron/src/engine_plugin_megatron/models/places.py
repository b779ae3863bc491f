"""The map from Hugging Face weights to slices of megatron-core's parameters.

Megatron concatenates weights that are separate in transformers, and cuts the result over tensor-parallel ranks::

    linear_qkv   [q of group 0 | k | v | q of group 1 | k | v ...]   each rank has some groups
    linear_fc1   [gate | up]                                          each rank has a part of both
    linear_proj, linear_fc2                                           cut along their columns
    embedding, output_layer                                           rows of padding behind the vocabulary

Each parameter is described by a list of slices. The same description is used to load weights, to gather them and to
write parts of whole tensors (``engine_plugin_torch.shards``). Values are only copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Source:
    """A range of rows of one tensor of a Hugging Face state dict."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.stop - self.start


@dataclass(frozen=True)
class Piece:
    """A part of a Hugging Face tensor, and its position in a rank's parameter."""

    name: str
    shape: tuple[int, ...]  # of the whole Hugging Face tensor
    at: Slices  # position in the Hugging Face tensor
    here: Slices  # position in the parameter


@dataclass(frozen=True)
class Joined:
    """A whole parameter of megatron-core and the tensors that it is made of.

    Args:
        name: its name within its layer, or within the model for a parameter outside the layers.
        sections: consecutive ranges of rows; each section is cut over the ranks separately.
        split: the dimension that tensor parallelism cuts; None where every rank has the whole parameter.
        padding: rows of zeros at the end of the (only) section.
        expert: the expert's number, for a weight of one expert.
    """

    name: str
    sections: tuple[tuple[Source, ...], ...]
    split: int | None = 0
    padding: int = 0
    expert: int | None = None

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of a rank's part."""
        rows = sum(source.rows for section in self.sections for source in section) + self.padding
        rest = list(self.sections[0][0].shape[1:])
        if self.split == 1:
            rest[0] //= size
        return (rows // size if self.split == 0 else rows, *rest)

    def pieces(self, size: int, rank: int) -> tuple[Piece, ...]:
        """Return the pieces that one of ``size`` tensor-parallel ranks holds, in the order of its rows."""
        return tuple(self._pieces(size, rank))

    def _pieces(self, size: int, rank: int) -> Iterator[Piece]:
        base = 0  # row of the rank's parameter where the section begins
        for section in self.sections:
            rows = sum(source.rows for source in section) + self.padding
            width = rows // size if self.split == 0 else rows
            low, row = (rank * width if self.split == 0 else 0), 0  # of the whole section
            for source in section:
                first, last = max(low, row), min(low + width, row + source.rows)
                if first < last:
                    origin = source.start + first - row
                    at, here = (
                        slice(origin, origin + last - first),
                        slice(base + first - low, base + last - low),
                    )
                    columns, own = self._columns(source.shape, size, rank)
                    yield Piece(source.name, source.shape, (at, *columns), (here, *own))
                row += source.rows
            base += width

    def _columns(self, shape: tuple[int, ...], size: int, rank: int) -> tuple[Slices, Slices]:
        """Return the slices of all dimensions after the rows: in the Hugging Face tensor, and in the parameter."""
        whole = tuple(slice(0, n) for n in shape[1:])
        if self.split != 1:
            return whole, whole
        width = shape[1] // size
        return (slice(rank * width, (rank + 1) * width), *whole[1:]), (slice(0, width), *whole[1:])


def whole_source(name: str, shape: tuple[int, ...]) -> tuple[tuple[Source, ...], ...]:
    """Return the sections of a parameter that is exactly one Hugging Face tensor."""
    return ((Source(name, shape, 0, shape[0]),),)


def attention_rows(
    names: tuple[str, str, str], heads: int, groups: int, width: int, columns: tuple[int, ...]
) -> tuple[tuple[Source, ...], ...]:
    """Return the rows of ``linear_qkv``: a group's queries, its key, its value; then the next group's.

    Args:
        names: names of the query, key and value tensors.
        heads: number of query heads.
        groups: number of key heads.
        width: rows of one head.
        columns: the tensors' dimensions after the rows; empty for a bias.
    """
    query, key, value = names
    of_group = heads // groups * width
    rows = []
    for group in range(groups):
        rows.append(Source(query, (heads * width, *columns), group * of_group, (group + 1) * of_group))
        rows += [
            Source(name, (groups * width, *columns), group * width, (group + 1) * width)
            for name in (key, value)
        ]
    return (tuple(rows),)


def boxes(pieces: tuple[Piece, ...]) -> Mapping[str, tuple[Slices, list[Piece]]]:
    """Return by Hugging Face name a parameter's pieces and the box (one range per dimension) that they fill."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.name, []).append(piece)
    filled = {}
    for name, parts in found.items():
        box = tuple(
            slice(min(s.start for s in along), max(s.stop for s in along))
            for along in zip(*(part.at for part in parts), strict=True)
        )
        assert volume(box) == sum(volume(part.at) for part in parts), f"{name} is no box: {parts}"
        filled[name] = (box, parts)
    return filled


def within(at: Slices, box: Slices) -> Slices:
    """Return slices of a tensor relative to the start of a box that contains them."""
    return tuple(slice(s.start - b.start, s.stop - b.start) for s, b in zip(at, box, strict=True))


def volume(slices: Slices) -> int:
    """Return the number of values in a box."""
    return math.prod(s.stop - s.start for s in slices)
