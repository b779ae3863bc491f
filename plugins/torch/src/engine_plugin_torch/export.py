"""The export of a model folder in the layout of ``save_pretrained`` from a stream of weights.

No process holds the whole model.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from engine_core.runs import state_files

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

GENERATION = "generation_config.json"
FILE_BYTES = 5 * 10**9  # most bytes of one exported file, as in save_pretrained


def write_model(folder: Path, module: nn.Module, stream: Iterable[tuple[str, Tensor]]) -> None:
    """Write weights in files of at most 5 GB, their index and the config, in the layout of ``save_pretrained``.

    Args:
        folder: the folder to write; it is created if missing.
        module: the module whose config is written; its weights are not read.
        stream: (published name, whole weight ``[D0, ...]``).

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


def save_model(folder: Path, module: Any, **arguments: Any) -> None:
    """Write a module with its ``save_pretrained``; keep a ``generation_config.json`` that transformers would refuse.

    ``temperature`` without ``do_sample`` is refused, which some older chat models have.

    Args:
        folder: the folder to write.
        module: a module with ``save_pretrained``.
        arguments: further arguments of ``save_pretrained``.
    """
    if not _generates(module):
        module.save_pretrained(folder, **arguments)
        return
    own, module.generation_config = module.generation_config, GenerationConfig()
    try:
        module.save_pretrained(folder, **arguments)
    finally:
        module.generation_config = own
    _write_generation_config(folder, module)


def add_end_token(folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Add the tokenizer's end of sequence to the end tokens of an exported ``generation_config.json``, if both exist.

    A base model's own end token differs from that of a chat model's tokenizer with which it was trained: ``generate``
    would run past the end of each turn.

    Raises:
        OSError: the file cannot be written.
    """
    file, end = folder / GENERATION, getattr(tokenizer, "eos_token_id", None)
    if end is None or not file.is_file():
        return
    config = json.loads(file.read_text("utf-8"))
    known = config.get("eos_token_id")
    known = known if isinstance(known, list) else [] if known is None else [known]
    if end not in known:
        config["eos_token_id"] = [*known, end]
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_file(folder: Path, number: int, part: dict[str, Tensor]) -> list[str]:
    state_files.save_tensors(folder / f"part-{number}.safetensors", part)
    return list(part)


def _name_files(folder: Path, files: list[list[str]], total: int) -> None:
    """Rename the files and write the index; the names contain the number of files, which is known at the end."""
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
        if module.is_remote_code():
            custom_object_save(module, folder, config=config)
    config.save_pretrained(folder)
    if _generates(module):
        _write_generation_config(folder, module)


def _generates(module: nn.Module) -> bool:
    return isinstance(module, PreTrainedModel) and module.can_generate()


def _write_generation_config(folder: Path, module: Any) -> None:
    """Write the file as ``save_pretrained`` does, without its check."""
    module.generation_config.to_json_file(folder / GENERATION, keys_to_pop=["compile_config"])
