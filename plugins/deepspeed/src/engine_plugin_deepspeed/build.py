"""A model that no machine ever holds whole: built in parts (``deepspeed.zero.Init``), each rank reads its own of the folder.

transformers builds a model in parts as long as an ``HfDeepSpeedConfig`` lives; here it lives for one model, since it
would do the same to every model of the process.
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
from engine_plugin_torch.empty_models import blank_model, fresh_model
from engine_plugin_torch.folder_parts import FolderParts, read_together

if TYPE_CHECKING:
    from engine_core.config import ModelConfig
    from engine_plugin_deepspeed.engine import DeepSpeedEngine

INSTEAD = "Set loading = 'every_rank', with which each rank reads the whole."


class DeepSpeedBuilder(ModelBuilder):
    """``ModelBuilder`` of a model that DeepSpeed takes from the CPU, or that is built in parts.

    Attributes:
        blank: with whole shapes on ``meta``; None where the model is not built in parts.
    """

    engine: DeepSpeedEngine
    blank: nn.Module | None = None

    @property
    def load_device(self) -> torch.device:
        return torch.device("cpu")

    def load(self, model: ModelConfig, live: nn.Module | None) -> nn.Module:
        """Read by every rank, or by each its part."""
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
        """On the CPU still where DeepSpeed moves it, in parts already where it is."""
        if self.blank is not None:
            return module
        if not self.engine._under_zero:
            return super().place(module)
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self.engine._param_dtype)
        return module


def model_in_parts(
    model: ModelConfig, role: str, settings: dict[str, Any], dtype: torch.dtype
) -> tuple[nn.Module, nn.Module]:
    """The module that ``[model]`` gives for a role, in parts and without the folder's weights.

    Args:
        settings: DeepSpeed's config, of stage 3.
        dtype: of the parameters.

    Returns:
        It, and the same with whole shapes on ``meta``. Buffers are real in both.
    """
    from transformers.integrations import HfDeepSpeedConfig

    blank = blank_model(model, role, dtype)
    kept = HfDeepSpeedConfig(settings)
    module = fresh_model(model, role, dtype)
    del kept
    buffers = dict(blank.named_buffers())
    for name, buffer in module.named_buffers():  # zero.Init makes them in the type of the parameters
        buffer.data = buffers[name].to(device=buffer.device, copy=True)
    return module, blank


@torch.no_grad()
def read_parts(module: nn.Module, blank: nn.Module, model: ModelConfig, role: str, key: str) -> FolderParts:
    """Fill a module that is in parts with this rank's parts of the folder's weights. No collective.

    Args:
        blank: the same with whole shapes.
        key: of the option, for messages.

    Returns:
        What they were read from.

    Raises:
        ConfigError: the model's names are not those of its files.
        DataError: weights are missing, left over or of another shape. Nothing was read.
    """
    own: dict[str, Any] = own_parameters(module)
    shapes = {name: list(shape_of(tensor)) for name, tensor in own.items()}
    parts = FolderParts(blank, model, shapes, role, key, INSTEAD)
    for name, tensor in own.items():
        begin, end = _span(tensor)
        tensor.ds_tensor.data.flatten()[: end - begin].copy_(read_flat(parts, name, begin, end))
    return parts


def read_flat(parts: FolderParts, name: str, begin: int, end: int) -> Tensor:
    """The numbers from ``begin`` to ``end`` of a tensor laid out row by row; only rows that hold some are read."""
    shape = parts.shapes[name]
    if begin >= end:
        return torch.empty(0)
    width = math.prod(shape[1:])
    first, last = begin // width, -(-end // width)
    rows = parts.read(name, (slice(first, last), *(slice(0, size) for size in shape[1:])))
    return rows.flatten()[begin - first * width : end - first * width]


def _span(tensor: Any) -> tuple[int, int]:
    """Which numbers of a parameter in parts are this rank's; with more ranks than numbers none."""
    size = tensor.ds_tensor.ds_numel
    begin = min(size * dist.get_rank(tensor.ds_process_group), tensor.ds_numel)
    return begin, min(begin + size, tensor.ds_numel)


@contextlib.contextmanager
def shapes_shown(module: nn.Module) -> Iterator[None]:
    """Within it parameters in parts have the shape of the whole, without its memory: for whoever sorts them by it."""
    hidden = [(p, p.data) for p in module.parameters() if hasattr(p, "ds_id")]
    try:
        for parameter, data in hidden:
            parameter.data = data.new_zeros(1).expand(shape_of(parameter))
        yield
    finally:
        for parameter, data in hidden:
            parameter.data = data
