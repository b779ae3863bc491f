"""The forward passes over packed sequences: from token ids to log-probs, or with a value head to one number per token.

Where a model can be split into decoder and head, the head runs only on the positions that predict
loss tokens. Where it cannot, its own ``forward`` gives the logits. A model that is not known to keep
packed sequences separate (custom modules, recurrent layers) gets one sequence at a time.

Both properties are tested on a few tokens before the first use. A model that fails a test gets the
slower path, which is right for every model, and the log says so. Rounding differs between kernels and
shapes and grows with depth: two ways to compute the same value in bfloat16 differ by several percent in
a model of 8B weights. The strict tests therefore compare runs of the same kernels on the same shapes,
where rounding is the same. Comparisons between kernels have a loose tolerance.

A model with a value head has two outputs, which are read from different hidden states:

* ``values[t]`` is read from the hidden state of token t - 1: the expected return before token t is sampled.
  It is the critic's V(s_t), at the same position as the log-prob of token t.
* ``scores[t]`` is read from the hidden state of token t: the score of the sequence up to and including token t.
  At the last token it is a reward model's score, as transformers computes it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine_core.errors import ConfigError, PluginError
from engine_core.model_config import VALUE_HEAD as HEAD
from engine_core.model_config import first_line
from engine_plugin_torch.attention import (
    can_pack,
    check_rope,
    find_prefixes,
    packed,
    packed_arguments,
    watch_windows,
)
from engine_plugin_torch.log_probs import OUTPUTS, Head, columns_at, find_head, gather_outputs, zero_outputs
from engine_plugin_torch.model_loading import accepts
from engine_plugin_torch.transfer import on_host, predicted, send

if TYPE_CHECKING:
    from engine_core.types import Batch

log = logging.getLogger("engine")

KEPT_BYTES = 256 * 2**20
"""Logits of a micro-batch that are always kept for the backward pass."""


class PackedForward:
    """The forward pass of a module over a pack.

    Args:
        module: transformers model, or a module whose ``forward(input_ids, position_ids)`` takes
            [1, T] and returns ``logits`` [1, T, V]. With the attribute ``packs_sequences = True`` such a
            module declares that restarting positions keep sequences separate.
        device: the engine's device.
        compute_dtype: type of the forward pass; autocast is used where it is narrower than the parameters' type.
        chunk: rows of logits that exist at one time.
        compile: compile the computation of log-probs from rows.
        recompute: compute logits again in the backward pass instead of keeping them, unless those of a pack are small.
        share: compute shared prefixes of sequences once, on the CPU with attention ``varlen``; elsewhere nothing is
            shared.
    """

    outputs: tuple[str, ...] = OUTPUTS  #: what it can compute
    one_scale = False  # True: 8-bit products scale all tokens of a pack by the largest of them

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        compute_dtype: torch.dtype,
        chunk: int,
        compile: bool = False,
        recompute: bool = True,
        share: bool = False,
    ) -> None:
        self.module, self.device, self.chunk = module, device, chunk
        self.compile, self.recompute = compile, recompute
        self.compute_dtype = compute_dtype
        self.head: Head | None = find_head(module) if accepts(module, "use_cache") else None
        self.packs = bool(getattr(module, "packs_sequences", _can_pack(module)))
        self.shares = share and device.type == "cpu" and _attention(module) == "varlen"
        self._tried = False

    def __call__(
        self, pack: Batch, grad: Collection[str], watched: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Compute the outputs of one micro-batch.

        Args:
            pack: a batch on the engine's device with at least one token.
            grad: outputs with gradient (where gradients are enabled).
            watched: outputs without gradient.

        Returns:
            [T] float32 each ([T, K] for outputs with several tokens per position, see ``gather_outputs``). Values are
            at loss tokens that have a token before them, and 0 elsewhere.
        """
        self.settle()
        targets = send(predicted(pack), self.device)
        with self.autocast():
            rows = self._rows(pack.token_ids, on_host(pack.lengths))[targets - 1]
            gathered = self._gather(pack, rows, targets, grad, watched)
        zeros = zero_outputs(gathered, pack, self.device)
        found = {name: zeros[name].index_put((targets,), values) for name, values in gathered.items()}
        return {name: v.detach() if name in watched and name not in grad else v for name, v in found.items()}

    def _gather(
        self, pack: Batch, rows: Tensor, targets: Tensor, grad: Collection[str], watched: Collection[str]
    ) -> dict[str, Tensor]:
        """Compute outputs at the tokens ``targets`` [N] of a pack from the rows [N, H] that predict them."""
        return gather_outputs(
            self._logits_of,
            rows,
            pack.token_ids[targets],
            temperature=pack.temperature,
            chunk=self.chunk,
            grad=grad,
            watched=watched,
            columns=columns_at(targets, (*grad, *watched), pack),
            top_k=pack.top_k,
            compile=self.compile,
            recompute=self.recompute and (self.compile or self._logit_bytes(len(targets)) > KEPT_BYTES),
        )

    def _logit_bytes(self, rows: int) -> float:
        """Return the bytes of the logits of ``rows`` positions; infinity if the size of the vocabulary is not known."""
        return 4 * rows * getattr(self.head and self.head.project, "out_features", math.inf)

    def settle(self) -> None:
        """Test head and packing of the module once, before the first use; a failed test chooses the slower path.

        Raises:
            ConfigError: the model is not causal.
        """
        if not self._tried:
            self._try()

    def _logits_of(self, rows: Tensor) -> Tensor:
        return rows.float() if self.head is None else self.head(rows)

    def _rows(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        """Compute hidden states [T, H], or logits [T, V] of a module that cannot be split.

        Args:
            token_ids: [T] of the pack.
            lengths: [B] tokens of each sequence, in host memory.
        """
        if self.packs:
            return self._run(token_ids, lengths)
        parts = zip(token_ids.split(lengths.tolist()), lengths, strict=True)
        return torch.cat([self._run(ids, n[None]) for ids, n in parts if n])

    def _run(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        positions = torch.arange(len(token_ids)) - starts
        lengths = lengths[lengths > 0]
        shared = find_prefixes(token_ids, lengths) if self.packs and self.shares else None
        if shared is not None:
            token_ids, positions = token_ids[shared.kept], positions[shared.kept]
        inputs = {"input_ids": token_ids[None], "position_ids": send(positions, self.device)[None]}
        if not accepts(self.module, "use_cache"):
            return self._result(self.module(**inputs))[0]
        name = _attention(self.module)
        separate = packed_arguments(lengths, self.device, name, shared) if self.packs else {}
        with packed() if self.packs else contextlib.nullcontext():
            if self.head is None:
                rows = _logits(self.module(**inputs, **separate, use_cache=False))[0]
            else:
                decoder: Any = self.module.get_decoder()  # type: ignore[operator]
                rows = decoder(**inputs, **separate, use_cache=False).last_hidden_state[0]
        return rows if shared is None else rows[shared.row]

    def _result(self, output: Any) -> Tensor:
        """Return the logits [1, T, V] from the output of a module that is no transformers model."""
        return _logits(output)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return autocast to the compute type, or no autocast if the weights are not wider than that type.

        Weights that a sharded engine has gathered in half precision stay in it. On CUDA, autocast to float32 would make
        every product of such weights slow.
        """
        own = next(self.module.parameters()).dtype
        if self.compute_dtype.itemsize >= own.itemsize:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.compute_dtype)

    @torch.no_grad()
    def _try(self) -> None:
        """Compare with the module's own logits; choose the slower path where they differ."""
        self._tried = True
        if not accepts(self.module, "use_cache") or not (self.packs or self.head):
            return
        packs, self.packs = self.packs, False  # the first tests use one sequence, which every model computes
        # compiled for no gradient and so few tokens, each graph would be used here alone
        with self.autocast(), torch.compiler.set_stance("force_eager"):
            if self.head and (problem := self._head_problem()):
                log.warning("%s: full logits, which need more memory: %s", _name(self.module), problem)
                self.head = None
            self._check_causal()
            if packs:
                self._try_packing()
            if self.packs and self.shares and not self._shares_rightly():
                log.warning("%s computes shared prefixes for each sequence.", _name(self.module))
                self.shares = False

    def _check_causal(self) -> None:
        """Refuse a model whose tokens see later ones: its log-probs would contain the tokens that they are of.

        Raises:
            ConfigError: the model is not causal.
        """
        ids = probe_ids(self._vocabulary, self.device)
        one, other = (
            self._run(torch.cat([ids[:SECOND], later]), probe_lengths()[:1])[:SECOND]
            for later in (ids[SECOND:FIRST], ids[FIRST:])
        )
        if SAME < differs_by(other, one) < math.inf:  # infinite: weights or activations are not finite
            raise ConfigError(
                f"{_name(self.module)} with attention '{_attention(self.module)}' is not causal: a token sees later ones. "
                "Set model.attention = 'eager', if the model is a decoder."
            )

    def _head_problem(self) -> str:
        """Return why decoder and head do not give the logits of the whole module on one sequence; empty if they do.

        They also do not where the logits depend on further trained parameters, which may not change a value yet: a
        scale of 1, a bias of 0. Then the graph of the whole module reaches them, and that of decoder and head does not.
        """
        further = self._further_parameters()
        try:
            with torch.set_grad_enabled(bool(further)):
                found = self._logits_of(self._alone())
        except AttributeError as error:  # of a class that is not split as those of transformers
            return f"get_decoder() returns no base model with last_hidden_state ({error})."
        head, self.head = self.head, None
        with torch.set_grad_enabled(bool(further)):
            own = self._logits_of(self._alone())
        self.head = head
        if differs_by(found.detach(), own.detach()) > SAME:
            return "its logits are not those that its config describes, of its head on last_hidden_state."
        if missed := _leaves(own).keys() - _leaves(found).keys():
            names = [f"'{name}'" for name, parameter in further.items() if id(parameter) in missed]
            return f"its logits also depend on {', '.join(names) or 'parameters'} outside decoder and head."
        return ""

    def _further_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name that lie neither in the decoder nor in the head."""
        decoder = getattr(self.module, "get_decoder", lambda: None)()
        parts = [part for part in (decoder, self.head and self.head.project) if isinstance(part, nn.Module)]
        known = {id(parameter) for part in parts for parameter in part.parameters()}
        return {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and id(parameter) not in known
        }

    def _try_packing(self) -> None:
        """Run sequences one at a time from now on if the module does not compute a pack rightly; log why."""
        problem = self._packing_problem()
        self.packs = not problem
        if problem:
            log.warning("%s %s: one sequence at a time, which is slower.", _name(self.module), problem)

    def _packing_problem(self) -> str:
        """Return why a pack of sequences does not give the results of each alone; empty if it does."""
        self.packs = False
        with watch_windows() as windows:
            alone = self._alone()
        if not all(windows.values()):
            return "applies its sliding window in the attention mask alone, which a pack does not have"
        self.packs = True
        same = ALIKE if self.one_scale else SAME
        try:
            apart = keeps_apart(lambda ids: self._run(ids, probe_lengths()), alone, self._vocabulary, same)
        except Exception as error:  # its attention code takes masks of their full size only, for example
            return f"does not compute packed sequences ({type(error).__name__}: {first_line(error)})"
        return "" if apart else "mixes packed sequences"

    def _shares_rightly(self) -> bool:
        """Return whether a sequence has the same rows behind a shared prefix as behind its own."""
        ids = probe_ids(self._vocabulary, self.device)
        pack, lengths = torch.cat([ids, ids[:FIRST], ids[FIRST:].flip(0)]), torch.tensor([len(ids)] * 2)
        found = self._run(pack, lengths)[-SECOND:]
        self.shares = False
        own = self._run(pack, lengths)[-SECOND:]
        self.shares = True
        return differs_by(found, own) <= ALIKE

    def _alone(self) -> Tensor:
        """Compute the rows [4, ...] of the probe's second sequence alone."""
        return self._run(probe_ids(self._vocabulary, self.device)[FIRST:], probe_lengths()[1:])

    @property
    def _vocabulary(self) -> int:
        return int(self.module.config.get_text_config().vocab_size)  # type: ignore


def _leaves(value: Tensor) -> dict[int, Tensor]:
    """Return the leaves ``[D1, ..., Dn]`` of a tensor's graph by id; none without a graph."""
    seen: set[Any] = set()
    left, found = [value.grad_fn], {}
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found[id(leaf)] = leaf
        left += [following for following, _ in node.next_functions]
    return found


def _can_pack(module: nn.Module) -> bool:
    """Return whether a module may compute several sequences as one; refuse one that depends on earlier sequences."""
    if not accepts(module, "use_cache"):
        return False
    check_rope(module.config)
    return not getattr(module, "_is_stateful", False) and can_pack(module.config)


def _attention(module: nn.Module) -> str | None:
    """Return the attention implementation of a transformers model; None for another module."""
    config: Any = getattr(module, "config", None)
    return config.get_text_config()._attn_implementation if accepts(module, "use_cache") else None


def _logits(output: object) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits  # type: ignore[attr-defined]


def _name(module: nn.Module) -> str:
    return type(module).__name__


FIRST, SECOND = 8, 4
SAME, ALIKE = 0.03, 0.2  # tolerance, relative to the root mean square: same kernels, different kernels


def probe_ids(vocabulary: int, device: torch.device, other: bool = False) -> Tensor:
    """Return token ids [12] of two sequences; ``other`` replaces the first sequence by a different one."""
    ids = torch.arange(1, FIRST + SECOND + 1, device=device)
    if other:
        ids[:FIRST] = ids[:FIRST].flip(0) + FIRST + SECOND
    return ids % vocabulary


def probe_lengths() -> Tensor:
    """Return the lengths [2] of the two sequences, in host memory."""
    return torch.tensor([FIRST, SECOND])


def keeps_apart(pack: Callable[[Tensor], Tensor], alone: Tensor, vocabulary: int, same: float = SAME) -> bool:
    """Return whether the second sequence of a pack has the same result alone and after different first sequences.

    Args:
        pack: runs the model on ids [12] of two packed sequences and returns [12, ...].
        alone: [4, ...] result of the second sequence alone, from kernels for a single sequence.
        vocabulary: size of the vocabulary.
        same: tolerance between different first sequences: ``ALIKE`` if tokens are rounded by a scale of the whole pack.
    """
    first, other = (pack(probe_ids(vocabulary, alone.device, other))[FIRST:] for other in (False, True))
    return differs_by(other, first) <= same and differs_by(first, alone) <= ALIKE


def differs_by(found: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the difference, relative to that of ``expected``; inf if it is NaN.

    Both tensors have the same shape ``[N, ...]``.
    """
    found, expected = found.float(), expected.float()
    share = float((found - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float32).tiny))
    return share if share == share else float("inf")


class ValueForward(PackedForward):
    """The forward pass that computes ``values`` and ``scores`` of a module for a pack.

    Args:
        module: a transformers model with a head ``score`` (hidden size to 1), or a module whose
            ``forward(input_ids, position_ids)`` takes [1, T] and returns values [1, T] or [1, T, 1], or an
            object with such ``values``, read from each token's own hidden state.
        device: the engine's device.
        compute_dtype: type of the decoder; the head runs in the type of its weights.

    Raises:
        PluginError: ``module`` is a transformers model without that head.
    """

    outputs = ("values", "scores")

    def __init__(self, module: nn.Module, device: torch.device, compute_dtype: torch.dtype) -> None:
        super().__init__(module, device, compute_dtype, chunk=0)
        self.head = None
        if accepts(module, "use_cache"):
            if not isinstance(getattr(module, HEAD, None), nn.Module):
                raise PluginError(
                    f"{type(module).__name__} was built for a critic and has no head '{HEAD}'. "
                    "engine_build_model gives a model with one (hidden size to 1) for this role."
                )
            self.head = Head(getattr(module, HEAD))

    def __call__(
        self, pack: Batch, grad: Collection[str], watched: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Compute the outputs of one micro-batch; arguments as in ``PackedForward``.

        Returns:
            [T] float32 each: ``values`` at loss tokens that have a token before them, ``scores`` at all
            loss tokens; 0 elsewhere.
        """
        self.settle()
        with self.autocast():
            rows = self._rows(pack.token_ids, on_host(pack.lengths))
        scored = on_host(pack["loss_mask"]).nonzero().squeeze(1)
        places = {"scores": send(scored, self.device), "values": send(predicted(pack), self.device)}
        zeros = torch.zeros(pack.num_tokens, dtype=torch.float32, device=self.device)
        found = {}
        for name in dict.fromkeys((*grad, *watched)):
            read = places[name] - 1 if name == "values" else places[name]
            with torch.set_grad_enabled(torch.is_grad_enabled() and name in grad):
                found[name] = zeros.index_put((places[name],), self._numbers(rows[read]))
        return found

    def _numbers(self, rows: Tensor) -> Tensor:
        """Apply the head: [N, H] -> [N] float32."""
        if self.head is None:
            return rows.squeeze(-1).float()
        weight = next(self.head.project.parameters())
        return self.head(rows.to(weight.dtype)).squeeze(-1)  # outside of autocast

    def _result(self, output: Any) -> Tensor:
        """Return the values [1, T, 1] from the output of a module that is no transformers model."""
        values = output if isinstance(output, Tensor) else getattr(output, "values", None)
        if not isinstance(values, Tensor) or values.ndim < 2 or values.shape[2:] not in ((), (1,)):
            given = list(values.shape) if isinstance(values, Tensor) else type(output).__name__
            raise PluginError(
                f"{type(self.module).__name__} was built for a critic, and its forward gives {given}, not values [1, T]. "
                "engine_build_model gives a module for this role that returns them, or an object with 'values'."
            )
        return values if values.ndim == 3 else values[..., None]

    @torch.no_grad()
    def _try(self) -> None:
        """Compare the hidden states of a pack with those of a sequence alone; stop packing where they differ."""
        self._tried = True
        if not accepts(self.module, "use_cache") or not self.packs:
            return
        with self.autocast():
            self._try_packing()
