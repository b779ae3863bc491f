"""What the engine keeps and gives away: weights to others, checkpoints, exports, device memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine_core.engines import state
from engine_core.engines.data_parallel import DataParallel
from engine_core.engines.export import write_model
from engine_core.engines.shards import Shards, shard_file, write_parts
from engine_core.engines.weights import published_weights, take_weights, to_own_names
from engine_core.errors import DataError

if TYPE_CHECKING:
    from engine_core.engines.skeleton import Skeleton
    from engine_plugin_deepspeed.options import DeepSpeedOptions
    from engine_plugin_deepspeed.partitions import Partitions


class Keeping(DataParallel):
    """The part of ``DeepSpeedEngine`` that is about what it holds."""

    options: DeepSpeedOptions
    partitions: Partitions
    skeleton: Skeleton | None
    zero: Any
    _members: list[list[str]]

    # -- weights ------------------------------------------------------------

    @property
    def _limit(self) -> int:
        return self.options.weights_bucket_mb * 2**20

    @property
    def _plain(self) -> nn.Module:
        """The module by which names are told: with whole shapes, where there is such a copy."""
        return self.module if self.skeleton is None else self.skeleton.module

    def named_weights(self, to: str = "all", adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See ``TrainEngine``; in the type that computes. For the leader alone the other ranks take part and get nothing."""
        self._need("weights")
        gets = to == "all" or self.ranks.rank == 0
        for name, tensor in published_weights(self._plain, self.partitions.weights(self._limit)):
            if gets:
                yield name, tensor

    def load_named_weights(self, stream: Iterable[tuple[str, Tensor]], mix: float = 1.0) -> None:
        """See ``TrainEngine``; every rank is given the whole stream and keeps its part."""
        self._need("weights")
        take_weights(self.module, to_own_names(self._plain, stream), mix, self.partitions.places())

    @property
    def lends_whole(self) -> bool:
        return self.skeleton is not None or self.ranks.size == 1

    @contextlib.contextmanager
    def generation_module(self) -> Iterator[nn.Module]:
        """The whole model on every rank, in the type of the forward pass; its memory is free again after it.

        It gathers nothing while it is used, so that ranks may sample different numbers of tokens. Where weights are
        whole on every rank anyway, it is the module itself.
        """
        self._need("weights")
        if self.skeleton is None or not self.partitions.spread:
            with super().generation_module() as module:
                yield module
            return

        def placed() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.partitions.weights(self._limit):
                changes = tensor.is_floating_point() and tensor.dtype != self.precision.compute
                yield name, tensor.to(self.device, self.precision.compute if changes else tensor.dtype)

        with self.skeleton.filled(placed()) as module, torch.no_grad():
            yield module

    # -- checkpoints --------------------------------------------------------

    def save(self, folder: Path) -> Future[None]:
        """Whole tensors by name, each of them in the file of one rank, written in a thread from host memory.

        Weights are those that a step changes: float32. The future is this rank's own. Training may go on at once; a
        second save waits for the first.
        """
        self._wait_for_save()
        parts = {kind: self._own_share(stream) for kind, stream in self._tensors().items()}
        scalars, mine = self._scalars(), {"random": self._random or state.random_state(self.device)}
        rank, size, described = self.ranks.rank, self.ranks.size, self.ranks.described
        done: Future[None] = Future()

        def write() -> None:
            try:  # all that a disk can refuse: up to here ranks may wait for each other, from here on none does
                folder.mkdir(parents=True, exist_ok=True)
                for kind, held in parts.items():
                    places = {n: {"shape": list(t.shape), "at": [0] * t.ndim} for n, t in held.items()}
                    write_parts(folder / shard_file(kind, rank, size), held, places)
                state.save_json(folder / state.rank_file(rank), mine)
                if rank == 0:
                    state.save_json(folder / state.STATE, {**scalars, **described})
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._saving = threading.Thread(target=write, name="deepspeed-save", daemon=False)
        self._saving.start()
        return done

    def _tensors(self) -> dict[str, Iterable[tuple[str, Tensor]]]:
        """What a checkpoint holds, by file; gathered as it is asked for."""
        found: dict[str, Iterable[tuple[str, Tensor]]] = {
            "weights": self.partitions.exact_weights(self._limit)
        }
        if self.optimizer is None:
            return found
        if self.partitions.zero is None:
            found["optimizer"] = state.optimizer_state(self.optimizer, self.module)[0].items()
        else:
            found["optimizer"] = self._moments()
        return found

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        for name, keys in self.partitions.state_names().items():
            for key in keys:
                yield f"{name}/{key}", self.partitions.state(self.partitions.own[name], key)

    def _own_share(self, stream: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copies in host memory of the tensors that this rank writes: about as many bytes as any other."""
        bytes_of, mine = [0] * self.ranks.size, {}
        for name, tensor in stream:
            writer = min(range(self.ranks.size), key=bytes_of.__getitem__)
            bytes_of[writer] += tensor.numel() * tensor.element_size()
            if writer == self.ranks.rank:
                mine[name] = tensor.to("cpu", copy=True).contiguous()
        return mine

    def _scalars(self) -> dict[str, Any]:
        """Plain values of a checkpoint, as the reference engine writes them."""
        found: dict[str, Any] = {
            "format": state.FORMAT,
            "num_skipped_steps": self.num_skipped_steps,
            "base": None,
        }
        if self.optimizer is not None:
            groups = [
                {**{key: value for key, value in group.items() if key != "params"}, "params": names}
                for group, names in zip(self.optimizer.param_groups, self._members, strict=True)
            ]
            found["optimizer"] = {"groups": groups, "values": self._plain_values()}
        if self.lr_scheduler is not None:
            found["lr_scheduler"] = self.lr_scheduler.state_dict()
        scaler = self._loss_scaler
        if scaler is not None:
            found["loss_scale"] = {
                "factor": scaler.cur_scale,
                "good_steps": scaler.cur_iter - scaler.last_overflow_iter - 1,
            }
        return found

    def _plain_values(self) -> dict[str, Any]:
        """What the optimizer keeps of a weight that is no tensor."""
        if self.partitions.zero is not None:
            return self.partitions.plain_values()
        assert self.optimizer is not None
        values: dict[str, Any] = state.optimizer_state(self.optimizer, self.module)[1]["values"]
        return values

    @property
    def _loss_scaler(self) -> Any:
        """DeepSpeed's, of fp16."""
        scaler = getattr(self.partitions.zero, "loss_scaler", None)
        return scaler if getattr(scaler, "dynamic", False) else None

    def load(self, folder: Path) -> None:
        """See ``TorchState``; a rank beyond those that saved keeps its random state."""
        self._wait_for_save()
        super().load(folder)
        saved, scaler = state.load_json(folder / state.STATE).get("loss_scale"), self._loss_scaler
        if scaler is not None and saved is not None:
            with state.reading(folder / state.STATE):
                scaler.cur_scale = float(saved["factor"])
                scaler.last_overflow_iter = scaler.cur_iter - 1 - int(saved["good_steps"])

    def _take_weights(self, shards: Shards) -> None:
        shards.check(self.partitions.shapes(), type(self.module).__name__)
        for name, place in self.partitions.places().items():
            place.store(shards.whole(name))

    def _take_optimizer(self, shards: Shards, saved: Mapping[str, Any]) -> None:
        if self.partitions.zero is None:
            super()._take_optimizer(shards, saved)
            return
        members = [group["params"] for group in saved["groups"]]
        if members != self._members:
            changed = sorted({n for g in members for n in g} ^ {n for g in self._members for n in g})
            raise DataError(
                "The checkpoint's optimizer is over other parameters than this one's: "
                f"{', '.join(changed[:5]) or 'the groups differ'}. Is it a checkpoint of another model?"
            )
        values: dict[str, _OnDemand] = {}
        for path in shards.shapes:
            name, _, key = path.rpartition("/")
            values.setdefault(name, _OnDemand(shards, name)).keys_.append(key)
        if self.partitions.own.keys() < values.keys():
            raise DataError("The checkpoint's optimizer keeps state of weights that this model has not.")
        self.partitions.set_state(values)
        self.partitions.set_plain_values(saved["values"])

    def _wait_for_save(self) -> None:
        thread = getattr(self, "_saving", None)
        if thread is not None:
            thread.join()

    def export(self, folder: Path, adapter: bool = False) -> None:
        """A Hugging Face folder, written by the first rank a few tensors at a time: it never holds the whole model.

        Raises:
            OSError: it cannot be written; every rank raises, and a part of it may be there.
        """
        self._need("weights")
        stream = self.named_weights(to="leader")
        error: Exception | None = None
        try:
            if self.ranks.rank == 0:
                write_model(folder, self._plain, stream)
                if not hasattr(getattr(self._plain, "config", None), "save_pretrained"):
                    state.copy_config(
                        self.config.path or self.model_config.path, self.model_config.override, folder
                    )
        except OSError as problem:
            error = problem
        for _ in stream:  # every rank gathers to the end, whatever happened to the file
            pass
        self.ranks.share(error, f"Writing {folder}")

    # -- device memory ------------------------------------------------------

    def _move(self, parts: set[str], device: torch.device) -> None:
        """DeepSpeed moves what it keeps, all of it back at once: parts that wake wait for the last of them."""
        if self.device.type == "cpu" or self.options.offload_param.device != "none":
            return  # where weights wait in host memory, DeepSpeed moves nothing else
        if self.partitions.zero is None:
            super()._move(parts, device)
            if "weights" in parts:
                self.partitions.move(device)
            return
        if device.type == "cpu":
            kinds = [kind for part in sorted(parts) for kind in MOVED[part]]
            self.zero.offload_states(include=kinds, pin_memory=False)
        else:
            self.zero.reload_states()

    def close(self) -> None:
        self._wait_for_save()
        super().close()


MOVED = {
    "weights": ("lp_params", "hp_params"),
    "gradients": ("lp_grads", "contiguous_grad_buffer"),
    "optimizer": ("optim_states",),
}
"""What DeepSpeed calls the parts of an engine."""


class _OnDemand(Mapping[str, Tensor]):
    """The optimizer's tensors of one weight in a checkpoint, read when they are asked for."""

    def __init__(self, shards: Shards, name: str) -> None:
        self.shards, self.name = shards, name
        self.keys_: list[str] = []

    def __getitem__(self, key: str) -> Tensor:
        return self.shards.whole(f"{self.name}/{key}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_)

    def __len__(self) -> int:
        return len(self.keys_)
