"""A one-file plugin with trainers that each break one contract of the kit."""

from pydantic import BaseModel

from engine_core import hookimpl
from engine_core.specs import SHARED_SECTIONS, TrainerSpec
from engine_core.types import LossCall
from engine_plugin_trainers.options import SFTOptions
from engine_plugin_trainers.sft import SFTTrainer, example_batch


class Idle(SFTTrainer):
    def step(self, step):
        self.source.take(2)
        return {"actor/loss": 1.0, "actor/grad_norm": 0.0}


class Forgets(SFTTrainer):
    def prepare(self):
        super().prepare()
        self.seen = 0

    def step(self, step):
        self.seen += 1
        with self.phase("train"):
            metrics = self.learn(example_batch(self.source.take(2)), LossCall("nll"))
        return metrics | {"seen": float(self.seen)}


class Interruptible(SFTTrainer):
    def optimizer_step(self, role="actor"):
        with self.signals.window():
            return super().optimizer_step(role)


class Loose(BaseModel):
    epochs: int = 1


@hookimpl
def engine_trainers():
    trainers = {"idle": Idle, "forgets": Forgets, "interruptible": Interruptible, "loose": SFTTrainer}
    return {
        name: TrainerSpec(
            load=trainer,
            config=Loose if name == "loose" else SFTOptions,
            sections=SHARED_SECTIONS | {name},
            required=frozenset({"data"}),
        )
        for name, trainer in trainers.items()
    }
