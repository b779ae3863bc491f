"""The state of an optimizer and of random generators as named tensors and plain values."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.errors import DataError
from engine_core.runs.state_files import STATE, load_json, reading, save_json

log = logging.getLogger("engine")


def copy_config(source: str, override: Mapping[str, Any], folder: Path) -> None:
    """Write the ``config.json`` of the folder ``source`` with the run's overrides, so that the export can be loaded.

    Without a config in ``source``, log a warning: only the code that built the module can load the export.
    """
    origin = Path(source) / "config.json"
    if source and origin.is_file():
        save_json(folder / "config.json", {**json.loads(origin.read_text(encoding="utf-8")), **override})
    else:
        log.warning(
            "%s has weights and no config.json: the module has no config to save, and '%s' holds none.",
            folder,
            source,
        )


def optimizer_state(
    optimizer: torch.optim.Optimizer, module: nn.Module
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's state: tensors ``[D0, ...]`` as ``name/key`` by parameter name, and plain values."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {"groups": [], "values": {}}
    for group in optimizer.param_groups:
        members = [names[id(parameter)] for parameter in group["params"]]
        plain["groups"].append(named_group(group, members))
        for name, parameter in zip(members, group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{name}/{key}"] = value
                else:
                    plain["values"][f"{name}/{key}"] = value
    return tensors, plain


def named_group(group: Mapping[str, Any], members: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's group as a checkpoint holds it: its settings, and names instead of parameters."""
    return {**{key: value for key, value in group.items() if key != "params"}, "params": list(members)}


def check_members(here: Sequence[Sequence[str]], saved: Sequence[Sequence[str]]) -> None:
    """Check that an optimizer has the same parameters in each group as the checkpoint's.

    Raises:
        DataError: the parameters or groups differ.
    """
    if [list(group) for group in here] == [list(group) for group in saved]:
        return
    changed = sorted({n for g in here for n in g} ^ {n for g in saved for n in g})
    raise DataError(
        "The checkpoint's optimizer is over other parameters than this one's: "
        f"{', '.join(changed[:5]) or 'the groups differ'}. Is it a checkpoint of another model, or do the groups "
        "depend on the values of options?"
    )


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
) -> None:
    """Load what ``optimizer_state`` returned (tensors ``[D0, ...]``), for the same parameters in the same groups.

    The settings of the groups (learning rate, betas, decay) stay those of this optimizer: they come from the
    run file, which may have changed.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    here = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    saved = [group["params"] for group in plain["groups"]]
    check_members(here, saved)
    numbers = {name: index for index, name in enumerate(n for group in here for n in group)}
    state: dict[int, dict[str, Any]] = {}
    for path, value in {**tensors, **plain["values"]}.items():
        name, _, key = path.rpartition("/")
        state.setdefault(numbers[name], {})[key] = value
    groups = [
        {**group, "params": [numbers[n] for n in members]}
        for group, members in zip(optimizer.param_groups, saved, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def rank_file(rank: int) -> str:
    """Return the name of the file with the values of one rank of several."""
    return f"rank-{rank:05d}.json"


def saved_random(folder: Path, scalars: Mapping[str, Any], rank: int, device: torch.device) -> dict[str, str]:
    """Return a rank's random state from a checkpoint; a rank that the saving run did not have keeps its own."""
    with reading(folder / STATE):
        if "ranks" not in scalars:
            return dict(scalars["random"])
    own = folder / rank_file(rank)
    if not own.is_file():
        return random_state(device)
    values = load_json(own)
    with reading(own):
        return dict(values["random"])


def random_state(device: torch.device) -> dict[str, str]:
    """Return the state of torch's generators of the CPU and of ``device``, as text."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return {name: base64.b64encode(state.numpy().tobytes()).decode("ascii") for name, state in states.items()}


def set_random_state(states: Mapping[str, str], device: torch.device) -> None:
    """Restore what ``random_state`` returned; a kind of device that the checkpoint lacks keeps its state.

    Raises:
        ValueError: the text is no state of these generators.
    """
    decoded = {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        for name, text in states.items()
    }
    try:
        torch.set_rng_state(decoded["cpu"])
        if device.type in decoded and device.type != "cpu":
            torch.get_device_module(device).set_rng_state(decoded[device.type])
    except RuntimeError as error:  # a state of another size
        raise ValueError(f"random state: {error}") from error
