"""The adapter of a sampler that keeps its base model: ``[rollout.hf] adapter``.

The base is read from the model's folder and never changes. The first update puts the adapter into the module, as the
train engine does. Later updates replace its tensors.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from engine_core.config.roles import LoRAConfig
from engine_core.contracts.weight_sync import ADAPTER_CONFIG
from engine_core.errors import DataError
from engine_core.runs.state_files import save_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

    from engine_plugin_torch.adapter import Adapter


class OwnAdapter:
    """The adapter of a sampler's module.

    Args:
        module: the base model; the first update inserts the adapter's layers.
        base: folder or name of the base model.
    """

    def __init__(self, module: nn.Module, base: str) -> None:
        self._module, self._base = module, base
        self._adapter: Adapter | None = None
        self._config = b""

    def take(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the adapter by the one in a stream of ``contracts.weight_sync.stream_of``.

        Args:
            stream: first the file ``ADAPTER_CONFIG`` as bytes ``[N]`` uint8, then the adapter's tensors ``[D0, ...]``.
            version: policy version of the update, for messages.

        Raises:
            DataError: the stream is no adapter, has another config than the first one, or lacks tensors; tensors before
                the error have been written.
        """
        items = iter(stream)
        name, value = next(items, ("", None))
        if name != ADAPTER_CONFIG or value is None:
            raise DataError(
                f"The update to version {version} is no adapter: expected {ADAPTER_CONFIG} first, got '{name or 'nothing'}'. "
                "rollout.hf.adapter is for runs with [actor.lora]: remove the key, or add the table."
            )
        config = bytes(value.cpu().numpy())
        if self._adapter is None:
            self._adapter, self._config = self._attached(config, items), config
        elif config != self._config:
            raise DataError(f"The update to version {version} is of another adapter than those before it.")
        else:
            self._adapter.take(items)

    def _attached(self, config: bytes, items: Iterator[tuple[str, Tensor]]) -> Adapter:
        from engine_plugin_torch.lora import attach  # peft is imported where an adapter is used

        with tempfile.TemporaryDirectory(prefix="engine-adapter-") as folder:
            (Path(folder) / ADAPTER_CONFIG).write_bytes(config)
            save_tensors(Path(folder) / "adapter_model.safetensors", dict(items))
            adapter = attach(self._module, LoRAConfig(path=folder), "rollout", 0, self._base)
        self._module.eval()
        return adapter
