"""A one-file plugin: the trainer ``rl`` with other advantages. Its spec names no sections, so it reads all of them."""

from engine_core import hookimpl
from engine_core.specs import TrainerSpec
from engine_core.train.trainer import Trainer


class Whitened(Trainer):
    def with_advantages(self, batch):
        batch = super().with_advantages(batch)
        learned = batch["advantages"][batch["loss_mask"]]
        spread = learned.std() if len(learned) > 1 else 0.0
        return batch.with_columns(tokens={"advantages": batch["advantages"] / (spread + 1e-6)})


@hookimpl
def engine_trainers():
    return {"whitened": TrainerSpec(load=Whitened)}
