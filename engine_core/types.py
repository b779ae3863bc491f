"""Core data types, with their shapes and units: Prompt, Request, Rollout, Batch.

Letters in shapes: P prompts per step, G rollouts per prompt, B = P * G sequences, T tokens of all
sequences concatenated, K candidates per position, V vocabulary size.

One convention holds everywhere: **a per-token value is stored at the index of its token.**
``log_probs[t]`` is the log-probability of ``token_ids[t]`` given the tokens before it in the same
sequence; the first token of a sequence has 0 there. Logs are natural.

A batch has no padding: it is the concatenated tokens of its sequences. Code that needs a padded
[B, L] tensor makes it locally.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
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

    id: str  #: "<split>:<row>", the same in every epoch and after a resume
    token_ids: list[int]  #: the prompt as the model sees it, chat template applied
    text: str  #: the same prompt as text
    columns: dict[str, Any] = field(default_factory=dict)  #: the row's other columns, for rewards


@dataclass(slots=True, frozen=True)
class Sampling(SamplingOptions):
    """The sampling options of a request: those of the TOML's ``[rollout]`` table and some of a request alone."""

    seed: int | None = None  #: with a seed the same request gives the same tokens
    #: return the tokens that top-p or top-k kept, if there are at most this many; 0: never
    max_support: int = 0
    log_probs: bool = True  #: False: `Rollout.rollout_log_probs` is not read and may be 0
    timeout_s: float = 0.0  #: counted from queuing; the response is then stopped and kept. 0: no limit

    @classmethod
    def of(cls, *tables: object, **request: Any) -> Sampling:
        """Build sampling options; each option comes from the last table that has it.

        Args:
            tables: tables of a run file, or other ``Sampling`` objects; None in a table counts as missing.
            request: fields that only a request has (``seed``, ``timeout_s``, ...).
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
    """One completion to sample. The rollout's ``request_id`` is its ``id``.

    With ``begun`` the engine continues a stopped response. The rollout is then the whole response, and the tokens
    sampled before keep their log-probs, policy versions and extras (capability ``partial``).
    """

    id: str  #: unique among the requests in flight
    prompt: Prompt  #: what to answer
    sampling: Sampling  #: how to sample
    group_id: int = 0  #: number of the prompt within its step
    index: int = 0  #: position within its group, 0..G-1
    begun: Rollout | None = None  #: what ``abort`` returned; `max_response_tokens` limits the whole response

    def unsampled(self) -> Rollout:
        """Return the request's rollout before any new token is sampled, with finish reason ``abort``."""
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
    """One sampled sequence: prompt, response, and per-token data recorded during sampling.

    A one-turn example: the prompt ``[5, 9]`` was answered by ``[7, 1]`` (1 ends the sequence)::

        token_ids = [5, 9, 7, 1]
        loss_mask = [0, 0, 1, 1]  # True where the policy sampled the token
        rollout_log_probs = [0, 0, -1.2, -0.1]  # under the distribution that was sampled from
        policy_versions = [0, 0, 3, 3]  # weight updates the sampler had received
        finish_reason = "stop"

    A second turn appends an observation (``loss_mask`` False) and more sampled tokens.
    """

    request_id: str  #: id of the request that it answers
    prompt: Prompt  #: the prompt of the request, unchanged
    token_ids: Tensor  #: [T_i] int64, prompt and response
    loss_mask: Tensor  #: [T_i] bool
    rollout_log_probs: Tensor  #: [T_i] float32, after temperature, top-p and top-k; 0 where not sampled
    policy_versions: Tensor  #: [T_i] int32; at prompt tokens 0, or what ``Request.begun`` has
    finish_reason: str  #: "stop" (end token or stop string), "length", "abort" (also after a timeout)
    group_id: int = 0  #: number of its group: the responses to one prompt in one step share it
    index: int = 0  #: position in the group, from 0
    text: str = ""  #: the response decoded, without special tokens; for rewards and people only
    reward: float = 0.0  #: weighted sum of `rewards`
    rewards: dict[str, float | None] = field(default_factory=dict)  #: by reward name; None: not applicable
    #: reward of the greedy response to the same prompt, if that was sampled too
    greedy_reward: float | None = None
    answers: dict[str, str] = field(default_factory=dict)  #: by reward name: the answer that it extracted
    valid: bool = True  #: False: a reward or the episode failed; the rollout is dropped and gives no gradient
    #: "error" or "timeout" (of its episode or request); the rollout ends where the failure happened
    failure: str = ""
    #: of an episode: messages after the prompt, {"role": ..., "content": ...}, sampled turns as "assistant", with the
    #: "seconds" since the message before, and the tool "calls" meanwhile: [{"name", "seconds", "failure"}]
    messages: list[dict[str, Any]] = field(default_factory=list)
    #: per-token tensors that the core passes through. It reads two, which describe a top-p or top-k cut:
    #: "support_log_mass" [T_i] float32, the log of the probability (after temperature) that was kept;
    #: log-prob over the whole vocabulary = rollout_log_probs + support_log_mass.
    #: "support_ids" [T_i, K] int32, the tokens that were kept, padded with -1; a row is all -1 if
    #: nothing was sampled or cut, or if more than `Sampling.max_support` tokens were kept.
    extras: dict[str, Tensor] = field(default_factory=dict)
    #: of an episode: further sequences of its turns, learned with its rewards; see ``sequences_of``
    branches: list[Rollout] = field(default_factory=list)

    @property
    def prompt_length(self) -> int:
        """The number of tokens before the response."""
        return len(self.prompt.token_ids)

    @property
    def response_length(self) -> int:
        """The number of tokens after the prompt, observations of later turns included."""
        return len(self.token_ids) - len(self.prompt.token_ids)

    @property
    def sampled_length(self) -> int:
        """The number of tokens that the policy sampled."""
        return int(self.loss_mask.count_nonzero())


BRANCH = "branch"
"""Column [B] bool of a batch with branches of episodes: True on the sequence of a branch."""
OF_EPISODE = ("group_id", "index", "reward", "rewards", "greedy_reward", "answers", "valid", "failure")
"""Fields of a rollout that the branches of its episode share."""


def sequences_of(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Return the rollouts, each followed by its branches with its group, rewards and id (``4:0:1/1``, ``4:0:1/2``)."""
    found = []
    for rollout in rollouts:
        found.append(rollout)
        for number, branch in enumerate(rollout.branches, 1):
            shared = {name: getattr(rollout, name) for name in OF_EPISODE}
            found.append(dataclasses.replace(branch, request_id=f"{rollout.request_id}/{number}", **shared))
    return found


def repeated(values: Tensor, lengths: Tensor, total: int | None = None) -> Tensor:
    """Return [T, ...]: each of ``values`` [B, ...] as often as ``lengths`` [B] int64 says, without a gradient.

    Args:
        values: [B, ...], on the device of ``lengths``.
        lengths: [B] int64.
        total: T; if it is given, the host need not wait for a device to compute it.
    """
    import torch

    if values.is_cpu and values.dtype is not torch.bfloat16:  # numpy takes an eighth of torch's time
        return torch.from_numpy(values.detach().numpy().repeat(lengths.numpy(), axis=0))
    return torch.repeat_interleave(values.detach(), lengths, dim=0, output_size=total)


def sampled_tokens(rollouts: Sequence[Rollout]) -> int:
    """Return the number of tokens of all rollouts that the policy sampled."""
    import torch

    return int(torch.cat([rollout.loss_mask for rollout in rollouts]).count_nonzero()) if rollouts else 0


def decode_texts(rollouts: Iterable[Rollout], tokenizer: Any) -> None:
    """Fill in missing ``text``: decode the response without special tokens.

    Args:
        rollouts: rollouts, changed in place.
        tokenizer: the run's tokenizer.
    """
    for rollout in rollouts:
        if not rollout.text and rollout.response_length:
            # a tensor, because of a list transformers checks each id's type
            response = rollout.token_ids[rollout.prompt_length :]
            rollout.text = tokenizer.decode(response, skip_special_tokens=True)


@dataclass(slots=True, frozen=True)
class StageState:
    """The state that a stage keeps between steps; it is part of a checkpoint.

    Neither the values nor the rollouts may change afterwards: a stage returns copies of objects that it
    continues to change (``dataclasses.replace(rollout)``; the tensors may be shared).
    """

    values: dict[str, Any] = field(default_factory=dict)  #: plain values that JSON can hold; keys are text
    rollouts: Sequence[Rollout] = ()  #: rollouts that the stage keeps


@dataclass(slots=True)
class Batch:
    """A batch of concatenated sequences, without padding, and their columns.

    Two sequences ``[5, 9, 7]`` and ``[5, 1]``::

        token_ids = [5, 9, 7, 5, 1]  # [T]
        lengths = [3, 2]  # [B]
        tokens = {"loss_mask": [0, 0, 1, 0, 1]}  # each [T] or [T, K]
        sequences = {"rewards": [1.0, 0.0]}  # each [B]

    ``batch[name]`` is a column of either kind (KeyError if there is none), ``name in batch`` says whether there is one, and
    ``len(batch)`` is B, which may be 0.
    """

    token_ids: Tensor  #: [T] int64
    lengths: Tensor  #: [B] int64, sums to T
    tokens: dict[str, Tensor] = field(default_factory=dict)  #: columns by name, each [T] or [T, K]
    sequences: dict[str, Tensor] = field(default_factory=dict)  #: columns by name, each [B]
    temperature: float = 1.0  #: log-probs and entropies are of softmax(logits / temperature)
    keep_together: Tensor | None = None  #: [B] int64: sequences with equal ids are never separated
    top_k: int = 0  #: K of the outputs ``top_...``: the number of most likely tokens per position

    def __len__(self) -> int:
        """Return B, the number of sequences."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens."""
        return len(self.token_ids)

    def __getitem__(self, name: str) -> Tensor:
        """Return the column ``name``, per token ([T, ...]) or per sequence ([B])."""
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
        """[T] int64: the index of each token's sequence."""
        import torch

        numbers = torch.arange(len(self.lengths), device=self.lengths.device)
        return repeated(numbers, self.lengths, self.num_tokens)

    @property
    def offsets(self) -> Tensor:
        """[B + 1] int64: sequence i is ``token_ids[offsets[i]:offsets[i + 1]]``."""
        import torch

        zero = self.lengths.new_zeros(1)
        return torch.cat([zero, self.lengths.cumsum(0)])

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """Return [B]: the sum of ``values`` [T] over each sequence."""
        total = values.new_zeros(len(self.lengths))
        return total.index_add(0, self.sequence_index.to(values.device), values)

    def to_tokens(self, values: Tensor) -> Tensor:
        """Return [T]: the value of its sequence, from ``values`` [B], at each token."""
        if values.requires_grad:
            return values[self.sequence_index.to(values.device)]
        return repeated(values, self.lengths.to(values.device), self.num_tokens)

    def select(self, indices: Sequence[int] | Tensor) -> Batch:
        """Return a batch of the sequences ``indices`` ([N] int64), in that order, with all columns."""
        import torch

        chosen = torch.as_tensor(indices, dtype=torch.int64)
        lengths = self.lengths[chosen]
        # old position of each token = its new position + the shift of its sequence
        moved = self.offsets[:-1][chosen] - (lengths.cumsum(0) - lengths)
        # a batch has less than 2**31 tokens, and int32 takes half the time
        positions = repeated(moved.int(), lengths)
        positions += torch.arange(len(positions), dtype=torch.int32, device=positions.device)
        return self._mapped(
            lambda column: column.index_select(0, positions.to(column.device)), lambda column: column[chosen]
        )

    def _mapped(
        self, per_token: Callable[[Tensor], Tensor], per_sequence: Callable[[Tensor], Tensor]
    ) -> Batch:
        """Return a batch with a function applied to every tensor [T, ...] and one to every tensor [B]."""
        return dataclasses.replace(
            self,
            token_ids=per_token(self.token_ids),
            lengths=per_sequence(self.lengths),
            tokens={name: per_token(column) for name, column in self.tokens.items()},
            sequences={name: per_sequence(column) for name, column in self.sequences.items()},
            keep_together=None if self.keep_together is None else per_sequence(self.keep_together),
        )

    def split(self, counts: Sequence[int]) -> list[Batch]:
        """Return batches of so many consecutive sequences each, whose columns are views."""
        firsts = [0, *itertools.accumulate(counts)]
        starts = self.offsets[firsts].tolist()
        return [
            self._mapped(itemgetter(slice(*tokens)), itemgetter(slice(*sequences)))
            for tokens, sequences in zip(itertools.pairwise(starts), itertools.pairwise(firsts), strict=True)
        ]

    def with_columns(
        self, tokens: Mapping[str, Tensor] | None = None, sequences: Mapping[str, Tensor] | None = None
    ) -> Batch:
        """Return a batch with columns added or replaced: ``tokens`` [T, ...] and ``sequences`` [B]."""
        return dataclasses.replace(
            self,
            tokens={**self.tokens, **(tokens or {})},
            sequences={**self.sequences, **(sequences or {})},
        )

    def to(self, device: torch.device | str) -> Batch:
        """Return a copy with all tensors on ``device``."""

        def moved(column: Tensor) -> Tensor:
            """Return a column, [T, ...] or [B], on the device."""
            return column.to(device)

        return self._mapped(moved, moved)

    @classmethod
    def from_rollouts(
        cls,
        rollouts: Sequence[Rollout],
        temperature: float = 1.0,
        replay: bool = False,
    ) -> Batch:
        """Pack rollouts into a batch, in their order.

        Token columns: ``loss_mask`` (bool; all False for a rollout that is not ``valid``),
        ``rollout_log_probs`` (over the whole vocabulary, see ``Rollout.extras``), ``policy_versions``
        and every extra that all rollouts carry. Sequence columns: ``rewards``, ``group_ids``,
        ``response_lengths`` (sampled tokens), ``truncated`` (bool), ``valid`` (bool), and
        ``reward/NAME`` for each reward (NaN where it did not apply).

        With ``replay``, and if a rollout has the extra ``support_ids``, the batch has the column
        ``support_ids`` [T, K] int32 too. ``rollout_log_probs`` and the ``log_probs`` of train engines are then
        over those tokens alone, or over the whole vocabulary where the row is all -1.
        """
        import torch

        def cat(columns: list[Tensor]) -> Tensor:
            """Concatenate columns [T_i, ...] to [T, ...]."""
            return torch.cat(columns) if columns else torch.zeros(0)

        def column(name: str) -> Tensor:
            """Return the field ``name`` of all rollouts, [T]."""
            return cat([getattr(r, name) for r in rollouts])

        mass = "support_log_mass"  # 0 (the log of 1) for a rollout without it: nothing was cut
        extras = [r.extras for r in rollouts if r.extras]  # most runs have none
        has_mass = any(mass in each for each in extras)
        whole = [r.extras.get(mass, torch.zeros(len(r.token_ids))) for r in rollouts] if has_mass else []
        names = set.intersection(*map(set, extras)) if len(extras) == len(rollouts) > 0 else set()
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
        if replay and any(SUPPORT in each for each in extras):
            supports = [r.extras.get(SUPPORT, torch.empty(len(r.token_ids), 0)) for r in rollouts]
            width = max(ids.shape[1] for ids in supports)
            tokens[SUPPORT] = cat([padded_support(ids, width) for ids in supports])
            cut = (tokens[SUPPORT] >= 0).any(-1)
            tokens["rollout_log_probs"] = torch.where(cut, as_sampled, tokens["rollout_log_probs"])
        reward_names, nan = sorted({name for r in rollouts for name in r.rewards}), float("nan")
        sequences = {
            "rewards": torch.tensor([r.reward for r in rollouts], dtype=torch.float32),
            "group_ids": torch.tensor([r.group_id for r in rollouts], dtype=torch.int64),
            "response_lengths": torch.tensor([r.sampled_length for r in rollouts], dtype=torch.int64),
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


TENSORS = {
    "token_ids": "int64",
    "loss_mask": "bool",
    "rollout_log_probs": "float32",
    "policy_versions": "int32",
}
"""Fields of a rollout with one value per token, with the name of the type in torch, numpy and Arrow."""
LOG_OF_NOTHING = -1e4
"""A finite stand-in for the log of probability 0, in nats: e^-1e4 is 0 in float32, and 0 * -1e4 is 0."""

CUT = ("length", "abort")
"""Finish reasons of responses that were cut off."""
TIMEOUT = "timeout"
"""``Rollout.failure`` of a response that was stopped at ``Sampling.timeout_s``."""
SUPPORT = "support_ids"
"""Extra of rollouts and column of batches: the tokens that top-p and top-k kept."""


def padded_support(ids: Tensor, width: int) -> Tensor:
    """Return ``ids`` [N, k] padded with -1 to [N, width] int32."""
    import torch

    return torch.nn.functional.pad(ids.int(), (0, width - ids.shape[1]), value=-1)


@dataclass(slots=True, frozen=True)
class LossCall:
    """A loss as name and parameters: sent to workers in place of code."""

    name: str  #: a name of the table ``engine_objectives``: policy, value, nll, ...
    parameters: dict[str, Any] = field(default_factory=dict)  #: plain values only
    outputs: tuple[str, ...] = ("log_probs",)  #: what the engine must compute with gradient
    watched: tuple[str, ...] = ()  #: what the engine computes without gradient, for metrics


@dataclass(slots=True)
class TrainOutput:
    """The result of ``forward_backward``; metrics are reduced as their names declare, see ``engine_core.metrics``."""

    loss: float  #: the global loss that was differentiated
    metrics: dict[str, float] = field(default_factory=dict)  #: by name, as plain numbers
    num_micro_batches: int = 0  #: micro-batches of this rank


@dataclass(slots=True)
class StepOutput:
    """The result of ``optimizer_step``."""

    grad_norm: float  #: before clipping
    lr: float  #: the rate of this step; the largest over the parameter groups
    skipped: bool = False  #: True: a gradient was not finite, and weights and optimizer did not change
    rescaled: bool = False  #: True: skipped because gradients overflowed in fp16; the loss scale is lower now
