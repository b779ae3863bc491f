"""One forward pass over packed sequences: token ids in, log-probs at the tokens they are about out.

Where a model can be taken apart (decoder, then head) the head runs on the positions that predict
loss tokens only. Where it cannot, its own ``forward`` gives the logits. A model that is not known
to keep packed sequences apart (own modules, recurrent layers) gets one sequence at a time.

Both claims are tried on a few tokens before the first use: a model that breaks one gets the
slower path, which is right for every model, and the log says so.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine_core.engines.attention import packed, packed_arguments
from engine_core.engines.log_probs import (
    OUTPUTS,
    Head,
    columns_at,
    find_head,
    gather_outputs,
    zero_outputs,
)

if TYPE_CHECKING:
    from engine_core.types import Batch

log = logging.getLogger("engine")

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})


class PackedForward:
    """Computes outputs of a module for a pack.

    Args:
        module: transformers model, or a module whose ``forward(input_ids, position_ids)`` takes
            [1, T] and gives ``logits`` [1, T, V]. With an attribute ``packs_sequences = True`` the
            latter promises that positions that begin again keep sequences apart.
        compute_dtype: of the forward pass; autocast where it is not the parameters' own.
        chunk: rows of logits that exist at one time.
        compile: compile what computes log-probs from rows.
        recompute: logits are computed again in the backward pass, instead of kept for it.
    """

    outputs: tuple[str, ...] = OUTPUTS

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        compute_dtype: torch.dtype,
        chunk: int,
        compile: bool = False,
        recompute: bool = True,
    ) -> None:
        self.module, self.device, self.chunk = module, device, chunk
        self.compile, self.recompute = compile, recompute
        self.compute_dtype = compute_dtype
        self.head: Head | None = find_head(module)
        self.packs = bool(getattr(module, "packs_sequences", _attends_only(module)))
        self._tried = False

    def __call__(
        self, pack: Batch, grad: Collection[str], watched: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Outputs of one micro-batch.

        Args:
            pack: on the engine's device, at least one token.
            grad: outputs with gradient (where it is enabled at all).
            watched: outputs without.

        Returns:
            [T] float32 each ([T, K] where an output is of several tokens a position, see ``gather_outputs``): at
            loss tokens that have a token before them, 0 elsewhere.
        """
        self.settle()
        index = pack.sequence_index
        loss_mask = pack["loss_mask"].clone()
        loss_mask[pack.offsets[:-1][pack.lengths > 0]] = False  # nothing predicts a first token
        targets = loss_mask.nonzero().squeeze(1)
        with self.autocast():
            rows = self._rows(pack.token_ids, pack.lengths.cpu(), index)[targets - 1]
            gathered = gather_outputs(
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
                recompute=self.recompute,
            )
        zeros = zero_outputs(gathered, pack, self.device)
        found = {name: zeros[name].index_put((targets,), values) for name, values in gathered.items()}
        return {name: v if name in (*grad, "log_probs") else v.detach() for name, v in found.items()}

    def settle(self) -> None:
        """Find out, before the first use, whether the module is what it seems: one that is not gets the slower path."""
        if not self._tried:
            self._try()

    def _logits_of(self, rows: Tensor) -> Tensor:
        return rows.float() if self.head is None else self.head(rows)

    def _rows(self, token_ids: Tensor, lengths: Tensor, index: Tensor) -> Tensor:
        """[T, H] hidden states, or [T, V] logits of a module that cannot be taken apart."""
        if self.packs:
            return self._run(token_ids, lengths, index)
        parts = zip(token_ids.split(lengths.tolist()), lengths, index.split(lengths.tolist()), strict=True)
        return torch.cat([self._run(ids, n[None], i - i[0]) for ids, n, i in parts if n])

    def _run(self, token_ids: Tensor, lengths: Tensor, index: Tensor) -> Tensor:
        starts = (lengths.cumsum(0) - lengths).to(index.device)
        positions = torch.arange(len(token_ids), device=index.device) - starts[index]
        inputs = {"input_ids": token_ids[None], "position_ids": positions[None]}
        if not isinstance(self.module, PreTrainedModel):
            return self._result(self.module(**inputs))[0]
        lengths = lengths[lengths > 0]
        separate = packed_arguments(lengths, self.device) if self.packs else {}
        with packed() if self.packs else contextlib.nullcontext():
            if self.head is None:
                return _logits(self.module(**inputs, **separate, use_cache=False))[0]
            return self.module.get_decoder()(**inputs, **separate, use_cache=False).last_hidden_state[0]

    def _result(self, output: Any) -> Tensor:
        """[1, T, V] of a module that is not of transformers."""
        return _logits(output)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Downwards only: weights that a sharded engine has gathered in half precision stay in it.

        On CUDA, autocast to float32 is possible, and makes every product of such weights a slow one.
        """
        own = next(self.module.parameters()).dtype
        if self.compute_dtype.itemsize >= own.itemsize:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.compute_dtype)

    @torch.no_grad()
    def _try(self) -> None:
        """Compare with the module's own logits of a sequence alone; fall back where they differ."""
        self._tried = True
        if not isinstance(self.module, PreTrainedModel) or not (self.packs or self.head):
            return
        vocabulary: int = self.module.get_input_embeddings().weight.shape[0]  # type: ignore
        ids = torch.arange(1, 13, device=self.device) % vocabulary
        lengths, index = torch.tensor([8, 4]), torch.tensor([0] * 8 + [1] * 4, device=self.device)
        with self.autocast():
            alone = (
                self.module(
                    input_ids=ids[None, 8:],
                    position_ids=torch.arange(4, device=self.device)[None],
                    use_cache=False,
                )
                .logits[0]
                .float()
            )
            here = torch.arange(4, device=self.device)
            if self.head and not close_to(self._logits_of(self._run(ids[8:], lengths[1:], here * 0)), alone):
                log.warning(
                    "%s has a head that its config does not describe: full logits.", _name(self.module)
                )
                self.head = None
            if self.packs and not close_to(self._logits_of(self._run(ids, lengths, index))[8:], alone):
                mixes(self.module)
                self.packs = False


def _attends_only(module: nn.Module) -> bool:
    """Whether tokens meet only in attention layers: recurrent state runs across packed sequences."""
    if not isinstance(module, PreTrainedModel) or getattr(module, "_is_stateful", False):
        return False
    layers = getattr(module.config.get_text_config(decoder=True), "layer_types", None) or []
    return set(layers) <= ATTENTION_LAYERS


def mixes(module: nn.Module) -> None:
    """Say that a model is not packed."""
    log.warning("%s mixes packed sequences: one sequence at a time, which is slower.", _name(module))


def _logits(output: object) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits  # type: ignore[attr-defined]


def _name(module: nn.Module) -> str:
    return type(module).__name__


def close_to(found: Tensor, expected: Tensor) -> bool:
    """Within 3% of the largest logit: rounding of any type is far below, a leak or a scale far above."""
    return bool((found - expected).abs().max() <= 0.03 * expected.abs().max())
