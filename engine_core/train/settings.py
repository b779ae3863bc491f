"""The settings of a run, which ``[schedule]`` may change from step to step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.config.schedule import config_at

if TYPE_CHECKING:
    from engine_core.config import EngineConfig


class Settings:
    """The config of a run and that of its current step.

    Attributes:
        config: as the run file has it.
        now: with the values that ``[schedule]`` gives for the current step; ``config`` before the first one.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = self.now = config

    def begin(self, step: int) -> None:
        """Use the settings of ``step``; 0 is the state before the first step."""
        self.now = config_at(self.config, step) if step else self.config
