"""Checkpoints, exports and device memory of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine_core.errors import DataError
from engine_core.runs import state_files
from engine_plugin_torch import state
from engine_plugin_torch.checkpoint import PARTS
from engine_plugin_torch.export import write_model
from engine_plugin_torch.sharded_checkpoint import BufferStore
from engine_plugin_torch.shards import Shards

if TYPE_CHECKING:
    from engine_plugin_megatron.engine import MegatronEngine
    from engine_plugin_torch.sharded_checkpoint import Parts


class MegatronStore(BufferStore):
    """A store with the names and shapes of a Hugging Face folder, independent of the layout of ranks."""

    engine: MegatronEngine

    def save(self, folder: Path) -> Future[None]:
        """Save a checkpoint; needs weights and optimizer state on the device."""
        self.need("weights", "optimizer")
        return super().save(folder)

    def _copied(self) -> tuple[dict[str, Parts], dict[str, Any]]:
        self.engine._settle()
        return self._parts(), self._scalars()

    def _scalars(self) -> dict[str, Any]:
        scalars = super()._scalars()
        if self.engine.optimizer is not None:
            names = self._ordered_names()
            matrices = [n for n in names if len(self.engine.shapes[n]) >= 2]
            vectors = [n for n in names if len(self.engine.shapes[n]) < 2]
            groups = zip(self.engine.optimizer.param_groups, (matrices, vectors), strict=True)
            scalars["optimizer"] = {
                "groups": [state.named_group(group, members) for group, members in groups],
                "values": {},
            }
        return scalars

    def _parts(self) -> dict[str, Parts]:
        """Return copies of the parts that this rank writes, and their positions, by kind. Collective.

        For 16-bit weights the float32 copies are written.
        """
        from engine_plugin_megatron.models import weights
        from engine_plugin_megatron.optimizer import MAIN, MOMENTS

        files: dict[str, Parts] = {"weights": ({}, {})}

        def keep(kind: str, place: Any, tensor: Tensor, suffix: str) -> None:
            """Copy a tensor in its parameter's shape (e.g. [OUT, IN]) to host memory, if this rank writes it."""
            if not place.writes:
                return
            held, places = files[kind]
            for name, shape, at, part in weights.parts(place, tensor):
                held[name + suffix] = part.to("cpu", copy=True).contiguous()
                places[name + suffix] = {"shape": list(shape), "at": at}

        steps = self.engine.steps
        count = 0 if steps is None else steps.count
        if steps is not None:
            files["optimizer"] = ({}, {})
        for place in weights.names(self.engine.chunks, self.engine.hf_config):
            own = place.tensor.detach() if steps is None else steps.read(place.tensor, MAIN)
            keep("weights", place, own, "")
            if steps is not None and count:
                for key in MOMENTS:
                    keep("optimizer", place, steps.read(place.tensor, key), f"/{key}")
        if count and self.engine.ranks.rank == 0:
            held, places = files["optimizer"]
            for name in self.engine.shapes:
                held[f"{name}/step"] = torch.tensor(float(count))
                places[f"{name}/step"] = {"shape": [], "at": []}
        return files

    def load(self, folder: Path) -> None:
        """Load a checkpoint of any engine of this format, saved on any layout of ranks.

        A rank beyond those that saved keeps its random state.

        Raises:
            DataError: the checkpoint is of another model, or of a role that was not trained. Nothing was changed.
        """
        from engine_plugin_megatron.reading import of_checkpoint

        self.saver.wait()
        self.need(*PARTS)
        scalars = state_files.load_json(folder / state_files.STATE)
        self._check_base(folder, scalars.get("base"))
        shards = Shards(folder, "weights")
        shards.check({name: list(shape) for name, shape in self.engine.shapes.items()}, "this model")
        if self.engine.steps is None:
            self.fill(of_checkpoint(shards))
        else:
            self._check_schedule(folder, scalars)
            moments = Shards(folder, "optimizer")
            count = self._steps_of(moments)
            self.fill(of_checkpoint(shards))
            self._fill_state(moments, count)
        random = state.saved_random(folder, scalars, self.engine.ranks.rank, self.engine.device)
        self._take_scalars(folder, {**scalars, "random": random})

    def _steps_of(self, shards: Shards) -> int:
        """Return the number of steps that a checkpoint's optimizer had taken.

        Raises:
            DataError: the checkpoint lacks the state of a weight.
        """
        from engine_plugin_megatron.optimizer import MOMENTS

        if not shards.shapes:
            return 0
        wanted = [f"{name}/{key}" for name in self.engine.shapes for key in ("step", *MOMENTS)]
        if missing := next((name for name in wanted if name not in shards.shapes), None):
            raise DataError(
                f"{shards.folder} lacks '{missing}' of AdamW's state: its optimizer was another one, or over other weights. "
                "Start a new run from `engine export`."
            )
        return int(shards.whole(wanted[0]))

    @torch.no_grad()
    def fill(self, read: Any) -> None:
        """Fill this rank's weights, and the float32 copies of 16-bit weights."""
        from engine_plugin_megatron.models import weights
        from engine_plugin_megatron.optimizer import MAIN

        for place in weights.names(self.engine.chunks, self.engine.hf_config):
            if self.engine.steps is None:
                weights.fill(place.tensor.detach(), place, read)
                continue
            values = torch.empty_like(place.tensor, dtype=torch.float32)
            weights.fill(values, place, read)
            self.engine.steps.write(place.tensor, MAIN, values)

    @torch.no_grad()
    def _fill_state(self, shards: Shards, count: int) -> None:
        from engine_plugin_megatron.models import weights
        from engine_plugin_megatron.optimizer import MOMENTS
        from engine_plugin_megatron.reading import of_checkpoint

        assert self.engine.steps is not None
        self.engine.steps.restart(count)
        for place in weights.names(self.engine.chunks, self.engine.hf_config) if count else ():
            values = torch.empty_like(place.tensor, dtype=torch.float32)
            for key in MOMENTS:
                weights.fill(values, place, of_checkpoint(shards, f"/{key}"))
                self.engine.steps.write(place.tensor, key, values)

    def _ordered_names(self) -> list[str]:
        """Return the weights' names in the order of the transformers model, as other engines of this format do."""
        from engine_plugin_megatron.reading import own_order

        own = own_order(self.engine.hf_config, self.engine.context.role)
        return own if set(own) == set(self.engine.shapes) else list(self.engine.shapes)

    def _write_model(self, folder: Path, stream: Iterator[tuple[str, Tensor]]) -> None:
        from engine_plugin_megatron.reading import blank_module

        source = self.engine.model_config.path
        write_model(folder, blank_module(self.engine.hf_config, self.engine.context.role, source), stream)

    # -- device memory ------------------------------------------------------

    def sleep(self, keep: Sequence[str] = ()) -> None:
        """Offload weights and optimizer state to host memory and drop gradients, so take the step before."""
        self.engine._settle()
        if self.engine.steps is not None and "gradients" not in {*keep, *self.asleep}:
            self.engine.steps.clear()
        super().sleep(keep)

    def _memory_of(self, part: str) -> list[Tensor]:
        """Return a part's tensors on the device; a float32 weight that is its own optimizer copy counts as weights."""
        own: list[Tensor] = [t.detach() for t in self.engine.module.parameters()]
        if part == "weights":
            return own + [buffer for buffer in self.engine.module.buffers() if buffer.numel()]
        if self.engine.steps is None:
            return []
        if part == "gradients":
            return self.engine.steps.gradient_buffers()
        there = {tensor.untyped_storage().data_ptr() for tensor in own}
        return [t for t in self.engine.steps.tensors() if t.untyped_storage().data_ptr() not in there]
