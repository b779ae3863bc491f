"""The check that a model fits a layout, made before anything is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_plugin_torch.divisors import divisors, nearest_fit

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from engine_plugin_megatron.layout import MeshLayout


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
    wides = sorted({wide, hf.moe_intermediate_size} if experts else {wide})
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
