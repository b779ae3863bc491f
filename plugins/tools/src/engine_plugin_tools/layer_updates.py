"""The update of one step by layer, compared between two replays of the step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine_core.errors import EnvironmentProblem

LAYER = re.compile(r"(.*?\.\d+)\.")
"""The name of a layer at the start of a weight's name, such as ``model.layers.3``."""


ROUNDING = 1e-3
"""Largest share of a layer's update that the rounding of float32 explains; with bfloat16 a share is about 0.01.

An optimizer such as AdamW turns a gradient near zero into a step of full size, whose sign depends on rounding.
"""


@dataclass(frozen=True, kw_only=True)
class LayerUpdate:
    """The updates of a layer, or of a weight outside the layers.

    Args:
        name: such as ``model.layers.3``.
        size: L2 norm of the update of the first replay.
        other: L2 norm of the update of the second.
        difference: L2 norm of their difference.
    """

    name: str
    size: float
    other: float
    difference: float

    @property
    def share(self) -> float:
        """The difference over the larger of the two updates; 0 if neither moves a weight."""
        return self.difference / max(self.size, self.other) if self.difference else 0.0


def compare_updates(first: Path, second: Path) -> list[LayerUpdate]:
    """Return the updates of two replays by layer, in the model's order.

    Args:
        first: a folder with the exported weights of a replay, in ``before`` and ``after``.
        second: the same of the other replay.

    Raises:
        EnvironmentProblem: the weights are not here, or have other names in the other replay.
    """
    names = [set(_tensors(folder / "before")) for folder in (first, second)]
    if not names[0] or names[0] != names[1]:
        raise EnvironmentProblem(
            "The updates of the two replays cannot be compared: the weights have other names, or were written on another "
            "machine (set TMPDIR to a folder that all machines share)."
        )
    squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for (name, one), (_, other) in zip(_updates(first), _updates(second), strict=True):
        found = LAYER.match(name)
        row = squares[found[1] if found else name]
        for i, values in enumerate((one, other, one - other)):
            row[i] += float(values.square().sum())
    rows = {name: [value**0.5 for value in row] for name, row in squares.items()}
    return [LayerUpdate(name=name, size=a, other=b, difference=d) for name, (a, b, d) in rows.items()]


def _updates(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the change of each weight in float64, by name in the order of ``_position``."""
    before, after = (_tensors(folder / name) for name in ("before", "after"))
    for name in sorted(before, key=_position):
        yield name, _read(after[name], name) - _read(before[name], name)


def _tensors(folder: Path) -> dict[str, Path]:
    """Return the file of each weight of an exported folder."""
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            found |= dict.fromkeys(weights.keys(), file)
    return found


def _read(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, "pt") as weights:
        value: Tensor = weights.get_tensor(name)
    return value.to(torch.float64)


def _position(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a key that sorts embeddings first, then layers by number, then norm and head."""
    rank = 0 if "embed" in name else 1 if LAYER.match(name) else 2
    return (0, rank), *((1, int(part)) if part.isdigit() else (2, part) for part in name.split("."))
