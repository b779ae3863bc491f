"""A LoRA adapter loaded into the running engine without its base: ``[rollout.vllm] adapter``.

vLLM holds the base from the model's folder, in the form its kernels need, and adds the adapter's products. An update
is a peft folder, in memory if the machine allows it, loaded over the previous one. Requests in flight continue with the
new adapter.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine_core.contracts.checksum import Checksum
from engine_core.contracts.weight_sync import ADAPTER_CONFIG, ADAPTER_PREFIX
from engine_core.errors import ConfigError, DataError
from engine_core.temporary_folder import TemporaryFolder
from engine_plugin_vllm_rollout import versions

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

MEMORY = Path("/dev/shm")
WEIGHTS = "adapter_model.safetensors"
NUMBER = 1  # vLLM's own of the only adapter


class AdapterUpdater:
    """Takes streams of adapters into one engine; see ``weights.Updater`` for one that takes models.

    Args:
        engine: vLLM's, that has the base.
    """

    how = "adapter"

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        place = MEMORY if os.access(MEMORY, os.W_OK) else None
        self._folder = TemporaryFolder("vllm-adapter-", place)
        self.touched = False
        self.request: LoRARequest | None = None  # of what is sampled from now on; None: the base

    def take(self, stream: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Replace the adapter; return the checksum of the received tensors ``[R, K]``.

        Raises:
            DataError: the stream is no adapter. The previous adapter stays.
            ConfigError: vLLM cannot load it. The previous adapter stays.
            RuntimeError: responses of the base are in flight, which cannot continue with an adapter. Nothing changed.
        """
        self.touched = False
        if self.request is None and self._engine.has_unfinished_requests():
            raise RuntimeError(
                "The first adapter came while responses of the base are under way. Finish or abort them."
            )
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in stream}
        config = tensors.pop(ADAPTER_CONFIG, None)
        if config is None or not tensors or not all(name.startswith(ADAPTER_PREFIX) for name in tensors):
            raise DataError(
                f"The update to version {version} is no adapter: expected {ADAPTER_CONFIG} and names that begin with "
                f"'{ADAPTER_PREFIX}', got {', '.join([*tensors][:3]) or 'nothing'}."
            )
        pair = {".lora_A.": ".lora_B.", ".lora_B.": ".lora_A."}
        halves = {re.sub(r"\.lora_[AB]\.", lambda half: pair[half[0]], name) for name in tensors}
        if absent := sorted(halves - tensors.keys()):
            raise DataError(f"The update to version {version} is half an adapter: it lacks {absent[0]}.")
        checksum = Checksum()
        checksum.add([(ADAPTER_CONFIG, config), *tensors.items()])
        folder = Path(self._folder.path) / str(version)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save_file(tensors, folder / WEIGHTS)
        (folder / ADAPTER_CONFIG).write_bytes(config.to(torch.uint8).numpy().tobytes())
        try:
            self.request = versions.load_adapter(self._engine, NUMBER, folder)
        except ValueError as error:  # it was looked at before the one before was taken out
            shutil.rmtree(folder)
            raise ConfigError(
                f"rollout.vllm.adapter: vLLM does not take this adapter: {error} Raise rollout.vllm.max_lora_rank where it is "
                "the rank; else leave the key out: merged weights are then handed over."
            ) from error
        for old in Path(self._folder.path).iterdir():
            if old != folder:
                shutil.rmtree(old)
        return checksum.result()

    def close(self) -> None:
        """Remove the folder."""
        self._folder.remove()
