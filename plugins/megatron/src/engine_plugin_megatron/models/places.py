"""Where the weights of a Hugging Face folder lie in the parameters of megatron-core, as slices.

Megatron joins what transformers keeps apart, and cuts the result over the ranks of tensor parallelism::

    linear_qkv   [q of group 0 | k | v | q of group 1 | k | v ...]   each rank has some groups
    linear_fc1   [gate | up]                                          each rank has a part of both
    linear_proj, linear_fc2                                           cut along their columns
    embedding, output_layer                                           rows of padding behind the vocabulary

Every one of these is a list of slices, so that one description serves to load, to gather and to write
parts of whole tensors (``engine_plugin_torch.shards``), and values are copied, never computed with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Source:
    """Rows of one tensor of a Hugging Face state dict."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Piece:
    """A part of a Hugging Face tensor, and where it lies in a rank's parameter."""

    name: str
    shape: tuple[int, ...]  # of the whole Hugging Face tensor
    at: Slices  # in it
    here: Slices  # in the parameter


@dataclass(frozen=True)
class Joined:
    """A whole parameter of megatron-core and the tensors that it is made of.

    Args:
        name: below its layer, or below the model for what is of no layer.
        sections: rows one after another; each section is cut over the ranks by itself.
        split: the dimension that tensor parallelism cuts; None: every rank has all of it.
        padding: rows of zeros at the end of the (only) section.
        expert: its number, for a weight of one expert.
    """

    name: str
    sections: tuple[tuple[Source, ...], ...]
    split: int | None = 0
    padding: int = 0
    expert: int | None = None

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Shape of a rank's part."""
        rows = sum(source.rows for section in self.sections for source in section) + self.padding
        rest = list(self.sections[0][0].shape[1:])
        if self.split == 1:
            rest[0] //= size
        return (rows // size if self.split == 0 else rows, *rest)

    def pieces(self, size: int, rank: int) -> tuple[Piece, ...]:
        """What one of ``size`` tensor-parallel ranks holds, in the order of its rows."""
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
        """All dimensions behind the rows: in the Hugging Face tensor, in the parameter."""
        whole = tuple(slice(0, n) for n in shape[1:])
        if self.split != 1:
            return whole, whole
        width = shape[1] // size
        return (slice(rank * width, (rank + 1) * width), *whole[1:]), (slice(0, width), *whole[1:])


def whole_source(name: str, shape: tuple[int, ...]) -> tuple[tuple[Source, ...], ...]:
    """The only section of a parameter that is one tensor as it is."""
    return ((Source(name, shape, 0, shape[0]),),)


def attention_rows(
    names: tuple[str, str, str], heads: int, groups: int, width: int, columns: tuple[int, ...]
) -> tuple[tuple[Source, ...], ...]:
    """Queries of a group, its key, its value; then the next group.

    Args:
        names: of the query, key and value tensors.
        heads: of queries.
        groups: heads of keys.
        width: rows of one head.
        columns: what is behind the rows of each; none for a bias.
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
    """By Hugging Face name: the one box that the pieces of a rank's parameter fill, and these pieces."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.name, []).append(piece)
    told = {}
    for name, parts in found.items():
        box = tuple(
            slice(min(s.start for s in along), max(s.stop for s in along))
            for along in zip(*(part.at for part in parts), strict=True)
        )
        assert volume(box) == sum(volume(part.at) for part in parts), f"{name} is no box: {parts}"
        told[name] = (box, parts)
    return told


def within(at: Slices, box: Slices) -> Slices:
    """A slice of a tensor, seen from a box that holds it."""
    return tuple(slice(s.start - b.start, s.stop - b.start) for s, b in zip(at, box, strict=True))


def volume(slices: Slices) -> int:
    """Values in a box."""
    return math.prod(s.stop - s.start for s in slices)
