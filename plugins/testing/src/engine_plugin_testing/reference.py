"""Tiny models, a tokenizer of characters, and slow independent values: one sequence at a time, float64.

Nothing here uses the engines' own code for logits, log-probs, losses or optimizers.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from engine_plugin_testing.mixture import split_experts

if TYPE_CHECKING:
    from engine_core.types import Batch

PAD, EOS = 0, 1
LIVELIER = (
    "Give it livelier weights: a larger `initializer_range` in the suite's `model`; in a `write_model` of your own "
    "larger embeddings and an untied head (nn.init.normal_(embedding, std=1)), or another seed."
)
LETTERS = " " + string.ascii_letters + string.digits + string.punctuation  # 95: one token each
VOCABULARY = 2 + len(LETTERS)  # ids of the kit's tokenizer and batches: 0 to 96
SHAPE: Mapping[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # logits far from uniform, so that a mistake shows
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}


def write_model(folder: Path, changes: Mapping[str, Any], seed: int, tied: bool) -> None:
    """Write a random model and its tokenizer in the layout of ``save_pretrained``."""
    values = {**SHAPE, "tie_word_embeddings": tied, **changes}
    config = AutoConfig.for_model(**values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with a token for each printable ASCII character, ``<pad>`` 0 and ``<eos>`` 1."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", *LETTERS])}
    made = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def load_reference(path: str) -> nn.Module:
    """Load a folder's module in float64 with eager attention; each expert of a mixture has its folder's weights."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    return split_experts(model).eval()


def logits_of(module: nn.Module, token_ids: Tensor) -> Tensor:
    """Return the logits [N, V] of one sequence, computed without others.

    Args:
        module: returns logits [1, N, V], or an object with ``logits``, for ``input_ids`` and ``position_ids`` [1, N].
        token_ids: [N].
    """
    positions = torch.arange(len(token_ids), device=token_ids.device)[None]
    output = module(input_ids=token_ids[None], position_ids=positions)
    logits: Tensor = (output if isinstance(output, Tensor) else output.logits)[0]
    return logits


def rows_of(module: nn.Module, batch: Batch) -> Tensor:
    """Return the log-probs [T, V] of the distribution of each token, at the batch's temperature; 0 at first tokens."""
    found = []
    for ids in batch.token_ids.split(batch.lengths.tolist()):
        rows = torch.log_softmax(logits_of(module, ids) / batch.temperature, dim=-1)
        found.append(torch.cat([torch.zeros_like(rows[:1]), rows[:-1]]))
    return torch.cat(found)


def outputs_of(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return ``log_probs`` and ``entropy`` [T] of ``softmax(logits / temperature)`` at loss tokens, 0 elsewhere."""
    log_probs, entropies = [], []
    masks = batch["loss_mask"].split(batch.lengths.tolist())
    for ids, mask in zip(batch.token_ids.split(batch.lengths.tolist()), masks, strict=True):
        rows = torch.log_softmax(logits_of(module, ids) / batch.temperature, dim=-1)
        first = rows.new_zeros(min(1, len(ids)))
        chosen = rows[:-1].gather(1, ids[1:, None]).squeeze(1)
        spread = -(rows[:-1].exp() * rows[:-1]).sum(-1)
        log_probs.append(torch.cat([first, chosen]) * mask)
        entropies.append(torch.cat([first, spread]) * mask)
    return {"log_probs": torch.cat(log_probs), "entropy": torch.cat(entropies)}


def nll_loss(module: nn.Module, batch: Batch) -> Tensor:
    """Return the scalar ``-sum_t w_t log p_t`` of the weights and log-probs [T]."""
    return -(batch["weights"] * outputs_of(module, batch)["log_probs"]).sum()


def clipped_loss(module: nn.Module, batch: Batch, clip: float = 0.2) -> Tensor:
    """Return the scalar ``sum_t w_t max(-rho A, -clip(rho) A)`` over [T]; ``rho`` is the ratio to ``old_log_probs``."""
    log_probs = outputs_of(module, batch)["log_probs"]
    ratio = (log_probs - batch["old_log_probs"]).exp()
    advantages = batch["advantages"]
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip, 1 + clip) * advantages)
    return (batch["weights"] * loss).sum()


def gradient_of(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradient [D_1, D_2, ...] of each parameter by name; tied ones once, zeros if it has none.

    Args:
        module: module of the parameters, whose gradients are cleared first.
        loss: a scalar.
    """
    module.zero_grad(set_to_none=True)
    loss.backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in module.named_parameters()
    }


def norm_of(gradient: Mapping[str, Tensor]) -> float:
    """Return the global L2 norm of tensors [D_1, D_2, ...] by name."""
    return sum(float(value.double().pow(2).sum()) for value in gradient.values()) ** 0.5
