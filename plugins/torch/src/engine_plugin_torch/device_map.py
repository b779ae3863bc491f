"""A frozen model that is larger than one device: its layers are spread over accelerators, host memory and disk.

transformers and accelerate do the work. The model is built without weights, ``infer_auto_device_map`` places its
layers by the bytes that each device may hold, weights are read straight to their place, and hooks bring a layer's
weights to the device that computes and remove them again. Weights on ``disk`` are read from the model's own safetensors
in each pass. Only weights that transformers changes while it reads them (experts of a mixture) are written to a folder.

Not supported: weights that are trained, or read by others (a sampler, a checkpoint). Engines that shard spread those.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine_core.config.completeness import device_map_problem
from engine_core.errors import ConfigError, did_you_mean
from engine_core.temporary_folder import TemporaryFolder
from engine_plugin_torch.memory import Held
from engine_plugin_torch.options import bytes_of
from engine_plugin_torch.units import decoder_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from engine_core.contracts.engines import WorkerContext
    from engine_plugin_torch.options import DeviceMapOptions

MIB = 1024**2
DISK = "disk"


def check_device_map(options: Any, context: WorkerContext, table: str, trainable: bool, lora: bool) -> None:
    """Refuse a device map that cannot work, before anything is allocated.

    Args:
        options: the backend's table.
        context: context of the worker.
        table: name of the options' table, for messages: ``ref.torch``.
        trainable: the role's weights are trained.
        lora: the role has an adapter.

    Raises:
        ConfigError: the role's weights change, the package is missing, or a device or folder does not exist.
    """
    if getattr(options, "device_map", None) is None:
        return
    changes = trainable or (context.total_steps > 0 and not context.frozen)
    if problem := device_map_problem(table, frozen=not changes, lora=lora):
        raise ConfigError(problem)
    if context.live is not None and "model" in context.live and context.role in ("actor", "ref"):
        raise ConfigError(
            f"{table}.device_map: the model is given from Python, and lies whole in memory already. Save it and name the "
            f"folder ({context.role}.path), or leave the key out."
        )
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    known = ["cpu", *map(str, range(count))]
    for name in options.max_memory:
        if name not in known:
            raise ConfigError(
                f"{table}.max_memory: '{name}' is no device of this machine, which has {', '.join(known)}."
                f"{did_you_mean(name, known)} What fits nowhere goes to disk."
            )
    folder = options.offload_folder
    if folder and not Path(folder).is_dir():
        raise ConfigError(
            f"{table}.offload_folder: '{folder}' is no folder on this machine. Make it, on a local disk, or leave the key out."
        )


class SpreadModel:
    """The placement of one role's model over devices, with its offload folder.

    Args:
        options: options of the role, with `device_map`.

    Attributes:
        folder: the folder for weights that cannot be read from the model's own files; ``close`` removes it.
        used: whether a model was read with ``arguments``.
    """

    def __init__(self, options: DeviceMapOptions) -> None:
        self.options = options
        self._folder = TemporaryFolder("offload-", options.offload_folder or None)
        self.folder = Path(self._folder.path)
        self.used = False
        self._away: dict[int, torch.device] = {}

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for ``from_pretrained``."""
        self.used = True
        limits = {
            int(name) if name.isdigit() else name: bytes_of(size)
            for name, size in self.options.max_memory.items()
        }
        made: dict[str, Any] = {"device_map": self.options.device_map, "offload_folder": str(self.folder)}
        return made | ({"max_memory": limits} if limits else {})

    def bytes_by_device(self, module: nn.Module) -> dict[str, int]:
        """Return the bytes of weights that each device holds between passes, and of ``disk``; tied weights once."""
        found: dict[str, int] = {}
        for tensor in module.parameters():
            where = DISK if tensor.is_meta else str(tensor.device)
            found[where] = found.get(where, 0) + _size(tensor)
        placed = getattr(module, "hf_device_map", {})
        if placed and "cpu" in placed.values() and set(placed.values()) - {"cpu", DISK}:
            # with an accelerator, layers in host memory are on ``meta`` like those on disk: hooks hold their weights
            found |= _split(found.get(DISK, 0), _on_disk(module, placed))
        return {name: size for name, size in found.items() if size}

    def describe(self, module: nn.Module) -> str:
        """Return the bytes by device as text for logs."""
        sizes = self.bytes_by_device(module)
        return ", ".join(f"{size / MIB:.1f} MiB on {name}" for name, size in sizes.items())

    def held(self, module: nn.Module, device: torch.device) -> Held:
        """Return the bytes on the device that computes: its own layers and the largest layer brought in for a pass."""
        mine = sum(_size(p) for p in module.parameters() if p.device.type == device.type)
        layers = [module.get_submodule(name) for name in decoder_layers(module)]
        visiting = (sum(_size(p) for p in layer.parameters() if p.is_meta) for layer in layers)
        return Held(mine, gathered=max(visiting, default=0))

    def move(self, module: nn.Module, away: bool) -> None:
        """Move tensors from accelerators to host memory (``away``), or back to their devices; others stay."""
        for tensor in (*module.parameters(), *module.buffers()):
            if away and tensor.device.type not in ("cpu", "meta"):
                self._away[id(tensor)] = tensor.device
                tensor.data = tensor.data.to("cpu")
            elif not away and id(tensor) in self._away:
                tensor.data = tensor.data.to(self._away.pop(id(tensor)))

    def close(self) -> None:
        """Remove the folder."""
        self._folder.remove()


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _on_disk(module: nn.Module, placed: dict[str, Any]) -> int:
    """Return the bytes of the weights that the map puts on disk."""
    return sum(_size(p) for name, p in module.named_parameters() if _place(name, placed) == DISK)


def _place(name: str, placed: dict[str, Any]) -> Any:
    """Return the device of a weight: the map's entry with the longest prefix of its name."""
    return next((placed[prefix] for prefix in _beginnings(name) if prefix in placed), None)


def _beginnings(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _split(both: int, disk: int) -> dict[str, int]:
    return {"cpu": both - disk, DISK: disk}
