"""Layouts: the number of ranks along each axis, and the check that they fit the ranks of a run (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_core.errors import ConfigError
from engine_plugin_torch.divisors import divisors, nearest_fit

if TYPE_CHECKING:
    from engine_plugin_megatron.options import MegatronOptions


@dataclass(frozen=True)
class MeshLayout:
    """The number of ranks along each axis.

    Ranks are numbered as in megatron-core, from the fastest axis to the slowest: ``tp``, ``cp``, ``dp`` (with ``ep``
    inside it), ``pp``.
    """

    tp: int = 1  # ranks that share each layer's heads and wide dimension
    pp: int = 1  # stages of consecutive layers
    vp: int = 1  # chunks of layers per stage
    ep: int = 1  # ranks with different data that share a layer's experts
    cp: int = 1  # ranks that share the tokens of a sequence
    dp: int = 1  # copies of the model, with different sequences

    @property
    def size(self) -> int:
        """The number of all ranks; ``ep`` is a part of ``dp`` times ``cp``."""
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        axes = {"tp": self.tp, "pp": self.pp, "virtual pp": self.vp, "ep": self.ep, "cp": self.cp}
        sizes = [f"{name} {count}" for name, count in axes.items() if count > 1]
        return ", ".join([*sizes, f"dp {self.dp}"])


def layout_of(options: MegatronOptions, size: int, role: str) -> MeshLayout:
    """Return the layout of an option table on ``size`` ranks.

    Raises:
        ConfigError: the ranks cannot be divided so.
    """
    table = f"{role}.megatron"
    together = options.tp * options.pp * options.cp
    if size % together:
        keys = ", ".join(f"{name} {getattr(options, name)}" for name in ("tp", "pp", "cp"))
        raise ConfigError(
            f"[{table}] {keys} make copies of the model of {together} ranks each, which do not divide the {size} ranks of "
            f"this run. {_nearest_layout(options, size)} Or start another number of ranks."
        )
    data = size // together
    others = data * options.cp
    if others % options.ep:
        raise ConfigError(
            f"{table}.ep is {options.ep}, which does not divide the {others} ranks with different data ({size} ranks, "
            f"{size // others} to a copy of the model). {nearest_fit(options.ep, divisors(others))} Or start another number of ranks."
        )
    return MeshLayout(options.tp, options.pp, options.virtual_pp, options.ep, options.cp, data)


def _nearest_layout(options: MegatronOptions, size: int) -> str:
    """Return a sentence that names the nearest tp and pp that divide the ranks."""
    fits = [(tp, pp) for tp in divisors(size) for pp in divisors(size // tp)]

    def distance(pair: tuple[int, int]) -> tuple[int, int, int]:
        """Return how far a (tp, pp) is from the requested one, as a sort key."""
        tp, pp = pair
        return abs(tp - options.tp) + abs(pp - options.pp), abs(tp - options.tp), tp

    tp, pp = min(fits, key=distance)
    return f"The nearest that do: tp = {tp}, pp = {pp}."
