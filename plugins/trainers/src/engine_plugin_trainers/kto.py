"""KTO: learning from single responses that were judged desirable or undesirable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from engine_core.errors import ConfigError
from engine_core.types import Batch, LossCall
from engine_plugin_trainers.algorithms.preference_columns import mismatched
from engine_plugin_trainers.algorithms.preference_objectives import mismatch_kl
from engine_plugin_trainers.data.preferences import Judged, JudgedPreparer
from engine_plugin_trainers.models import table_length
from engine_plugin_trainers.preference import PreferenceRun

if TYPE_CHECKING:
    from engine_plugin_trainers.options import KTOOptions


class KTOTrainer(PreferenceRun):
    """A trainer that makes desirable responses likelier and undesirable ones less likely, relative to z.

    z is the KL to the reference. It is estimated before each update from responses that are put after other prompts of
    the mini-batch and cut to `kto.max_tokens` and to the model's positions. This takes two passes without gradient.
    """

    needs_reference = True
    table = "kto"
    preparer = JudgedPreparer
    late_metrics = ("rewards/", "logps/")  # a step may lack a kind of responses

    @property
    def options(self) -> KTOOptions:
        """Options of ``[kto]`` at this step."""
        options: KTOOptions = self.config_now.options
        return options

    def prepare(self) -> None:
        """Refuse a mini-batch of one row.

        Raises:
            ConfigError: the loss compares with responses to the prompts of other rows.
        """
        if self.options.loss == "kto" and self.config.data.prompts_per_step < 2:
            raise ConfigError(
                "data.prompts_per_step: got 1, expected at least 2: trainer 'kto' puts each response after the "
                "prompt of another row of the step."
            )

    def batch(self, items: Sequence[Judged]) -> Batch:
        """Pack responses into a batch with their labels and shares."""
        desirable = torch.tensor([item.desirable for item in items], dtype=torch.bool)
        kinds = torch.where(desirable, desirable.sum(), (~desirable).sum())
        loss_mask = torch.tensor([m for item in items for m in item.loss_mask], dtype=torch.bool)
        tokens = loss_mask.float() / loss_mask.sum().clamp(min=1)
        return Batch(
            token_ids=torch.tensor([token for item in items for token in item.token_ids], dtype=torch.int64),
            lengths=torch.tensor([len(item.token_ids) for item in items], dtype=torch.int64),
            tokens={"loss_mask": loss_mask, "weights": tokens, "token_share": tokens},
            sequences={
                "desirable": desirable,
                "share": torch.full((len(items),), 1 / max(len(items), 1)),
                "kind_share": 1 / kinds.clamp(min=1).float(),
            },
        )

    def annotate(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Add ``ref_log_probs`` [T] and ``kl`` [B]."""
        kl = self.mismatch_kl(batch) if self.options.loss == "kto" else 0.0
        batch, _ = super().annotate(batch)
        batch = batch.with_columns(sequences={"kl": torch.full((len(batch),), kl)})
        return batch, {"rewards/kl": kl, "rewards/desirable_share": float(batch["desirable"].double().mean())}

    def defined(self, metrics: Mapping[str, float], batch: Batch) -> dict[str, float]:
        """Return the metrics without those of a kind of responses that the mini-batch lacks, and then without the margin."""
        desirable = batch["desirable"]
        lacks = {"chosen": not bool(desirable.any()), "rejected": bool(desirable.all())}
        lacks["margin"] = any(lacks.values())
        return {name: value for name, value in metrics.items() if not lacks.get(name.partition("/")[2])}

    def mismatch_kl(self, batch: Batch) -> float:
        """Return z, from this batch's responses after other prompts."""
        most = self.options.max_tokens
        others = mismatched(batch, min(table_length(self.text_config) or most, most))
        made = self.groups[self.role].call("infer", others, outputs=("log_probs",)).result()
        return mismatch_kl(made["log_probs"], self.reference_log_probs(others), others)

    def loss_call(self) -> LossCall:
        """Return the objective ``kto`` with the options that it reads."""
        return LossCall("kto", self.options.model_dump(exclude={"max_tokens", "loss"}))
