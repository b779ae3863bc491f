"""Tiny models, a tokenizer of characters, and slow independent values: one sequence at a time, float64.

Nothing here uses the engines' own code for logits, log-probs, losses or optimizers.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

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
    from transformers import (  # seconds, which the process of pytest need not spend
        AutoConfig,
        AutoModelForCausalLM,
    )

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
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", *LETTERS])}
    made = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def load_reference(path: str) -> nn.Module:
    """Load a folder's module in float64, with eager attention and with experts that are computed one after another."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


def fill(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy ``weights`` [D_1, D_2, ...] of ``named_weights`` into a reference module; fail if a name is unknown."""
    values = {name: value.double() for name, value in weights.items()}
    known, model = module.state_dict().keys(), _of_transformers(module)
    if model is not None and as_published(model, model.state_dict()).keys() != model.state_dict().keys():
        kind: Any = type(model)
        made, info = kind.from_pretrained(
            None, config=model.config, state_dict=values, dtype=torch.float64, output_loading_info=True
        )
        values = {name: values[name] for name in info["unexpected_keys"]}
        values |= {name: value for name, value in made.state_dict().items() if name in known}
    unknown = module.load_state_dict(values, strict=False).unexpected_keys
    assert not unknown, f"named_weights gives unknown names: {unknown[:5]}."


def as_published(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors [D_1, D_2, ...], given by the module's own names, by the names in a model folder.

    The names differ for mixtures of experts: transformers holds the experts of a layer in one tensor, and writes a
    tensor for each expert.
    """
    from transformers.core_model_loading import revert_weight_conversion

    model = _of_transformers(module)
    return dict(tensors) if model is None else dict(revert_weight_conversion(model, dict(tensors)))


def _of_transformers(module: nn.Module) -> PreTrainedModel | None:
    """Return the model of transformers that a reference is or was made from; None for other modules."""
    from transformers import PreTrainedModel

    if isinstance(module, ValueReference):
        module = module.module
    made_from = module.made_from[0] if isinstance(module, DecoderScores) else module
    return made_from if isinstance(made_from, PreTrainedModel) else None


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


def probe_outputs(module: nn.Module, batch: Batch, names: Collection[str]) -> dict[str, Tensor]:
    """Return outputs by name at loss tokens, 0 elsewhere: [T], and ``log_probs_at`` [T, K]; over ``support_ids`` if given."""
    rows = rows_of(module, batch)
    mask = batch["loss_mask"].clone()
    mask[batch.offsets[:-1][batch.lengths > 0]] = False  # first tokens have no distribution
    chosen = rows.gather(-1, batch.token_ids[:, None]).squeeze(-1)
    if "support_ids" in batch:
        ids = batch["support_ids"]
        kept = torch.zeros_like(rows).scatter_add_(-1, ids.clamp(min=0).long(), (ids >= 0).to(rows.dtype)) > 0
        kept |= (ids < 0).all(-1)[:, None]
        chosen = chosen - rows.masked_fill(~kept, -torch.inf).logsumexp(-1)
    found = {
        "log_probs": chosen,
        "entropy": -(rows.exp() * rows).sum(-1),
        "sum_pi_squared": (2 * rows).exp().sum(-1),
    }
    if "candidate_ids" in batch:
        ids = batch["candidate_ids"]
        others = torch.ones_like(rows).scatter(-1, ids, 0.0)
        found |= {"log_probs_at": rows.gather(-1, ids), "log_rest": (others * rows.exp()).sum(-1).log()}
    return {n: torch.where(mask if found[n].ndim == 1 else mask[:, None], found[n], 0.0) for n in names}


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


def policy_loss(module: nn.Module, batch: Batch, options: Mapping[str, Any]) -> Tensor:
    """Return the scalar loss ``policy`` over [T] from its formulas: ``ppo_clip`` with ``delta``, KL, entropy, correction.

    Args:
        module: the policy.
        batch: the columns of ``clipped_loss``, ``ref_log_probs`` and ``rollout_log_probs`` [T].
        options: parameters of the objective, with ``kl_estimator = "k2"`` and a correction of ``level = "token"``.
    """
    found, mask = outputs_of(module, batch), batch["loss_mask"]
    log_probs, old, advantages = found["log_probs"], batch["old_log_probs"].double(), batch["advantages"]
    table, correction = options["loss_options"], options["correction"]
    ratio = (log_probs - old).exp()
    clipped = ratio.clamp(1 - table["clip_ratio_low"], 1 + table["clip_ratio_high"])
    loss = torch.maximum(-ratio.clamp(max=table["delta"]) * advantages, -clipped * advantages)
    weight = (old - batch["rollout_log_probs"]).exp().clamp(max=correction["cap"])
    moved = (batch["rollout_log_probs"] - log_probs.detach()) * mask
    gone = batch.sum_by_sequence(moved) / batch.sum_by_sequence(mask.double()).clamp(min=1)
    left = batch.to_tokens(gone > correction["off_policy_threshold"]) & (advantages < 0)
    kl = (log_probs - batch["ref_log_probs"]) ** 2 / 2
    total = loss * weight * ~left + options["kl_coef"] * kl - options["entropy_coef"] * found["entropy"]
    return (batch["weights"] * total).sum()


def gradient_of(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradient [D_1, D_2, ...] of each parameter by its name in a folder; tied ones once, zeros if it has none.

    Saved buffers have zeros too.

    Args:
        module: module of the parameters, whose gradients are cleared first.
        loss: a scalar.
    """
    module.zero_grad(set_to_none=True)
    loss.backward()
    saved = module.state_dict().keys()
    buffers = {name: torch.zeros_like(value) for name, value in module.named_buffers() if name in saved}
    found = buffers | {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in module.named_parameters()
    }
    return as_published(module, found)


def published(folder: str | Path) -> dict[str, Tensor]:
    """Load the weights [D_1, D_2, ...] by name that ``save_pretrained`` wrote."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(file)
    return found


def norm_of(gradient: Mapping[str, Tensor]) -> float:
    """Return the global L2 norm of tensors [D_1, D_2, ...] by name."""
    return sum(float(value.double().pow(2).sum()) for value in gradient.values()) ** 0.5


def rate_of(optim: Mapping[str, Any], step: int, total_steps: int) -> float:
    """Return the learning rate of a step, counted from 0, as ``[actor.optim]`` documents it."""
    warmup, least = optim.get("warmup_steps", 0), optim.get("min_lr_ratio", 0.0)
    end = optim.get("decay_steps", 0) or total_steps
    if step < warmup:
        return float(optim["lr"]) * (step + 1) / warmup
    done = min(1.0, (step - warmup) / (end - warmup))
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return float(optim["lr"]) * (least + (1 - least) * shape[optim.get("schedule", "constant")])


class ReferenceSteps:
    """Optimizer steps in float64, written from the formulas of AdamW (or of SGD), clipping and schedule.

    Args:
        optim: values of ``[actor.optim]``, with ``lr`` and ``max_grad_norm``.
        total_steps: steps of the run.
        adam: False: ``w <- w - lr g``.
    """

    def __init__(self, optim: Mapping[str, Any], total_steps: int, adam: bool = True) -> None:
        self.optim, self.total_steps, self.adam = optim, total_steps, adam
        self.share_of: Callable[[str], float] = lambda name: 1.0  # of the rate, by the name of a weight
        self.done = 0
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}

    def step(
        self, weights: Mapping[str, Tensor], gradient: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], float, float]:
        """Take a step from ``weights`` with ``gradient``, both [D_1, D_2, ...] by name, of any type.

        Returns:
            New weights in float64; how much each moves per unit of its gradient, ``1 / (sqrt(v) + eps)``; the largest
            learning rate; the gradient's norm before clipping.
        """
        b1, b2 = self.optim.get("betas", (0.9, 0.999))
        eps, decay = self.optim.get("eps", 1e-8), self.optim.get("weight_decay", 0.0)
        rate, norm = rate_of(self.optim, self.done, self.total_steps), norm_of(gradient)
        limit = self.optim["max_grad_norm"]
        factor = limit / norm if limit and norm > limit else 1.0
        self.done += 1
        found, slopes = {}, {}
        for name, raw in gradient.items():
            old, g, own = weights[name].double(), factor * raw.double(), rate * self.share_of(name)
            if not self.adam:
                found[name], slopes[name] = old - own * g, torch.ones_like(g)
                continue
            self.first[name] = b1 * self.first.get(name, torch.zeros_like(g)) + (1 - b1) * g
            self.second[name] = b2 * self.second.get(name, torch.zeros_like(g)) + (1 - b2) * g * g
            m, v = self.first[name] / (1 - b1**self.done), self.second[name] / (1 - b2**self.done)
            slopes[name] = 1 / (v.sqrt() + eps)
            found[name] = old - own * m * slopes[name] - own * decay * (old if old.ndim >= 2 else 0.0)
        return found, slopes, rate, norm


class DecoderScores(nn.Module):
    """A value head on the decoder of a reference module.

    Args:
        module: a reference that is a model of transformers.
        weights: ``named_weights`` [D_1, D_2, ...] of a critic or a reward model.
    """

    def __init__(self, module: Any, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        assert "score.weight" in weights, (
            "named_weights of a critic has no 'score.weight', the head of transformers' models. Give the suite a "
            "`value_reference` for a critic of another form."
        )
        self.made_from = [module]  # in a list, so that its head is no part of this module
        self.prefix = module.base_model_prefix
        self.add_module(self.prefix, module.base_model)
        self.score = nn.Linear(weights["score.weight"].shape[1], 1, bias=False, dtype=torch.float64)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return ``score`` [1, n] of each token's last hidden state."""
        decoder = getattr(self, self.prefix)
        hidden = decoder(input_ids=input_ids, position_ids=position_ids).last_hidden_state
        return self.score(hidden).squeeze(-1)


class ValueReference(nn.Module):
    """The outputs of a critic or a reward model in float64.

    Args:
        module: ``forward(input_ids, position_ids)`` to values [1, n], each of the tokens up to it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        """Return the parameters under the names that they have in the module."""
        return self.module.named_parameters(*args, **options)

    def outputs_of(self, batch: Batch) -> dict[str, Tensor]:
        """Return ``scores`` [T], read at each loss token, and ``values`` [T], read at the token before it; 0 elsewhere."""
        scores, values = [], []
        for ids in batch.token_ids.split(batch.lengths.tolist()):
            scores.append(self.module(ids[None], torch.arange(len(ids))[None])[0])
            values.append(torch.cat([scores[-1].new_zeros(min(1, len(ids))), scores[-1][:-1]]))
        mask = batch["loss_mask"]
        return {"scores": torch.cat(scores) * mask, "values": torch.cat(values) * mask}
