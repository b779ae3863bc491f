"""Option tables of the trainers other than ``rl``."""

from __future__ import annotations

from pydantic import Field

from engine_core.specs import Options


class OfflineOptions(Options):
    """``[offline]``"""

    unequal_groups: bool = False
    """Accept groups of different sizes, as some stages make them; else they are refused as a sign of a damaged file."""


class SFTOptions(Options):
    """``[sft]``"""

    max_tokens: int = Field(4096, gt=0)
    """Longest sequence; a longer one follows `data.over_long`."""
    train_on_prompt: bool = False
    """Learn the prompt's tokens too."""
