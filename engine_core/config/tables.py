"""What every table of the TOML is made of: the base class, and the kinds of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Table(BaseModel):
    """A TOML table with a fixed set of keys.

    Attributes:
        renamed: old names of keys of this table, each with its new name, see ``engine_core.specs.Options``.
    """

    renamed: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_default=True, arbitrary_types_allowed=True
    )
