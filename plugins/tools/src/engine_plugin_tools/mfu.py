"""The model FLOPs utilization (MFU) of a run's steps, by the operations of ``engine bench train``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.model_config import load_hf_config
from engine_plugin_tools.bench.shapes import Cost, flops_of
from engine_plugin_tools.devices import installed_devices

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_core.config import EngineConfig


def device_rate() -> float | None:
    """Return the dense bf16 operations a second of the slowest GPU here; None without one, or if the table lacks one."""
    rates = [flops_of(device.name) for device in installed_devices()]
    return min((rate for rate in rates if rate), default=None) if all(rates) else None


class StepMFU:
    """The MFU of steps; {} if it is unknown: without a GPU, with LoRA, or for a model that is no dense decoder.

    Args:
        config: the run file.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.rate = device_rate() if config.model.path and config.actor.lora is None else None
        self.passes = config.algorithm.epochs
        self.rows = config.data.prompts_per_step
        self.cost = None
        if self.rate:
            self.cost = Cost.of(load_hf_config(config.model).get_text_config(decoder=True).to_dict())

    def of(self, metrics: Mapping[str, float], processes: int) -> dict[str, float]:
        """Return ``throughput/mfu`` of a step, as if its sequences were equally long.

        Args:
            metrics: metrics of the step.
            processes: number of processes of the actor.
        """
        used = any(name.endswith("/peak_gib") and value > 0 for name, value in metrics.items())
        seconds, tokens = metrics.get("time/train"), metrics.get("tokens/total")
        learned = metrics.get("tokens/learned", metrics.get("tokens/generated"))
        if not (self.rate and self.cost and used and seconds and tokens and learned):
            return {}
        sampled = "rollouts" in metrics
        count = max(round(metrics["rollouts"] if sampled else self.rows), 1)
        operations = self.cost.train([tokens / count] * count, min(learned, tokens))
        passes = self.passes if sampled else 1
        return {"throughput/mfu": passes * operations / seconds / self.rate / processes}
