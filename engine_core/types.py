"""The vocabulary: Prompt, Request, Rollout, Batch.

Letters in shapes: P prompts of a step, G rollouts a prompt, B = P * G sequences, T tokens of all
sequences one after another, K candidates a position, V vocabulary.

One convention holds everywhere: **a per-token value stands at the token it is about.**
``log_probs[t]`` is the log-probability of ``token_ids[t]`` given the tokens before it in the same
sequence; the first token of a sequence has 0 there. Logs are natural.

Left out on purpose: padding. A batch is the tokens of its sequences one after another; whoever
needs a rectangle makes one and puts it away again.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine_core.tables import DEFAULTS, SamplingOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(slots=True)
class Prompt:
    """One row of the data, ready to sample from.

    Example: ``Prompt("train:17", [5, 9, 2], "2+2=", {"answer": "4"})``.
    """

    id: str  # "<split>:<row>", the same in every epoch and after a resume
    token_ids: list[int]  # the prompt as the model sees it, chat template applied
    text: str  # the same, readable
    columns: dict[str, Any] = field(default_factory=dict)  # the row's other columns, for rewards


@dataclass(slots=True, frozen=True)
class Sampling(SamplingOptions):
    """How to sample: the sampling options, as in the TOML's ``[rollout]`` table, and what only a request has."""

    seed: int | None = None  # with a seed the same request gives the same tokens
    # tell which tokens a cut of the distribution left, where they are at most this many; 0: do not
    max_support: int = 0
    log_probs: bool = True  # False: nobody reads `Rollout.rollout_log_probs`, and they may be 0
    timeout_s: float = 0.0  # from when it is queued; then it is stopped as far as it came. 0: no limit

    @classmethod
    def of(cls, *tables: object, **request: Any) -> Sampling:
        """Take each option from the last table that has it.

        Args:
            tables: of a run file, or other sampling; None in a table is no value.
            request: what only a request has.
        """
        options = {
            name: value
            for table in tables
            for name in DEFAULTS
            if (value := getattr(table, name, None)) is not None
        }
        return cls(**options, **request)


@dataclass(slots=True)
class Request:
    """One completion to sample. ``id`` comes back on the rollout's ``request_id``.

    With ``begun`` a response that was stopped goes on: its rollout is the whole response, and what was sampled
    before keeps its log-probs, policy versions and extras (capability ``partial``).
    """

    id: str
    prompt: Prompt
    sampling: Sampling
    group_id: int = 0
    index: int = 0  # position within its group, 0..G-1
    begun: Rollout | None = None  # what ``abort`` gave of it; `max_response_tokens` is of the whole response

    def unsampled(self) -> Rollout:
        """What there is of it before another token is sampled, with finish reason ``abort``."""
        import torch

        count = len(self.prompt.token_ids)
        empty = Rollout(
            request_id=self.id,
            prompt=self.prompt,
            token_ids=torch.tensor(self.prompt.token_ids),
            loss_mask=torch.zeros(count, dtype=torch.bool),
            rollout_log_probs=torch.zeros(count),
            policy_versions=torch.zeros(count, dtype=torch.int32),
            finish_reason="abort",
            group_id=self.group_id,
            index=self.index,
        )
        if self.begun is None:
            return empty
        kept = {name: getattr(self.begun, name) for name in (*TENSORS, "extras", "text")}
        return dataclasses.replace(empty, **kept)


@dataclass(slots=True)
class Rollout:
    """One sampled sequence: prompt, response, and what was known of each token when it was sampled.

    A one-turn example: the prompt ``[5, 9]`` was answered by ``[7, 1]`` (1 ends the sequence)::

        token_ids = [5, 9, 7, 1]
        loss_mask = [0, 0, 1, 1]  # True where the policy sampled the token
        rollout_log_probs = [0, 0, -1.2, -0.1]  # under the distribution that was sampled from
        policy_versions = [0, 0, 3, 3]  # weight updates the sampler had seen
        finish_reason = "stop"

    A second turn appends an observation (``loss_mask`` False) and more sampled tokens.
    """

    request_id: str
    prompt: Prompt
    token_ids: Tensor  # [T_i] int64, prompt and response
    loss_mask: Tensor  # [T_i] bool
    rollout_log_probs: Tensor  # [T_i] float32, after temperature, top-p and top-k; 0 where not sampled
    policy_versions: Tensor  # [T_i] int32
    finish_reason: str  # "stop" (end token or stop string), "length", "abort"
    group_id: int = 0
    index: int = 0
    text: str = ""  # the response decoded, without special tokens; for rewards and people only
    reward: float = 0.0  # weighted sum of `rewards`
    rewards: dict[str, float | None] = field(default_factory=dict)  # by reward name; None: not applicable
    # of the most likely response to its prompt, where that was sampled too
    greedy_reward: float | None = None
    answers: dict[str, str] = field(default_factory=dict)  # by reward name: the answer that it extracted
    valid: bool = True  # False: a reward or the episode failed, to be dropped; no gradient comes from it
    # "error", "timeout" (of its episode or request); the rollout is what there was until then
    failure: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    # ^ of an episode: what came after the prompt, {"role": ..., "content": ...}, sampled turns as "assistant"
    extras: dict[str, Tensor] = field(default_factory=dict)
    # ^ per-token tensors the core passes on. Two it knows, both of a distribution that top-p or top-k cut:
    #   "support_log_mass" [T_i] float32, the log of the probability (after temperature) that was kept;
    #   log-prob over the whole vocabulary = rollout_log_probs + support_log_mass.
    #   "support_ids" [T_i, K] int32, the tokens that were kept, -1 behind them; a row of -1 alone where
    #   nothing was sampled or cut, or more than `Sampling.max_support` tokens were kept.

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one."""
        return len(self.prompt.token_ids)

    @property
    def response_length(self) -> int:
        """Tokens after the prompt, observations of later turns included."""
        return self.token_ids.numel() - len(self.prompt.token_ids)

    @property
    def sampled_length(self) -> int:
        """Tokens that the policy sampled."""
        return int(self.loss_mask.count_nonzero())

    def copy(self) -> Rollout:
        """One with the same fields: what ``dataclasses.replace`` makes, in a third of the time."""
        return Rollout(*_fields_of(self))


def counted(mask: Tensor, lengths: Tensor) -> Tensor:
    """[B] int64: how many tokens of each sequence are marked.

    Args:
        mask: [T] bool, of sequences one after another.
        lengths: [B] of them.
    """
    import numpy as np
    import torch

    ends, marked, count = lengths.cumsum(0).tolist(), mask.cpu().numpy(), np.count_nonzero
    found = [count(marked[start:end]) for start, end in itertools.pairwise([0, *ends])]
    return torch.tensor(found, dtype=torch.int64, device=mask.device)


def sampled_tokens(rollouts: Sequence[Rollout]) -> int:
    """Tokens of all of them that the policy sampled."""
    import torch

    return int(torch.cat([rollout.loss_mask for rollout in rollouts]).count_nonzero()) if rollouts else 0


_fields_of = operator.attrgetter(*(field.name for field in dataclasses.fields(Rollout)))


def decode_texts(rollouts: Iterable[Rollout], tokenizer: Any) -> None:
    """Give their ``text`` to those that came without: the response, without special tokens.

    Args:
        rollouts: changed in place.
        tokenizer: of the run.
    """
    for rollout in rollouts:
        if not rollout.text and rollout.response_length:
            response = rollout.token_ids[rollout.prompt_length :].tolist()
            rollout.text = tokenizer.decode(response, skip_special_tokens=True)


def decode_ended(result: Any, tokenizer: Any) -> None:
    """``decode_texts`` of those that have ended: what a worker does before it answers, for samplers are many and the controller is one.

    Args:
        result: of any command; the rollouts in it, where it is a list of such, are changed in place.
        tokenizer: of the run.
    """
    if isinstance(result, list):
        found = (each for each in result if isinstance(each, Rollout))
        decode_texts((each for each in found if each.finish_reason != "abort"), tokenizer)


@dataclass(slots=True, frozen=True)
class StageState:
    """What a stage keeps from step to step; a checkpoint holds it.

    Neither the values nor the rollouts may change afterwards: a stage gives copies of what it goes on with
    (``dataclasses.replace(rollout)``; the tensors may be shared).
    """

    values: dict[str, Any] = field(default_factory=dict)  # plain values, as JSON knows them
    rollouts: Sequence[Rollout] = ()


@dataclass(slots=True)
class Batch:
    """Sequences one after another without padding, with their columns.

    Two sequences ``[5, 9, 7]`` and ``[5, 1]``::

        token_ids = [5, 9, 7, 5, 1]  # [T]
        lengths = [3, 2]  # [B]
        tokens = {"loss_mask": [0, 0, 1, 0, 1]}  # each [T] or [T, K]
        sequences = {"rewards": [1.0, 0.0]}  # each [B]
    """

    token_ids: Tensor  # [T] int64
    lengths: Tensor  # [B] int64, sums to T
    tokens: dict[str, Tensor] = field(default_factory=dict)
    sequences: dict[str, Tensor] = field(default_factory=dict)
    temperature: float = 1.0  # log-probs and entropies are of softmax(logits / temperature)
    keep_together: Tensor | None = None  # [B] int64: sequences with one id are never split
    top_k: int = 0  # K of the outputs ``top_...``: how many of the likeliest tokens a position

    def __len__(self) -> int:
        """B, the number of sequences."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """T, all tokens."""
        return len(self.token_ids)

    def __getitem__(self, name: str) -> Tensor:
        """The column ``name``, per token or per sequence."""
        if name in self.tokens:
            return self.tokens[name]
        if name in self.sequences:
            return self.sequences[name]
        known = ", ".join(sorted({*self.tokens, *self.sequences})) or "none"
        raise KeyError(f"This batch has no column '{name}'. It has: {known}.")

    def __contains__(self, name: str) -> bool:
        return name in self.tokens or name in self.sequences

    @property
    def sequence_index(self) -> Tensor:
        """[T] int64: which sequence each token belongs to."""
        import torch

        index = torch.arange(len(self.lengths), device=self.lengths.device)
        # on a device the size is told, which would else be waited for
        size = None if self.lengths.device.type == "cpu" else len(self.token_ids)
        return torch.repeat_interleave(index, self.lengths, output_size=size)

    @property
    def offsets(self) -> Tensor:
        """[B + 1] int64: sequence i is ``token_ids[offsets[i]:offsets[i + 1]]``."""
        import torch

        zero = self.lengths.new_zeros(1)
        return torch.cat([zero, self.lengths.cumsum(0)])

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """[T] -> [B]: the sum of ``values`` over each sequence."""
        total = values.new_zeros(len(self.lengths))
        return total.index_add(0, self.sequence_index.to(values.device), values)

    def to_tokens(self, values: Tensor) -> Tensor:
        """[B] -> [T]: each sequence's value at all its tokens."""
        import torch

        plain = values.is_cpu and self.lengths.is_cpu and values.dim() == 1 and not values.requires_grad
        if plain and values.dtype is torch.float32:  # a tenth of what an index and a look-up of it take
            return torch.from_numpy(values.numpy().repeat(self.lengths.numpy()))
        return values[self.sequence_index.to(values.device)]

    def select(self, indices: Sequence[int] | Tensor) -> Batch:
        """The sequences ``indices``, in that order, with all columns."""
        import torch

        chosen = torch.as_tensor(indices, dtype=torch.int64)
        lengths = self.lengths[chosen]
        # position of each token = its own number + how far its sequence moved
        moved = self.offsets[:-1][chosen] - (lengths.cumsum(0) - lengths)
        positions = torch.repeat_interleave(moved, lengths)
        positions += torch.arange(len(positions), device=positions.device)
        return dataclasses.replace(
            self,
            token_ids=self.token_ids.index_select(0, positions.to(self.token_ids.device)),
            lengths=lengths,
            tokens={
                name: column.index_select(0, positions.to(column.device))
                for name, column in self.tokens.items()
            },
            sequences={name: column[chosen] for name, column in self.sequences.items()},
            keep_together=None if self.keep_together is None else self.keep_together[chosen],
        )

    def split(self, parts: Sequence[Sequence[int]]) -> list[Batch]:
        """``select`` of each part; together they are copied once."""
        whole = self.select([index for part in parts for index in part])
        counts = [len(part) for part in parts]
        lengths = whole.lengths.split(counts)
        sizes = [int(each.sum()) for each in lengths]
        tokens = {name: column.split(sizes) for name, column in whole.tokens.items()}
        sequences = {name: column.split(counts) for name, column in whole.sequences.items()}
        together = None if whole.keep_together is None else whole.keep_together.split(counts)
        return [
            dataclasses.replace(
                whole,
                token_ids=ids,
                lengths=lengths[number],
                tokens={name: column[number] for name, column in tokens.items()},
                sequences={name: column[number] for name, column in sequences.items()},
                keep_together=None if together is None else together[number],
            )
            for number, ids in enumerate(whole.token_ids.split(sizes))
        ]

    def with_columns(
        self, tokens: Mapping[str, Tensor] | None = None, sequences: Mapping[str, Tensor] | None = None
    ) -> Batch:
        """A batch of the same sequences with these columns added or replaced."""
        return dataclasses.replace(
            self,
            tokens={**self.tokens, **(tokens or {})},
            sequences={**self.sequences, **(sequences or {})},
        )

    def to(self, device: torch.device | str) -> Batch:
        """A copy whose tensors lie on ``device``."""
        return dataclasses.replace(
            self,
            token_ids=self.token_ids.to(device),
            lengths=self.lengths.to(device),
            tokens={name: column.to(device) for name, column in self.tokens.items()},
            sequences={name: column.to(device) for name, column in self.sequences.items()},
            keep_together=None if self.keep_together is None else self.keep_together.to(device),
        )

    @classmethod
    def from_rollouts(
        cls,
        rollouts: Sequence[Rollout],
        temperature: float = 1.0,
        replay: bool = False,
        joined: Mapping[str, Tensor] | None = None,
    ) -> Batch:
        """Pack rollouts, in their order.

        Token columns: ``loss_mask`` (bool; all False for a rollout that is not ``valid``),
        ``rollout_log_probs`` (over the whole vocabulary, see ``Rollout.extras``), ``policy_versions``
        and every extra that all rollouts carry. Sequence columns: ``rewards``, ``group_ids``,
        ``response_lengths`` (sampled tokens), ``truncated`` (bool), ``valid`` (bool), and
        ``reward/NAME`` for each reward (NaN where it did not apply).

        With ``replay``, and where a rollout tells which tokens were left to sample from, there is the column
        ``support_ids`` [T, K] int32 too: ``log_probs`` of train engines, and ``rollout_log_probs``, are then
        over those tokens alone; where its row is -1, over the whole vocabulary.

        ``joined`` are ``loss_mask`` and ``policy_versions`` of them one after another, where somebody has them: they are
        taken as they are.
        """
        import torch

        def cat(columns: list[Tensor]) -> Tensor:
            return torch.cat(columns) if columns else torch.zeros(0)

        def column(name: str) -> Tensor:
            return joined[name] if joined else cat([getattr(r, name) for r in rollouts])

        mass = "support_log_mass"  # a rollout without it was not cut: the log of 1
        told_extras = [r.extras for r in rollouts if r.extras]  # most runs have none
        has_mass = any(mass in extras for extras in told_extras)
        whole = [r.extras.get(mass, torch.zeros(len(r.token_ids))) for r in rollouts] if has_mass else []
        names = set.intersection(*map(set, told_extras)) if len(told_extras) == len(rollouts) > 0 else set()
        lengths = torch.tensor([r.token_ids.numel() for r in rollouts], dtype=torch.int64)
        sampled = column("loss_mask").bool()
        valid = torch.tensor([r.valid for r in rollouts], dtype=torch.bool)
        tokens = {
            "loss_mask": sampled if bool(valid.all()) else sampled & valid.repeat_interleave(lengths),
            "rollout_log_probs": cat([r.rollout_log_probs for r in rollouts]),
            "policy_versions": column("policy_versions"),
            **{name: cat([r.extras[name] for r in rollouts]) for name in sorted(names - {mass, SUPPORT})},
        }
        as_sampled = tokens["rollout_log_probs"]
        if whole:
            tokens[mass] = cat(whole)
            tokens["rollout_log_probs"] = as_sampled + tokens[mass]
        if replay and any(SUPPORT in extras for extras in told_extras):
            told = [r.extras.get(SUPPORT, torch.empty(len(r.token_ids), 0)) for r in rollouts]
            width = max(ids.shape[1] for ids in told)
            tokens[SUPPORT] = cat([padded_support(ids, width) for ids in told])
            cut = (tokens[SUPPORT] >= 0).any(-1)
            tokens["rollout_log_probs"] = torch.where(cut, as_sampled, tokens["rollout_log_probs"])
        reward_names, nan = sorted({name for r in rollouts for name in r.rewards}), float("nan")
        sequences = {
            "rewards": torch.tensor([r.reward for r in rollouts], dtype=torch.float32),
            "group_ids": torch.tensor([r.group_id for r in rollouts], dtype=torch.int64),
            "response_lengths": counted(sampled, lengths),
            "truncated": torch.tensor([r.finish_reason in CUT for r in rollouts]),
            "valid": valid,
        }
        for name in reward_names:
            values = [nan if r.rewards.get(name) is None else r.rewards[name] for r in rollouts]
            sequences[f"reward/{name}"] = torch.tensor(values, dtype=torch.float32)
        return cls(
            token_ids=cat([r.token_ids for r in rollouts]).long(),
            lengths=lengths,
            tokens=tokens,
            sequences=sequences,
            temperature=temperature,
        )


TENSORS = ("token_ids", "loss_mask", "rollout_log_probs", "policy_versions")
"""Fields of a rollout with a value a token."""
LOG_OF_NOTHING = -1e4
"""Nats: the log of no probability at all; e^-1e4 is 0, and 0 times it is 0."""

CUT = ("length", "abort")
"""Finish reasons of responses that did not come to their own end."""
TIMEOUT = "timeout"
"""``Rollout.failure`` of a response that was stopped at ``Sampling.timeout_s``."""
SUPPORT = "support_ids"
"""Extra of rollouts and column of batches: the tokens that top-p and top-k left to sample from."""


def padded_support(ids: Tensor, width: int) -> Tensor:
    """[N, k] -> [N, width] int32, -1 in what is new."""
    import torch

    return torch.nn.functional.pad(ids.int(), (0, width - ids.shape[1]), value=-1)


@dataclass(slots=True, frozen=True)
class LossCall:
    """A loss by name and parameters: what crosses to a worker in place of code."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)  # plain values only
    outputs: tuple[str, ...] = ("log_probs",)  # what the engine must compute with gradient
    watched: tuple[str, ...] = ()  # what it computes without gradient, for metrics


@dataclass(slots=True)
class TrainOutput:
    """What ``forward_backward`` returns.

    ``metrics`` are reduced over micro-batches and ranks as their names declare, see ``engine_core.metrics``.
    """

    loss: float  # the global loss that was differentiated
    metrics: dict[str, float] = field(default_factory=dict)
    num_micro_batches: int = 0


@dataclass(slots=True)
class StepOutput:
    """What ``optimizer_step`` returns."""

    grad_norm: float  # before clipping
    lr: float  # that this step used; the largest of its parameter groups
    skipped: bool = False  # a gradient was not finite: weights and optimizer were left alone
