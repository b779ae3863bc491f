"""Log-probabilities, entropies and similar outputs from hidden states, with a few rows of logits at a time.

The float32 logits of a batch would be the largest tensor of training by far (16,384 tokens with a
vocabulary of 151,936: 10 GB). Here they exist for one chunk of rows at a time, also in the backward
pass, where each chunk is computed again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine_core.types import LOG_OF_NOTHING as NOTHING
from engine_core.types import SUPPORT
from engine_plugin_torch.units import compiled_where_possible

if TYPE_CHECKING:
    from engine_core.types import Batch

OTHER_LOGIT_KEYS = re.compile(r"logit|lm_head|output_multiplier")  # config keys that may change logits
HARMLESS = re.compile(r"attn|attention|router|num_logits|return|classifier")


@dataclass(frozen=True)
class Head:
    """A language-model head, from hidden states to logits: ``cap(project(hidden) * scale)``."""

    project: nn.Module  #: [N, H] to [N, V]
    scale: float = 1.0  #: factor of the logits
    cap: float | None = None  #: logits are ``cap * tanh(logits / cap)``; None: as they are

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute logits: [N, H] -> [N, V] float32."""
        logits = self.project(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits.float()


def find_head(module: nn.Module) -> Head | None:
    """Return the head of a transformers model as its config describes it; None where the head is not known.

    Known keys: ``final_logit_softcapping`` (Gemma), ``logits_scaling`` (Granite divides by it),
    ``logit_scale`` (Cohere). Any other key that concerns logits gives None.
    """
    config = getattr(module, "config", None)
    get_head = getattr(module, "get_output_embeddings", None)
    project = get_head() if get_head else None
    if project is None or not hasattr(config, "get_text_config"):
        return None
    values: dict[str, Any] = config.get_text_config(decoder=True).to_dict()  # type: ignore[union-attr]
    cap = values.pop("final_logit_softcapping", None)
    scale = (values.pop("logit_scale", None) or 1.0) / (values.pop("logits_scaling", None) or 1.0)
    unknown = [
        key
        for key, value in values.items()
        if OTHER_LOGIT_KEYS.search(key) and not HARMLESS.search(key) and value not in (None, False, 1.0)
    ]
    return None if unknown else Head(project, scale, cap)


@dataclass
class Distribution:
    """The distribution ``p = softmax(logits / temperature)`` of some rows, with the targets and columns at these rows.

    An engine whose ranks each hold a part of the vocabulary overrides the methods that read all of it: ``vocabulary``,
    ``at``, ``sum_over``, ``log_sum_of``, ``likeliest`` and ``without``.

    Attributes:
        log_sum: [n], log of the sum over the vocabulary; a log-prob is a logit minus ``log_sum``.

    No ``cached_property`` is used: before Python 3.12 it takes a lock, which ``torch.compile`` cannot compile.
    """

    logits: Tensor  #: [n, V] float32, divided by the temperature
    targets: Tensor  #: [n] int64
    columns: Mapping[str, Tensor]  #: of the batch, at these rows
    top_k: int  #: K of the outputs ``top_...``

    def __post_init__(self) -> None:
        self.log_sum = self.log_sum_of(self.logits)
        self._top_ids: Tensor | None = None  # cached by ``top_ids``

    @property
    def vocabulary(self) -> int:
        """Size V of the vocabulary."""
        return self.logits.shape[-1]

    def at(self, ids: Tensor) -> Tensor:
        """Return the logits at ids: [n, K] -> [n, K]."""
        return self.logits.gather(-1, ids)

    def sum_over(self, values: Tensor) -> Tensor:
        """Sum over the vocabulary: [n, V] -> [n]."""
        return values.sum(-1)

    def log_sum_of(self, values: Tensor) -> Tensor:
        """Compute ``log sum_v exp(values_v)``: [n, V] -> [n]."""
        return values.logsumexp(-1)

    def likeliest(self, count: int) -> Tensor:
        """Return the ids of the most likely tokens, the most likely first: ``[N, count]`` int64."""
        return self.logits.topk(count, dim=-1).indices

    def without(self, ids: Tensor) -> Tensor:
        """Return the logits [n, V] with minus infinity at ``ids`` [n, K]."""
        return self.logits.scatter(-1, ids, -torch.inf)

    @property
    def mean_logit(self) -> Tensor:
        """Expected logit ``sum_v p_v logit_v`` of each row: ``[N]`` float32."""
        return self.sum_over(torch.softmax(self.logits, -1) * self.logits)

    @property
    def log_norm(self) -> Tensor:
        """Normalizer of the targets: ``[N]``; over the tokens of ``support_ids`` if that column exists."""
        ids = self.columns.get(SUPPORT)
        if ids is None:
            return self.log_sum
        kept = ids >= 0
        whole = ~kept.any(-1)
        at = self.at(ids.clamp(min=0).long())
        # a row without support keeps its logits: the gradient of an empty sum would be NaN
        over = at.masked_fill(~kept & ~whole[:, None], -torch.inf).logsumexp(-1)
        return torch.where(whole, self.log_sum, over)

    @property
    def top_ids(self) -> Tensor:
        """Ids of the K most likely tokens, the most likely first: [n, K] int64. Raises ValueError for a bad K."""
        if not 0 < self.top_k <= self.vocabulary:
            raise ValueError(
                f"Batch.top_k is {self.top_k}; the outputs 'top_...' are of 1 to {self.vocabulary} tokens a position."
            )
        if self._top_ids is None:
            self._top_ids = self.likeliest(self.top_k)
        return self._top_ids

    def log_probs_of(self, ids: Tensor) -> Tensor:
        """Return the log-probs at ids: [n, K] -> [n, K]."""
        return self.at(ids) - self.log_sum[:, None]

    def log_rest_of(self, ids: Tensor) -> Tensor:
        """Return the log of the probability of all other tokens: [n, K] different ids -> [n]; ``NOTHING`` for none.

        The other tokens are summed instead of ``log(1 - sum)``, so a rest of e^-30 keeps its digits and its gradient.
        """
        if ids.shape[-1] >= self.vocabulary:
            return self.logits.new_full(ids.shape[:1], NOTHING)
        return (self.log_sum_of(self.without(ids)) - self.log_sum).clamp(min=NOTHING)


def gather_outputs(
    logits_of: Callable[[Tensor], Tensor],
    rows: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk: int,
    grad: Collection[str] = ("log_probs",),
    watched: Collection[str] = (),
    columns: Mapping[str, Tensor] | None = None,
    top_k: int = 0,
    compile: bool = False,
    recompute: bool = True,
    kind: Callable[..., Distribution] = Distribution,
) -> dict[str, Tensor]:
    """Compute the outputs of a train engine from the distribution ``p = softmax(logits / temperature)``.

    Args:
        logits_of: [n, H] -> [n, V] float32; called on at most ``chunk`` rows.
        rows: [N, H], the input of ``logits_of``.
        targets: [N] int64.
        temperature: greater than 0.
        chunk: number of rows whose logits exist at one time.
        grad: outputs with gradient, from ``OUTPUTS``; ``log_probs`` always has it.
        watched: outputs without gradient.
        columns: [N, ...] each, the columns that outputs read: ``candidate_ids`` [N, K] int64, K different tokens;
            ``support_ids`` [N, K] int32, the tokens that the target was drawn from, padded with -1.
        top_k: K of the outputs ``top_...``.
        compile: use ``torch.compile``; if that fails, log it and run without.
        recompute: compute logits again in the backward pass, a chunk at a time, instead of keeping them.
        kind: class that reads the logits; a subclass where each rank holds a part of the vocabulary.

    Returns:
        Tensors by name, [N] float32 unless said otherwise. ``log_probs`` is always included: ``log p[target]``, or with
        ``support_ids`` ``log (p[target] / sum_{v in support} p_v)`` (a row of -1: the whole vocabulary). On request:
        ``entropy`` ``-sum_v p_v log p_v``; ``sum_pi_squared`` ``sum_v p_v^2``; ``log_probs_at`` [N, K] at
        ``candidate_ids`` and ``log_rest`` of all other tokens together; for the K most likely tokens ``top_ids``
        [N, K] int64, ``top_log_probs`` [N, K] and ``top_log_rest``. The log of 0 is ``NOTHING``.

    Raises:
        ValueError: the temperature is not greater than 0, or K is out of range.
    """
    if temperature <= 0:
        raise ValueError(
            f"The temperature of log-probs is {temperature}; it must be over 0 (0 is for sampling)."
        )
    names = [name for name in OUTPUTS if name == "log_probs" or name in (*grad, *watched)]
    read = dict(columns or {})

    def one(part: Tensor, target: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs of one chunk: hidden states ``[N, H]``, targets ``[N]``, columns ``[N, ...]``."""
        logits = logits_of(part)
        if temperature != 1.0:
            logits = logits / temperature
        made = kind(logits, target, dict(zip(read, values, strict=True)), top_k)
        found = []
        for name in names:
            wanted = name in grad or name not in watched  # log-probs are always included
            with torch.set_grad_enabled(torch.is_grad_enabled() and wanted):
                found.append(_OF_DISTRIBUTION[name](made))
        return tuple(found)

    parts = zip(
        rows.split(chunk), targets.split(chunk), *(v.split(chunk) for v in read.values()), strict=True
    )

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function in an activation checkpoint if ``recompute`` is set."""
        return (
            partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
            if recompute
            else function
        )

    name = "What computes log-probs"
    run = compiled_where_possible(one, name, around) if compile else around(one)
    pieces = [run(*part) for part in parts if len(part[1])]
    if not pieces:  # no row: zero of them, still part of the graph
        empty = zeros_of(names, 0, read, top_k, rows.device)
        return {name: v + rows.float().sum() if v.is_floating_point() else v for name, v in empty.items()}
    return {name: torch.cat(found) for name, found in zip(names, zip(*pieces, strict=True), strict=True)}


def zeros_of(
    names: Collection[str],
    count: int,
    columns: Mapping[str, Tensor],
    top_k: int,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Return outputs of ``count`` tokens that are 0, typed and shaped as in ``gather_outputs``: ``[N]`` or ``[N, K]``.

    ``columns`` must hold ``candidate_ids: [N, K]`` for ``log_probs_at``.
    """
    found = {}
    for name in names:
        width: tuple[int, ...] = (top_k,) if name in ("top_ids", "top_log_probs") else ()
        if name == "log_probs_at":
            width = tuple(_column(columns, "candidate_ids").shape[1:])
        kind = torch.int64 if name == "top_ids" else torch.float32
        found[name] = torch.zeros(count, *width, dtype=kind, device=device)
    return found


def zero_outputs(
    names: Collection[str], batch: Batch, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Return outputs of a batch that are 0: [T], or [T, K] for outputs with several tokens per position."""
    return zeros_of(names, batch.num_tokens, batch.tokens, batch.top_k, device)


def columns_at(places: Tensor, names: Collection[str], batch: Batch) -> dict[str, Tensor]:
    """Return the columns that the outputs ``names`` read, and the support if the batch has it, at ``places: [N]``."""
    read = {column for name in names for column in READS.get(name, ())}
    read |= {SUPPORT} & batch.tokens.keys()
    return {column: _column(batch.tokens, column)[places] for column in sorted(read)}


def _column(columns: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in columns:
        readers = " and ".join(f"'{output}'" for output, read in READS.items() if name in read)
        raise ValueError(f"The outputs {readers} need the column '{name}' in the batch.")
    return columns[name]


_OF_DISTRIBUTION: dict[str, Callable[[Distribution], Tensor]] = {
    "log_probs": lambda p: p.at(p.targets[:, None]).squeeze(-1) - p.log_norm,
    "entropy": lambda p: p.log_sum - p.mean_logit,
    "sum_pi_squared": lambda p: (p.log_sum_of(2 * p.logits) - 2 * p.log_sum).exp(),
    "log_probs_at": lambda p: p.log_probs_of(p.columns["candidate_ids"]),
    "log_rest": lambda p: p.log_rest_of(p.columns["candidate_ids"]),
    "top_ids": lambda p: p.top_ids,
    "top_log_probs": lambda p: p.log_probs_of(p.top_ids),
    "top_log_rest": lambda p: p.log_rest_of(p.top_ids),
}
"""Output -> its function."""

OUTPUTS = tuple(_OF_DISTRIBUTION)

READS = {"log_probs_at": ("candidate_ids",), "log_rest": ("candidate_ids",)}
"""Output -> columns of the batch that it is computed from."""
