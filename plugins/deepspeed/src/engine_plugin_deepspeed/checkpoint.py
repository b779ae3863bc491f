"""Checkpoints and device memory of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.errors import DataError
from engine_core.runs import state_files
from engine_plugin_torch import state
from engine_plugin_torch.sharded_checkpoint import BufferStore, ShardedStore

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine_plugin_deepspeed.engine import DeepSpeedEngine
    from engine_plugin_torch.sharded_checkpoint import Parts
    from engine_plugin_torch.shards import Shards


class DeepSpeedStore(BufferStore):
    """A store of whole tensors, each written by one rank."""

    engine: DeepSpeedEngine

    def _copied(self) -> tuple[dict[str, Parts], dict[str, Any]]:
        """Return copies of this rank's share of whole tensors, and the scalars. Weights are the float32 copies."""
        return {kind: self._own_share(stream) for kind, stream in self._tensors().items()}, self._scalars()

    def _tensors(self) -> dict[str, Iterable[tuple[str, Tensor]]]:
        """Return the tensors of a checkpoint by file, gathered as they are read. With an adapter: its tensors only."""
        own = (
            self.engine.partitions.exact_weights(self.engine._limit) if self.engine.adapter is None else None
        )
        found: dict[str, Iterable[tuple[str, Tensor]]] = {
            "weights": self.engine._adapted().tensors().items() if own is None else own
        }
        if self.engine.optimizer is None:
            return found
        if self.engine.partitions.zero is None:
            found["optimizer"] = state.optimizer_state(self.engine.optimizer, self.engine.module)[0].items()
        else:
            found["optimizer"] = self._moments()
        return found

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        for name, keys in self.engine.partitions.state_names().items():
            for key in keys:
                yield f"{name}/{key}", self.engine.partitions.state(self.engine.partitions.own[name], key)

    def _own_share(self, stream: Iterable[tuple[str, Tensor]]) -> Parts:
        """Return copies in host memory of the tensors that this rank writes; bytes are balanced over ranks."""
        bytes_of, mine = [0] * self.engine.ranks.size, {}
        for name, tensor in stream:
            writer = min(range(self.engine.ranks.size), key=bytes_of.__getitem__)
            bytes_of[writer] += tensor.numel() * tensor.element_size()
            if writer == self.engine.ranks.rank:
                mine[name] = tensor.to("cpu", copy=True).contiguous()
        return mine, {name: {"shape": list(t.shape), "at": [0] * t.ndim} for name, t in mine.items()}

    def _scalars(self) -> dict[str, Any]:
        """Return the plain values of a checkpoint, in the reference engine's format."""
        found = super()._scalars()
        if self.engine.optimizer is not None:
            groups = zip(self.engine.optimizer.param_groups, self.engine._members, strict=True)
            found["optimizer"] = {
                "groups": [state.named_group(group, names) for group, names in groups],
                "values": self._plain_values(),
            }
        scaler = self.loss_scaler
        if scaler is not None:
            found["loss_scale"] = {
                "factor": scaler.cur_scale,
                "good_steps": scaler.cur_iter - scaler.last_overflow_iter - 1,
            }
        return found

    def _plain_values(self) -> dict[str, Any]:
        """Return the optimizer's values that are not tensors."""
        if self.engine.partitions.zero is not None:
            return self.engine.partitions.plain_values()
        assert self.engine.optimizer is not None
        values: dict[str, Any] = state.optimizer_state(self.engine.optimizer, self.engine.module)[1]["values"]
        return values

    @property
    def loss_scaler(self) -> Any:
        """DeepSpeed's dynamic loss scaler of fp16, or None."""
        scaler = getattr(self.engine.partitions.zero, "loss_scaler", None)
        return scaler if getattr(scaler, "dynamic", False) else None

    def load(self, folder: Path) -> None:
        """Load a checkpoint, with the loss scale; a rank beyond those that saved keeps its random state."""
        super().load(folder)
        saved, scaler = state_files.load_json(folder / state_files.STATE).get("loss_scale"), self.loss_scaler
        if scaler is not None and saved is not None:
            with state_files.reading(folder / state_files.STATE):
                scaler.cur_scale = float(saved["factor"])
                scaler.last_overflow_iter = scaler.cur_iter - 1 - int(saved["good_steps"])

    def _take_weights(self, shards: Shards) -> None:
        places = (
            self.engine.partitions.places() if self.engine.adapter is None else self.engine.adapter.places()
        )
        shapes = {name: list(place.shape) for name, place in places.items()}
        shards.check(shapes, type(self.engine.module).__name__)
        for name, place in places.items():
            place.store(shards.whole(name))

    def _take_optimizer(self, shards: Shards, saved: Mapping[str, Any]) -> None:
        if self.engine.partitions.zero is None:
            super()._take_optimizer(shards, saved)
            return
        members = [group["params"] for group in saved["groups"]]
        state.check_members(self.engine._members, members)
        keys: dict[str, list[str]] = {}
        for path in shards.shapes:
            name, _, key = path.rpartition("/")
            keys.setdefault(name, []).append(key)
        if self.engine.partitions.own.keys() < keys.keys():
            raise DataError("The checkpoint's optimizer keeps state of weights that this model has not.")
        self.engine.partitions.set_state(keys, shards.whole)
        self.engine.partitions.set_plain_values(saved["values"])

    # -- device memory ------------------------------------------------------

    def _move(self, parts: set[str], device: torch.device) -> None:
        """Offload parts to host memory, or bring offloaded parts back.

        DeepSpeed's own offload refuses torch's optimizers at stage 3 and can only bring back all parts at once.
        """
        if self.engine.options.offload_param.device != "none":
            return  # weights are in host memory already
        if self.engine.partitions.zero is None:
            ShardedStore._move(self, parts, device)
            if "weights" in parts:
                self.engine.partitions.move(device)
            return
        super()._move(parts, device)

    def _memory_of(self, part: str) -> list[Tensor]:
        return self.engine.partitions.memory(part, self.engine.device)
