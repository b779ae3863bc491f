"""Model architectures: the base class, and those that come with this plugin.

An ``Architecture`` gives three things for a Hugging Face config: the unsupported settings, the arguments of
megatron-core's ``TransformerConfig``, and the tensors that each parameter is made of. Another decoder of the same
family is a subclass of a few lines.

Not supported: decoders whose layers are not attention and feed-forward with an RMS norm before each (norms after them
as in Gemma, multi-head latent attention, state-space models).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from engine_core.errors import ConfigError, PluginError
from engine_core.plugins.metadata import find
from engine_core.plugins.plugin_set import PluginSet
from engine_plugin_megatron.models.places import Joined, Source, attention_rows, whole_source

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROPE_TYPES = ("default", "linear", "llama3")
ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh")}
HEAD = "score.weight"
"""The value head in a Hugging Face folder (``...ForSequenceClassification``)."""


class Architecture:
    """The architecture of Llama and Mistral: RMS norms, rotary positions, grouped queries, a gated feed-forward, no biases."""

    activation = "silu"  # of the feed-forward: a name of ``ACTIVATIONS``
    qkv_bias = False  # queries, keys and values have a bias
    biases = "attention_bias", "mlp_bias"  # keys of biases that its layers lack
    head_norms = False  # queries and keys of each head have an RMS norm
    norm_offset = 0.0  # added to the weights of norms before they are used
    embedding, final_norm, output = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

    def problems(self, hf: PretrainedConfig) -> list[str]:
        """Return the settings that would be computed differently from transformers, a line each."""
        found = []
        if hf.hidden_act != self.activation:
            found.append(f"hidden_act is '{hf.hidden_act}'; '{self.activation}' alone is known")
        found += [
            f"{key} is true; layers with these biases are not known"
            for key in self.biases
            if getattr(hf, key, False)
        ]
        window = getattr(hf, "sliding_window", None)
        layers = getattr(hf, "layer_types", None) or []
        if (
            window
            and (not layers or "sliding_attention" in layers)
            and getattr(hf, "use_sliding_window", True)
        ):
            found.append(f"sliding_window is {window}; attention here sees the whole sequence")
        rope = hf.rope_parameters
        if rope["rope_type"] not in ROPE_TYPES:
            found.append(f"rope_type is '{rope['rope_type']}'; known are {', '.join(ROPE_TYPES)}")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            found.append("partial_rotary_factor is set; whole heads alone are rotated")
        return found

    def arguments(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return the arguments of ``TransformerConfig`` that depend on the model."""
        return {
            "num_layers": hf.num_hidden_layers,
            "hidden_size": hf.hidden_size,
            "ffn_hidden_size": hf.intermediate_size,
            "num_attention_heads": hf.num_attention_heads,
            "num_query_groups": hf.num_key_value_heads,
            "kv_channels": head_width(hf),
            "normalization": "RMSNorm",
            "layernorm_epsilon": hf.rms_norm_eps,
            "gated_linear_unit": True,
            "activation_func": ACTIVATIONS[self.activation],
            "add_bias_linear": False,
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.head_norms,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }

    def embedding_scale(self, hf: PretrainedConfig) -> float:
        """Return the factor of the embeddings."""
        return 1.0

    def inverse_frequencies(self, hf: PretrainedConfig) -> torch.Tensor:
        """Return the inverse frequencies [dim / 2] float32 of rotary positions, as transformers computes them."""
        rope = hf.rope_parameters
        if rope["rope_type"] == "default":
            width = head_width(hf)
            return 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float) / width))
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf, torch.device("cpu"))
        assert scaling == 1.0, rope
        return frequencies

    def layer(self, hf: PretrainedConfig, index: int) -> Iterator[Joined]:
        """Yield the parameters of one decoder layer."""
        here, hidden = f"model.layers.{index}", hf.hidden_size
        yield norm("input_layernorm", f"{here}.input_layernorm", hidden)
        yield from self.attention(hf, f"{here}.self_attn")
        yield norm("pre_mlp_layernorm", f"{here}.post_attention_layernorm", hidden)
        yield from self.feed_forward(hf, index, f"{here}.mlp")

    def attention(self, hf: PretrainedConfig, here: str) -> Iterator[Joined]:
        """Yield the parameters of a layer's attention."""
        heads, groups, width = hf.num_attention_heads, hf.num_key_value_heads, head_width(hf)
        for leaf, columns in {"weight": (hf.hidden_size,), **({"bias": ()} if self.qkv_bias else {})}.items():
            names = f"{here}.q_proj.{leaf}", f"{here}.k_proj.{leaf}", f"{here}.v_proj.{leaf}"
            rows = attention_rows(names, heads, groups, width, columns)
            yield Joined(f"self_attention.linear_qkv.{leaf}", rows)
        if self.head_norms:
            yield norm("self_attention.q_layernorm", f"{here}.q_norm", width)
            yield norm("self_attention.k_layernorm", f"{here}.k_norm", width)
        whole = whole_source(f"{here}.o_proj.weight", (hf.hidden_size, heads * width))
        yield Joined("self_attention.linear_proj.weight", whole, split=1)

    def feed_forward(self, hf: PretrainedConfig, index: int, here: str) -> Iterator[Joined]:
        """Yield the parameters of a layer's feed-forward."""
        yield from gated("mlp", here, hf.hidden_size, hf.intermediate_size)

    def embeds(self, hf: PretrainedConfig, padding: int) -> Joined:
        """Return the embedding, with padding rows."""
        shape = (hf.vocab_size, hf.hidden_size)
        return Joined(
            "embedding.word_embeddings.weight", whole_source(self.embedding, shape), padding=padding
        )

    def ends(self, hf: PretrainedConfig) -> Joined:
        """Return the norm after the last layer."""
        return norm("decoder.final_layernorm", self.final_norm.removesuffix(".weight"), hf.hidden_size)

    def speaks(self, hf: PretrainedConfig, padding: int) -> Joined:
        """Return the output layer; of a tied model, the embedding."""
        shape = (hf.vocab_size, hf.hidden_size)
        name = self.embedding if hf.tie_word_embeddings else self.output
        return Joined("output_layer.weight", whole_source(name, shape), padding=padding)

    def scores(self, hf: PretrainedConfig) -> Joined:
        """Return the value head."""
        return Joined("output_layer.weight", whole_source(HEAD, (1, hf.hidden_size)), split=None)


class Gemma(Architecture):
    """The architecture of Gemma (the first): Llama with GELU, scaled embeddings and norms of ``1 + weight``."""

    activation = "gelu_pytorch_tanh"
    norm_offset = 1.0

    def embedding_scale(self, hf: PretrainedConfig) -> float:
        """Return the root of the width."""
        return float(hf.hidden_size**0.5)


class Qwen2(Architecture):
    """The architecture of Qwen2: Llama with biases of queries, keys and values."""

    qkv_bias = True


class SeedOss(Qwen2):
    """The architecture of Seed-OSS: that of Qwen2."""

    biases = "attention_out_bias", "mlp_bias"

    def problems(self, hf: PretrainedConfig) -> list[str]:
        """Return the unsupported settings, including layers without these biases."""
        absent = [] if hf.attention_bias else ["attention_bias is false; its layers have these biases"]
        return super().problems(hf) + absent


class SmolLM3(Architecture):
    """The architecture of SmolLM3: Llama in which some layers have no rotary positions."""

    def arguments(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return the arguments of ``TransformerConfig``, with the layers without positions."""
        return {**super().arguments(hf), "no_rope_freq": [1 - int(rotates) for rotates in hf.no_rope_layers]}


class Qwen3(Architecture):
    """The architecture of Qwen3: Llama with norms of each head's queries and keys."""

    head_norms = True


class Qwen3Moe(Qwen3):
    """The architecture of Qwen3-MoE: Qwen3 whose feed-forwards are mixtures of experts.

    Each token goes to `num_experts_per_tok` experts; no token is dropped. The experts' weights are the softmax over all
    experts, divided by their sum with `norm_topk_prob`. No load-balancing loss is added to the run's loss.
    """

    def problems(self, hf: PretrainedConfig) -> list[str]:
        """Return the unsupported settings, including a router that would have no gradient."""
        found = super().problems(hf)
        if hf.num_experts_per_tok == 1 and hf.norm_topk_prob:
            found.append("norm_topk_prob with num_experts_per_tok 1: the router would have no gradient")
        return found

    def arguments(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return the arguments of ``TransformerConfig``, with those of experts and router."""
        layers = [int(sparse(hf, index)) for index in range(hf.num_hidden_layers)]
        return {
            **super().arguments(hf),
            **routed(hf.num_experts, hf.moe_intermediate_size, hf.num_experts_per_tok, layers),
            "moe_router_pre_softmax": not hf.norm_topk_prob,
        }

    def feed_forward(self, hf: PretrainedConfig, index: int, here: str) -> Iterator[Joined]:
        """Yield the parameters of a layer's router and experts, or of its dense feed-forward."""
        if not sparse(hf, index):
            yield from super().feed_forward(hf, index, here)
            return
        router = whole_source(f"{here}.gate.weight", (hf.num_experts, hf.hidden_size))
        yield Joined("mlp.router.weight", router, split=None)
        for expert in range(hf.num_experts):
            of = f"{here}.experts.{expert}"
            yield from gated(
                "mlp.experts.local_experts.{expert}", of, hf.hidden_size, hf.moe_intermediate_size, expert
            )


class Mixtral(Architecture):
    """The architecture of Mixtral: Llama whose feed-forwards are mixtures of experts. Its router is that of Qwen3-MoE."""

    def problems(self, hf: PretrainedConfig) -> list[str]:
        """Return the unsupported settings, including a router that would have no gradient."""
        one = ["num_experts_per_tok is 1: the router would have no gradient"]
        return super().problems(hf) + (one if hf.num_experts_per_tok == 1 else [])

    def arguments(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return the arguments of ``TransformerConfig``, with those of experts and router."""
        layers = [1] * hf.num_hidden_layers
        experts = routed(hf.num_local_experts, hf.intermediate_size, hf.num_experts_per_tok, layers)
        return {**super().arguments(hf), **experts}

    def feed_forward(self, hf: PretrainedConfig, index: int, here: str) -> Iterator[Joined]:
        """Yield the parameters of a layer's router and experts."""
        here = here.replace("mlp", "block_sparse_moe")
        router = whole_source(f"{here}.gate.weight", (hf.num_local_experts, hf.hidden_size))
        yield Joined("mlp.router.weight", router, split=None)
        for expert in range(hf.num_local_experts):
            of, name = f"{here}.experts.{expert}", "mlp.experts.local_experts.{expert}"
            parts = f"{of}.w1", f"{of}.w3", f"{of}.w2"
            yield from gated(name, parts, hf.hidden_size, hf.intermediate_size, expert)


def architecture_of(hf: PretrainedConfig, plugins: PluginSet | None = None) -> Architecture:
    """Return the model's architecture, from the table ``engine_architectures``.

    Args:
        hf: the model's config; its ``model_type`` is the architecture's name.
        plugins: the run's plugins, which may offer architectures too.

    Raises:
        ConfigError: no architecture has that name, or it does not support a setting of the config.
        PluginError: the architecture does not load.
    """
    name = hf.model_type
    run = PluginSet() if plugins is None else plugins
    try:
        loaded = PluginSet.load({"architectures": [name]}, run.modules, run.root, run.allow_code)
    except PluginError as error:
        if any(find("architectures", name)):
            raise
        raise ConfigError(
            f"Megatron has no model for {type(hf).__name__}: {error} Use backend 'fsdp', which trains any model of "
            "transformers, or add the architecture in a plugin (engine_architectures)."
        ) from None
    architecture: Architecture = loaded.resolve("architectures", name)()
    if problems := architecture.problems(hf):
        raise ConfigError([f"Megatron does not compute this '{name}': {problem}." for problem in problems])
    return architecture


def sparse(hf: PretrainedConfig, index: int) -> bool:
    """Return whether a layer has experts."""
    return (
        index not in hf.mlp_only_layers and hf.num_experts > 0 and (index + 1) % hf.decoder_sparse_step == 0
    )


def head_width(hf: PretrainedConfig) -> int:
    """Return the width of one head."""
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def norm(name: str, source: str, width: int) -> Joined:
    """Return a norm's weight, which every rank has whole."""
    return Joined(f"{name}.weight", whole_source(f"{source}.weight", (width,)), split=None)


def gated(
    name: str, here: str | tuple[str, str, str], hidden: int, wide: int, expert: int | None = None
) -> Iterator[Joined]:
    """Yield a gated feed-forward's parameters: gate and up in one matrix, down in another.

    Args:
        name: megatron-core's name of the feed-forward.
        here: the module's name in transformers, or the names of gate, up and down.
        hidden: the model's width.
        wide: the feed-forward's width.
        expert: the expert's number, for the feed-forward of one expert.
    """
    names = tuple(f"{here}.{part}_proj" for part in ("gate", "up", "down")) if isinstance(here, str) else here
    gate, up = ((Source(f"{part}.weight", (wide, hidden), 0, wide),) for part in names[:2])
    yield Joined(f"{name}.linear_fc1.weight", (gate, up), expert=expert)
    yield Joined(
        f"{name}.linear_fc2.weight",
        whole_source(f"{names[2]}.weight", (hidden, wide)),
        split=1,
        expert=expert,
    )


def routed(experts: int, wide: int, chosen: int, layers: list[int]) -> dict[str, Any]:
    """Return the arguments of ``TransformerConfig`` for experts, whose weights are divided by their sum.

    Args:
        experts: number of experts.
        wide: width of an expert.
        chosen: experts of each token.
        layers: 1 for each layer with experts, 0 for others.
    """
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": wide,
        "moe_layer_freq": layers,
        "moe_router_topk": chosen,
        "moe_router_pre_softmax": False,  # softmax over the chosen: equal to dividing
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,  # grouped experts need Transformer Engine
    }
