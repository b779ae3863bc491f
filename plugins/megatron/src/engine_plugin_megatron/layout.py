"""Layouts: the number of ranks along each axis, and the checks that they fit the run and the model (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_core.errors import ConfigError
from engine_plugin_torch.divisors import divisors, nearest_fit

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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


def check_layout(hf: PretrainedConfig, layout: MeshLayout, table: str, *, sequence_parallel: bool) -> None:
    """Refuse a layout that does not fit the model; see ``misfits``.

    Args:
        table: name of the option table, for messages.

    Raises:
        ConfigError: has a line for each reason.
    """
    if found := misfits(hf, layout, sequence_parallel=sequence_parallel):
        raise ConfigError([f"[{table}] {problem}" for problem in found])


def misfits(hf: PretrainedConfig, layout: MeshLayout, *, sequence_parallel: bool = False) -> list[str]:
    """Return the reasons why the layout does not fit the model, a line each; empty where it fits.

    Args:
        hf: the model's config.
        layout: the layout of the ranks.
        sequence_parallel: whether ranks share tokens between the layers' matrices.
    """
    found = []
    heads, groups, wide = hf.num_attention_heads, hf.num_key_value_heads, hf.intermediate_size
    experts = getattr(hf, "num_experts", None) or 0
    wides = sorted({wide, getattr(hf, "moe_intermediate_size", wide)} if experts else {wide})
    fits = [
        n for n in divisors(heads) if not (groups % n and n % groups) and not any(each % n for each in wides)
    ]
    if layout.tp not in fits:
        sizes = " and ".join(str(each) for each in wides)
        found.append(
            f"tp is {layout.tp}, which does not divide {heads} heads with {groups} heads of keys and a feed-forward of "
            f"{sizes}. {nearest_fit(layout.tp, fits)}"
        )
    layers = hf.num_hidden_layers
    if layers % layout.pp:
        found.append(
            f"pp is {layout.pp}, which does not divide {layers} layers. {nearest_fit(layout.pp, divisors(layers))}"
        )
    elif layers % (layout.pp * layout.vp):
        fitting = divisors(layers // layout.pp)
        found.append(
            f"virtual_pp is {layout.vp}, which does not divide the {layers // layout.pp} layers of a stage. "
            + nearest_fit(layout.vp, fitting)
        )
    if layout.ep > 1 and not experts:
        found.append(f"ep is {layout.ep}, and '{hf.model_type}' has no experts. Set it to 1.")
    elif experts and experts % layout.ep:
        found.append(
            f"ep is {layout.ep}, which does not divide {experts} experts. {nearest_fit(layout.ep, divisors(experts))}"
        )
    if experts and layout.tp > 1 and not sequence_parallel:
        found.append(
            "tp with experts needs sequence_parallel: ranks would route the same tokens each. Set it to true."
        )
    own = heads // layout.tp
    if layout.tp in fits and own % layout.cp:
        of_each = f", of which tp {layout.tp} leaves {own} to each rank" if layout.tp > 1 else ""
        found.append(
            f"cp is {layout.cp}, which does not divide {heads} heads{of_each}. {nearest_fit(layout.cp, divisors(own))}"
        )
    return found
