"""Sharded loading: the model is built partitioned (``deepspeed.zero.Init``) and each rank reads its part of the folder.

transformers builds models partitioned while an ``HfDeepSpeedConfig`` object exists. Here the object exists for one
model only, since it affects every model of the process.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine_core.contracts.weight_names import own_parameters
from engine_plugin_deepspeed.partitions import shape_of
from engine_plugin_torch.build import ModelBuilder
from engine_plugin_torch.folder_parts import FolderParts, read_together
from engine_plugin_torch.model_loading import cast_parameters
from engine_plugin_torch.skeleton import blank_model, fresh_model

if TYPE_CHECKING:
    from engine_core.config import ModelConfig
    from engine_plugin_deepspeed.engine import DeepSpeedEngine

INSTEAD = "Set loading = 'every_rank', with which each rank reads the whole."


class DeepSpeedBuilder(ModelBuilder):
    """A ``ModelBuilder`` that loads the model to the CPU for DeepSpeed, or builds it partitioned.

    Attributes:
        blank: the model with whole shapes on ``meta``; None where the model is not built partitioned.
    """

    engine: DeepSpeedEngine
    blank: nn.Module | None = None

    @property
    def load_device(self) -> torch.device:
        """The CPU: DeepSpeed moves the model from there."""
        return torch.device("cpu")

    def load(self, model: ModelConfig, live: nn.Module | None) -> nn.Module:
        """Load the model: each rank reads the whole folder, or with ``loading = 'sharded'`` its part."""
        if self.engine.options.loading != "sharded" or live is not None:
            return super().load(model, live)
        role = self.engine.context.role
        module, self.blank = blank = model_in_parts(
            model, role, self.engine._zero_config, self.engine._kept_dtype
        )
        read_together(
            lambda: read_parts(*blank, model, role, f"{self.engine._table}.loading"),
            model.path,
            role,
            self.engine.ranks,
        )
        return module

    def place(self, module: nn.Module) -> nn.Module:
        """Place a role that DeepSpeed does not manage; else leave the module where it is and cast its parameters.

        A partitioned module is left as it is.
        """
        if self.blank is not None:
            return module
        if not self.engine._under_zero:
            return super().place(module)
        return cast_parameters(module, self.engine.precision.param)


def model_in_parts(
    model: ModelConfig, role: str, settings: dict[str, Any], dtype: torch.dtype
) -> tuple[nn.Module, nn.Module]:
    """Build the module of ``[model]`` for a role, partitioned and without the folder's weights.

    Args:
        settings: DeepSpeed's config, of stage 3.
        dtype: type of the parameters.

    Returns:
        The module, and a second one with whole shapes on ``meta``. Buffers are real in both.
    """
    from transformers.integrations import HfDeepSpeedConfig

    blank = blank_model(model, role, dtype)
    kept = HfDeepSpeedConfig(settings)
    module = fresh_model(model, role, dtype)
    del kept
    buffers = dict(blank.named_buffers())
    for name, buffer in module.named_buffers():  # zero.Init casts buffers to the parameters' type
        buffer.data = buffers[name].to(device=buffer.device, copy=True)
    return module, blank


@torch.no_grad()
def read_parts(module: nn.Module, blank: nn.Module, model: ModelConfig, role: str, key: str) -> FolderParts:
    """Fill a partitioned module with this rank's parts of the folder's weights. Not collective.

    Args:
        blank: the same module with whole shapes.
        key: the option's key, for messages.

    Returns:
        The reader of the folder.

    Raises:
        ConfigError: the model's names are not those of its files.
        DataError: weights are missing, left over or of another shape. Nothing was read.
    """
    own: dict[str, Any] = own_parameters(module)
    shapes = {name: shape_of(tensor) for name, tensor in own.items()}
    parts = FolderParts.of(blank, model, shapes, role, key, INSTEAD)
    for name, tensor in own.items():
        begin, end = _span(tensor)
        tensor.ds_tensor.data.flatten()[: end - begin].copy_(read_flat(parts, name, begin, end))
    return parts


def read_flat(parts: FolderParts, name: str, begin: int, end: int) -> Tensor:
    """Return elements ``begin`` to ``end`` of a flattened tensor, as ``[N]``; read only the rows that contain them."""
    shape = parts.shapes[name]
    if begin >= end:
        return torch.empty(0)
    width = math.prod(shape[1:])
    first, last = begin // width, -(-end // width)
    rows = parts.read(name, (slice(first, last), *(slice(0, size) for size in shape[1:])))
    return rows.flatten()[begin - first * width : end - first * width]


def _span(tensor: Any) -> tuple[int, int]:
    """Return the range of a partitioned parameter's elements on this rank; empty past the last element."""
    size = tensor.ds_tensor.ds_numel
    begin = min(size * dist.get_rank(tensor.ds_process_group), tensor.ds_numel)
    return begin, min(begin + size, tensor.ds_numel)


@contextlib.contextmanager
def shapes_shown(module: nn.Module) -> Iterator[None]:
    """Give partitioned parameters their whole shape, without its memory, for code that reads shapes in the context."""
    hidden = [(p, p.data) for p in module.parameters() if hasattr(p, "ds_id")]
    try:
        for parameter, data in hidden:
            parameter.data = data.new_zeros(1).expand(shape_of(parameter))
        yield
    finally:
        for parameter, data in hidden:
            parameter.data = data
