"""A model folder as ``save_pretrained`` lays it out, from a stream of weights: nobody holds the whole model."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from engine_core.runs import state_files

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

FILE_BYTES = 5 * 10**9  # of one file of an export, as save_pretrained cuts them


def write_model(folder: Path, module: nn.Module, stream: Iterable[tuple[str, Tensor]]) -> None:
    """Weights in files of at most 5 GB with their index, and the config, as ``save_pretrained`` lays them out.

    Args:
        folder: where.
        module: of the config; its weights are not read.
        stream: whole weights by published names.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: list[list[str]] = []
    total, held = 0, 0
    part: dict[str, Tensor] = {}
    for name, tensor in stream:
        size = tensor.numel() * tensor.element_size()
        if part and held + size > FILE_BYTES:
            files.append(_write_file(folder, len(files), part))
            part, held = {}, 0
        part[name] = tensor.detach().to("cpu", copy=True)
        held, total = held + size, total + size
    files.append(_write_file(folder, len(files), part))
    _name_files(folder, files, total)
    _write_config(folder, module, next(iter(part.values())).dtype)


def _write_file(folder: Path, number: int, part: dict[str, Tensor]) -> list[str]:
    state_files.save_tensors(folder / f"part-{number}.safetensors", part)
    return list(part)


def _name_files(folder: Path, files: list[list[str]], total: int) -> None:
    """The names say how many files there are, so they are known at the end."""
    if len(files) == 1:
        (folder / "part-0.safetensors").rename(folder / "model.safetensors")
        return
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": {}}
    for number, names in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{number}.safetensors").rename(folder / name)
        index["weight_map"] |= dict.fromkeys(names, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write_config(folder: Path, module: nn.Module, dtype: torch.dtype) -> None:
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)
    if isinstance(module, PreTrainedModel):
        config.architectures = [type(module).__name__]
        config.dtype = dtype
    config.save_pretrained(folder)
    generation = getattr(module, "generation_config", None)
    if generation is not None and getattr(module, "can_generate", lambda: False)():
        with contextlib.suppress(
            ValueError
        ):  # settings that contradict each other: samplers here do not read it
            generation.save_pretrained(folder)
