"""What the engine keeps and gives away: weights to others, checkpoints, exports, device memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine_core.errors import DataError
from engine_core.runs import state_files
from engine_plugin_torch import state
from engine_plugin_torch.checkpoint import PARTS, check_parts
from engine_plugin_torch.data_parallel_state import DataParallelState
from engine_plugin_torch.export import write_model
from engine_plugin_torch.offloaded_buffers import OffloadedBuffers
from engine_plugin_torch.shards import Shards

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from engine_plugin_megatron.optimizer import Steps
    from engine_plugin_megatron.ranks import Ranks
    from engine_plugin_torch.part_saver import Parts


class Keeping(DataParallelState):
    """The part of ``MegatronEngine`` that is about what it holds.

    Attributes:
        chunks: this rank's parts of the model (``GPTModel``).
        steps: the optimizer; None of a role that is not trained.
        shapes: of all the model's weights, by the names of a Hugging Face folder.
    """

    ranks: Ranks
    chunks: list[Any]
    steps: Steps | None
    hf_config: PretrainedConfig
    shapes: dict[str, tuple[int, ...]]
    _shelves: dict[str, OffloadedBuffers]

    # -- weights ------------------------------------------------------------

    def _published(self, adapter: bool) -> Iterator[tuple[str, Tensor]]:
        from engine_plugin_megatron.models import weights

        if adapter:
            self._adapted()
        self._settle()
        return weights.stream(self.chunks, self.hf_config)

    def load_named_weights(self, stream: Iterable[tuple[str, Tensor]], mix: float = 1.0) -> None:
        """See ``TrainEngine``; every rank is given the whole stream and keeps its part."""
        from engine_plugin_megatron.models import weights
        from engine_plugin_megatron.reading import FromStream

        self._need("weights")
        self._settle()
        read = FromStream(stream, self.shapes, weights.wanted(self.chunks, self.hf_config))
        weights.load(self.chunks, self.hf_config, read, mix)
        read.finish()
        if self.steps is not None:
            self.steps.follow_weights()

    def _settle(self) -> None:
        """Weights that are gathered while the next forward pass begins are there."""
        if self.steps is not None:
            self.steps.settle()

    # -- checkpoints --------------------------------------------------------

    def save(self, folder: Path) -> Future[None]:
        self._need("weights", "optimizer")
        return super().save(folder)

    def _copied(self) -> tuple[dict[str, Parts], dict[str, Any]]:
        self._settle()
        return self._parts(), self._scalars()

    def _scalars(self) -> dict[str, Any]:
        scalars = super()._scalars()
        if self.optimizer is not None:
            names = self._ordered_names()
            matrices = [n for n in names if len(self.shapes[n]) >= 2]
            vectors = [n for n in names if len(self.shapes[n]) < 2]
            groups = zip(self.optimizer.param_groups, (matrices, vectors), strict=True)
            scalars["optimizer"] = {
                "groups": [state.named_group(group, members) for group, members in groups],
                "values": {},
            }
        if self.steps is not None and self.steps.loss_scale is not None:
            scalars["loss_scale"] = vars(self.steps.loss_scale)
        return scalars

    def _parts(self) -> dict[str, Parts]:
        """Copies of the parts that this rank writes, and where they lie, by kind. Collective.

        Of weights in 16 bits the float32 copies are written, of which they are the rounded values.
        """
        from engine_plugin_megatron.models import weights
        from engine_plugin_megatron.optimizer import MAIN, MOMENTS

        files: dict[str, Parts] = {"weights": ({}, {})}

        def keep(kind: str, place: Any, tensor: Tensor, suffix: str) -> None:
            if not place.writes:
                return
            held, places = files[kind]
            for name, shape, at, part in weights.parts(place, tensor):
                held[name + suffix] = part.to("cpu", copy=True).contiguous()
                places[name + suffix] = {"shape": list(shape), "at": at}

        stepped = self.steps is not None and self.steps.count > 0
        if self.steps is not None:
            files["optimizer"] = ({}, {})
        for place in weights.names(self.chunks, self.hf_config):
            own = place.tensor.detach() if self.steps is None else self.steps.read(place.tensor, MAIN)
            keep("weights", place, own, "")
            for key in MOMENTS if stepped else ():
                assert self.steps is not None
                keep("optimizer", place, self.steps.read(place.tensor, key), f"/{key}")
        if stepped and self.ranks.rank == 0:
            assert self.steps is not None
            held, places = files["optimizer"]
            for name in self.shapes:
                held[f"{name}/step"] = torch.tensor(float(self.steps.count))
                places[f"{name}/step"] = {"shape": [], "at": []}
        return files

    def load(self, folder: Path) -> None:
        """What any engine of this format saved, on any layout of ranks; a rank beyond those that saved keeps its random state.

        Raises:
            DataError: it is of another model, or of a role that was not trained. Nothing was changed.
        """
        from engine_plugin_megatron.reading import FromShards, check_names

        self._saver.wait()
        self._need(*PARTS)
        scalars = state_files.load_json(folder / state_files.STATE)
        self._check_base(folder, scalars.get("base"))
        shards = Shards(folder, "weights")
        check_names(shards.shapes, self.shapes, str(folder))
        if self.steps is None:
            self._fill(FromShards(shards))
        else:
            self._check_schedule(folder, scalars)
            moments = Shards(folder, "optimizer")
            count = self._steps_of(moments)
            self._fill(FromShards(shards))
            self._fill_state(moments, count)
            if self.steps.loss_scale is not None and "loss_scale" in scalars:
                vars(self.steps.loss_scale).update(scalars["loss_scale"])
        random = state.saved_random(folder, scalars, self.ranks.rank, self.device)
        self._take_scalars(folder, {**scalars, "random": random})

    def _steps_of(self, shards: Shards) -> int:
        """How many steps a checkpoint's optimizer had taken.

        Raises:
            DataError: it lacks the state of a weight.
        """
        from engine_plugin_megatron.optimizer import MOMENTS

        if not shards.shapes:
            return 0
        wanted = [f"{name}/{key}" for name in self.shapes for key in ("step", *MOMENTS)]
        if missing := next((name for name in wanted if name not in shards.shapes), None):
            raise DataError(
                f"{shards.folder} lacks '{missing}' of AdamW's state: its optimizer was another one, or over other weights. "
                "Start a new run from `engine export`."
            )
        return int(shards.whole(wanted[0]))

    @torch.no_grad()
    def _fill(self, read: Any) -> None:
        """Weights of this rank, and the float32 copies of those in 16 bits."""
        from engine_plugin_megatron.models import weights
        from engine_plugin_megatron.optimizer import MAIN

        for place in weights.names(self.chunks, self.hf_config):
            if self.steps is None:
                weights.fill(place.tensor.detach(), place, read)
                continue
            values = torch.empty_like(place.tensor, dtype=torch.float32)
            weights.fill(values, place, read)
            self.steps.write(place.tensor, MAIN, values)

    @torch.no_grad()
    def _fill_state(self, shards: Shards, count: int) -> None:
        from engine_plugin_megatron.models import weights
        from engine_plugin_megatron.optimizer import MOMENTS
        from engine_plugin_megatron.reading import FromShards

        assert self.steps is not None
        self.steps.restart(count)
        for place in weights.names(self.chunks, self.hf_config) if count else ():
            values = torch.empty_like(place.tensor, dtype=torch.float32)
            for key in MOMENTS:
                weights.fill(values, place, FromShards(shards, f"/{key}"))
                self.steps.write(place.tensor, key, values)

    def _ordered_names(self) -> list[str]:
        """The model's weights in the order of the transformers model's own, as other engines of this format write them."""
        from engine_plugin_megatron.reading import own_order

        own = own_order(self.hf_config, self.context.role)
        return own if set(own) == set(self.shapes) else list(self.shapes)

    def _write_model(self, folder: Path, stream: Iterator[tuple[str, Tensor]]) -> None:
        from engine_plugin_megatron.reading import blank_module

        source = self.config.path or self.model_config.path
        write_model(folder, blank_module(self.hf_config, self.context.role, source), stream)

    # -- device memory ------------------------------------------------------

    def sleep(self, keep: Sequence[str] = ()) -> None:
        """Weights and optimizer state go to host memory; gradients are dropped (step before)."""
        check_parts(keep)
        self._settle()
        for part in PARTS:
            if part in keep or part in self._asleep:
                continue
            if part == "gradients" and self.steps is not None:
                self.steps.clear()
            shelf = self._shelves[part] = OffloadedBuffers()
            shelf.put(self._memory_of(part), keep=part != "gradients")
            self._asleep.add(part)
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def wake(self, only: Sequence[str] | None = None) -> None:
        check_parts(only or ())
        for part in PARTS:
            if part in self._asleep and (only is None or part in only):
                self._shelves.pop(part).back()
                self._asleep.discard(part)

    def _memory_of(self, part: str) -> list[Tensor]:
        """What lies on the device of a part; a float32 weight that is stepped itself is the weights'."""
        own: list[Tensor] = [t.detach() for t in self.module.parameters()]
        if part == "weights":
            return own + [buffer for buffer in self.module.buffers() if buffer.numel()]
        if self.steps is None:
            return []
        if part == "gradients":
            return self.steps.gradient_buffers()
        there = {tensor.untyped_storage().data_ptr() for tensor in own}
        return [t for t in self.steps.tensors() if t.untyped_storage().data_ptr() not in there]

    def close(self) -> None:
        super().close()
        if self.steps is not None:
            self.steps.release()
        self.steps, self.chunks, self.models, self.pipeline = None, [], [], None
        self.ranks.close()
