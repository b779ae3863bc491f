"""The forward pass of a model with a value head, from token ids to one number per token.

It has two outputs, which are read from different hidden states:

* ``values[t]`` is read from the hidden state of token t - 1: the expected return before token t is sampled.
  It is the critic's V(s_t), at the same position as the log-prob of token t.
* ``scores[t]`` is read from the hidden state of token t: the score of the sequence up to and including token t.
  At the last token it is a reward model's score, as transformers computes it.
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
    """The forward pass that computes ``values`` and ``scores`` of a module for a pack.

    Args:
        module: a transformers model with a head ``score`` (hidden size to 1), or a module whose
            ``forward(input_ids, position_ids)`` takes [1, T] and returns ``values`` [1, T], read from each
            token's own hidden state.
        device: the engine's device.
        compute_dtype: type of the decoder; the head runs in the type of its weights.

    Raises:
        PluginError: ``module`` is a transformers model without that head.
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
        values = getattr(output, "values", None)
        if not isinstance(values, Tensor):
            raise PluginError(
                f"{type(self.module).__name__} was built for a critic, and its forward gives no tensor 'values' [1, T]. "
                "engine_build_model gives a module for this role whose output has it."
            )
        return values[..., None]

    @torch.no_grad()
    def _try(self) -> None:
        """Compare the hidden states of a pack with those of a sequence alone; stop packing where they differ."""
        self._tried = True
        if not isinstance(self.module, PreTrainedModel) or not self.packs:
            return
        with self.autocast():
            apart = self._packs_apart()
        self.packs = apart
        if not apart:
            mixes(self.module)
