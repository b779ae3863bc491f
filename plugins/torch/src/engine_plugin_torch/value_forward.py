"""One forward pass of a model with a value head: token ids in, one number a token out.

Two outputs, which differ in the hidden state that they are read from:

* ``values[t]``, read from the hidden state of token t - 1: what is expected before token t is sampled.
  That is the critic's V(s_t), and it stands at token t like the log-prob of token t.
* ``scores[t]``, read from the hidden state of token t itself: what is thought of the sequence up to and
  with token t. At the last token that is a reward model's score, as transformers computes it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine_core.errors import PluginError
from engine_core.model_config import VALUE_HEAD as HEAD
from engine_plugin_torch.log_probs import Head
from engine_plugin_torch.packed_forward import PackedForward, mixes
from engine_plugin_torch.transfer import on_host, predicted, send

if TYPE_CHECKING:
    from engine_core.types import Batch


class ValueForward(PackedForward):
    """Computes ``values`` and ``scores`` of a module for a pack.

    Args:
        module: a transformers model with a head ``score`` (hidden size to 1), or a module whose
            ``forward(input_ids, position_ids)`` takes [1, T] and gives ``values`` [1, T], read from each
            token's own hidden state.
        compute_dtype: of the decoder; the head runs in the type of its weights.

    Raises:
        PluginError: a transformers model without that head.
    """

    outputs = ("values", "scores")

    def __init__(self, module: nn.Module, device: torch.device, compute_dtype: torch.dtype) -> None:
        super().__init__(module, device, compute_dtype, chunk=0)
        self.head = None
        if isinstance(module, PreTrainedModel):
            if not isinstance(getattr(module, HEAD, None), nn.Module):
                raise PluginError(
                    f"{type(module).__name__} was built for a critic and has no head '{HEAD}'. "
                    "engine_build_model gives a model with one (hidden size to 1) for this role."
                )
            self.head = Head(getattr(module, HEAD))

    def __call__(
        self, pack: Batch, grad: Collection[str], watched: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Outputs of one micro-batch; see ``PackedForward``.

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
        """[N, H] -> [N] float32."""
        if self.head is None:
            return rows.squeeze(-1).float()
        weight = next(self.head.project.parameters())
        return self.head(rows.to(weight.dtype)).squeeze(-1)  # outside of autocast

    def _result(self, output: Any) -> Tensor:
        """[1, T, 1] of a module that is not of transformers."""
        values = getattr(output, "values", None)
        if not isinstance(values, Tensor):
            raise PluginError(
                f"{type(self.module).__name__} was built for a critic, and its forward gives no tensor 'values' [1, T]. "
                "engine_build_model gives a module for this role whose output has it."
            )
        return values[..., None]

    @torch.no_grad()
    def _try(self) -> None:
        """Compare hidden states of a pack with those of a sequence alone."""
        self._tried = True
        if not isinstance(self.module, PreTrainedModel) or not self.packs:
            return
        with self.autocast():
            apart = self._packs_apart()
        self.packs = apart
        if not apart:
            mixes(self.module)
