"""Checkpoints, exports and offloading of the reference engine."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine_core.contracts.weight_names import own_weights
from engine_core.errors import DataError, did_you_mean
from engine_core.runs import state_files
from engine_plugin_torch import state
from engine_plugin_torch.export import add_end_token, save_model
from engine_plugin_torch.optimizers import peak_rates, set_peak_lr
from engine_plugin_torch.shards import Shards, optimizer_tensors
from engine_plugin_torch.weights import places, weight_at

if TYPE_CHECKING:
    from engine_plugin_torch.engine import TorchEngine

PARTS = ("weights", "gradients", "optimizer")


class StateStore:
    """The part of an engine that saves, loads, exports and offloads its state.

    A backend overrides the content of a checkpoint and its place.

    Attributes:
        engine: the engine that this is a part of; a weak reference, so the engine is freed without a cycle.
        asleep: the members of ``PARTS`` that are not on the device now.
    """

    engine: TorchEngine

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = weakref.proxy(engine)
        self.asleep: set[str] = set()
        self._random: dict[str, str] | None = None  # random state at the last ``mark``

    def mark(self) -> None:
        """Keep the present random state for the next ``save``."""
        self._random = state.random_state(self.engine.device)

    def save(self, folder: Path) -> Future[None]:
        """Write tensors in safetensors and scalars in JSON; return a future that is done. Works while asleep too.

        Of a model with an adapter, only the adapter and the identity of its base are written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        tensors, scalars = self._state()
        for name, held in tensors.items():
            state_files.save_tensors(folder / f"{name}.safetensors", held)
        state_files.save_json(folder / state_files.STATE, scalars)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def load(self, folder: Path) -> None:
        """Load a checkpoint that any engine of this format saved, on any number of ranks; see ``shards``."""
        scalars = state_files.load_json(folder / state_files.STATE)
        self._check_base(folder, scalars.get("base"))
        self._take_weights(Shards(folder, "weights"))
        random = state.saved_random(folder, scalars, self.engine.context.rank, self.engine.device)
        self._take_state(folder, {**scalars, "random": random})

    def _take_weights(self, shards: Shards) -> None:
        shards.fill(self._saved_weights(), type(self.engine.module).__name__)

    def _take_optimizer(self, shards: Shards, saved: Mapping[str, Any]) -> None:
        """Load the optimizer's tensors and its plain values."""
        tensors = optimizer_tensors(shards, dict(self.engine.module.named_parameters()))
        state.load_optimizer_state(self.engine._trained(), self.engine.module, tensors, saved)

    def _state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Return the content of a checkpoint: tensors (not copies) by file and by name, and plain values."""
        tensors, scalars = {"weights": self._saved_weights()}, self._scalars()
        scalars["random"] = self._random_now()
        if self.engine.optimizer is not None:
            tensors["optimizer"], scalars["optimizer"] = state.optimizer_state(
                self.engine.optimizer, self.engine.module
            )
        return tensors, scalars

    def _scalars(self) -> dict[str, Any]:
        """Return the plain values that are the same on all ranks, without the optimizer's."""
        scalars: dict[str, Any] = {
            "format": state_files.FORMAT,
            "num_skipped_steps": self.engine.num_skipped_steps,
            "auto_tokens": self.engine.budget.auto_tokens,
            "base": None if self.engine.adapter is None else self.engine.adapter.base_identity(),
            **self.engine.loss_scale.state(),
        }
        if self.engine.lr_scheduler is not None:
            scalars["lr_scheduler"] = self.engine.lr_scheduler.state_dict()
        return scalars

    def _random_now(self) -> dict[str, str]:
        """Return the random state at the last ``mark``; without one, the present state."""
        return self._random or state.random_state(self.engine.device)

    def _saved_weights(self) -> dict[str, Tensor]:
        """Return the weights that are saved; of a model with an adapter, only the adapter's."""
        return (
            own_weights(self.engine.module) if self.engine.adapter is None else self.engine.adapter.tensors()
        )

    def _take_state(self, folder: Path, scalars: dict[str, Any]) -> None:
        """Load everything of a checkpoint except the weights."""
        if self.engine.optimizer is not None:
            self._check_schedule(folder, scalars)
            shards = Shards(folder, "optimizer")
            with state_files.reading(folder / state_files.STATE):
                self._take_optimizer(shards, scalars["optimizer"])
        self._take_scalars(folder, scalars)

    def _take_scalars(self, folder: Path, scalars: Mapping[str, Any]) -> None:
        """Load the values of ``_scalars`` and the random state."""
        with state_files.reading(folder / state_files.STATE):
            if self.engine.lr_scheduler is not None:
                scheduler, optimizer = self.engine.lr_scheduler, self.engine._trained()
                rates = peak_rates(optimizer, scheduler)
                scheduler.load_state_dict(_with_keys_of(scheduler.state_dict(), scalars["lr_scheduler"]))
                saved = scalars["optimizer"]["groups"]  # some schedulers compute a rate from the last one
                for group, was in zip(optimizer.param_groups, saved, strict=True):
                    group.update({key: was[key] for key in ("lr", "initial_lr") if key in was})
                # the peak and the shares of the run file, at this step of its schedule
                set_peak_lr(optimizer, scheduler, self.engine.config.optim.lr, rates)
            self.engine.num_skipped_steps = int(scalars["num_skipped_steps"])
            self.engine.budget.auto_tokens = scalars.get("auto_tokens")
            self.engine.loss_scale.load(scalars)
            state.set_random_state(scalars["random"], self.engine.device)
        self._random = None

    def _check_schedule(self, folder: Path, scalars: Mapping[str, Any]) -> None:
        """Refuse a checkpoint without an optimizer, or one that differs in having a learning-rate schedule."""
        if "optimizer" not in scalars:
            raise DataError(f"{folder} holds no optimizer: it was written by a role that is not trained.")
        had, has = "lr_scheduler" in scalars, self.engine.lr_scheduler is not None
        if had != has:
            words = {True: "a learning-rate schedule", False: "no learning-rate schedule"}
            raise DataError(
                f"{folder} was written with {words[had]}, and the optimizer of the role '{self.engine.context.role}' now has "
                f"{words[has]}. Bring the plugin back that built it (engine_build_optimizer), or start a new run from "
                "`engine export`."
            )

    def _check_base(self, folder: Path, saved: str | None) -> None:
        """Refuse an adapter of another base, an adapter for a whole model, and a whole model for an adapter."""
        mine = None if self.engine.adapter is None else self.engine.adapter.base_identity()
        if saved == mine:
            return
        role = self.engine.context.role
        if mine is None or saved is None:
            holds, table = ("an adapter", "has no") if mine is None else ("a whole model", "has an")
            raise DataError(f"{folder} holds {holds}, but this run {table} [{role}.lora].")
        raise DataError(
            f"{folder} holds an adapter of another base model than '{self.engine.model_config.path}' "
            f"(identity {saved[:8]}, here {mine[:8]}). Bring the base back that the run was started with."
        )

    def export(self, folder: Path, adapter: bool = False) -> None:
        """Export with ``save_pretrained`` where the module has it, else as ``model.safetensors`` and its config."""
        if adapter:
            self.engine._adapted().export(folder)
            return
        merged = {}
        if self.engine.adapter is not None:
            merged["state_dict"] = dict(self.engine.adapter.merged())
        elif self.engine.quantize:
            merged["state_dict"] = {
                name: weight_at(place) for name, place in places(self.engine.module).items()
            }
        if hasattr(self.engine.module, "save_pretrained"):
            # save_pretrained imports accelerate and DeepSpeed, which prints at import
            with contextlib.redirect_stdout(sys.stderr):
                save_model(folder, self.engine.module, **merged)
            add_end_token(folder, (self.engine.context.live or {}).get("tokenizer"))
            return
        folder.mkdir(parents=True, exist_ok=True)
        weights = merged.get("state_dict") or own_weights(self.engine.module)
        state_files.save_tensors(folder / "model.safetensors", weights)
        if hasattr(getattr(self.engine.module, "config", None), "save_pretrained"):
            self.engine.module.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        else:
            self._copy_config(folder)

    def _copy_config(self, folder: Path) -> None:
        """Write the config of the role's folder next to an export of a module that has none."""
        model = self.engine.model_config
        state.copy_config(model.path, model.override, folder)

    # -- device memory ------------------------------------------------------

    def sleep(self, keep: Sequence[str] = ()) -> None:
        """Move weights and optimizer state to the CPU, except the parts in ``keep``; drop the gradients."""
        check_parts(keep)
        parts = set(PARTS) - set(keep) - self.asleep
        if "gradients" in parts:
            self.engine.module.zero_grad(set_to_none=True)
        self._move(parts, torch.device("cpu"))
        self.asleep |= parts
        if self.engine.device.type != "cpu":
            torch.accelerator.empty_cache()

    def wake(self, only: Sequence[str] | None = None) -> None:
        """Move the sleeping parts, or those of them in ``only``, back to the device."""
        check_parts(only or ())
        parts = self.asleep & set(PARTS if only is None else only)
        self._move(parts, self.engine.device)
        self.asleep -= parts

    def close(self) -> None:
        """Wait for files that are still being written (none here)."""

    def _move(self, parts: set[str], device: torch.device) -> None:
        if "weights" in parts:
            for tensor in (*self.engine.module.parameters(), *self.engine.module.buffers()):
                tensor.data = tensor.data.to(device)
        if "optimizer" in parts and self.engine.optimizer is not None:
            for values in self.engine.optimizer.state.values():
                for value in values.values():
                    if isinstance(value, Tensor):
                        value.data = value.data.to(device)

    def need(self, *parts: str) -> None:
        """Check that these parts are awake.

        Raises:
            RuntimeError: one of them is asleep.
        """
        missing = [part for part in parts if part in self.asleep]
        if missing:
            raise RuntimeError(
                f"The engine of role '{self.engine.context.role}' is asleep ({', '.join(missing)}): wake it first."
            )


def check_parts(names: Iterable[str]) -> None:
    """Check that every name is one of ``PARTS``.

    Raises:
        ValueError: a name is not.
    """
    for name in names:
        if name not in PARTS:
            raise ValueError(f"Unknown part '{name}' of a train engine." + did_you_mean(name, PARTS))


def _with_keys_of(present: Any, saved: Any) -> Any:
    """Return a state read from JSON, whose keys are text, with the type of keys that the present state has.

    ``MultiStepLR`` has a ``Counter`` of steps, also where ``SequentialLR`` contains it.
    """
    if isinstance(present, dict) and isinstance(saved, dict):
        kinds = {type(key) for key in present}
        kind = kinds.pop() if len(kinds) == 1 else str
        found = {kind(key): value for key, value in saved.items()}
        found = {key: _with_keys_of(present.get(key), value) for key, value in found.items()}
        return Counter(found) if isinstance(present, Counter) else found
    if isinstance(present, list) and isinstance(saved, list) and len(present) == len(saved):
        return [_with_keys_of(*pair) for pair in zip(present, saved, strict=True)]
    return saved
