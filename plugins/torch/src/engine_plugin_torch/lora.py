"""The insertion of a LoRA adapter into a module with peft, as ``[actor.lora]`` says (https://arxiv.org/abs/2106.09685).

Settings that the model does not support are refused here, before anything changes.
Not supported:

- dropout: log-probs would differ between two passes;
- initializations that change the base's own weights (PiSSA, OLoRA);
- the fused experts of a mixture, and linear layers named like their parts: peft would adapt the experts instead;
- ``out_proj`` of Mamba layers: on GPUs their fused kernel reads its weight, past the adapter.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import reprlib
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine_core.errors import ConfigError, DataError, near
from engine_core.runs import state_files
from engine_plugin_torch.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from engine_core.config.roles import LoRAConfig
    from engine_plugin_torch.adapter import Adapter

log = logging.getLogger("engine")

Module = TypeVar("Module", bound=nn.Module)

LINEAR = (nn.Linear, Conv1D)
ADAPTED = (*LINEAR, nn.Embedding)  # layers whose adapter can be merged
EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names of an expert's parts in a model folder, which peft maps to the tensors of all experts."""
FROM_FOLDER = {
    "rank": "r",
    "alpha": "lora_alpha",
    "rslora": "use_rslora",
    "dora": "use_dora",
    "target_modules": "target_modules",
    "modules_to_save": "modules_to_save",
}
"""Key of ours -> key of an adapter folder's config."""
UNSUPPORTED = (
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "layers_to_transform",
    "lora_bias",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
)
"""Keys of an adapter folder that must be empty."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of initializations (``init_lora_weights`` of an adapter folder) that change the base's own weights."""
# modules that ``attach`` changed; one given from Python is also the base of other roles, see ``base_copy``
_ATTACHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def attach(
    module: nn.Module,
    lora: LoRAConfig,
    role: str,
    seed: int,
    base_path: str,
    whole: Collection[str] = (),
    identity: str | None = None,
) -> Adapter:
    """Freeze a module and put an adapter into it.

    Args:
        module: the model in its final type and on its device; changed in place.
        lora: the role's table.
        role: the role's name, for messages.
        seed: seed of the adapter's initial weights, which are drawn on the CPU; torch's random state does not change.
        base_path: the base model's folder or name, written into an exported adapter.
        whole: name endings of modules that are trained whole in addition to `modules_to_save` (a new head).
        identity: identity of the base's weights, if it was computed before quantization.

    Returns:
        The adapter, float32 where the base has a smaller type. Nothing else of the module is trained.

    Raises:
        ConfigError: the model cannot be adapted in this way. The module is unchanged.
        DataError: the adapter folder does not fit.
    """
    from engine_plugin_torch.adapter import Adapter

    lora, targets, config = inject(module, lora, role, seed, base_path, whole)
    _ATTACHED.add(module)
    adapter = Adapter(module, config, identity)
    if lora.path is not None:
        adapter.take(state_files.load_tensors(Path(lora.path) / "adapter_model.safetensors").items())
    _tell(module, lora, targets)
    return adapter


def inject(
    module: nn.Module, lora: LoRAConfig, role: str, seed: int, base_path: str, whole: Collection[str] = ()
) -> tuple[LoRAConfig, list[str], Any]:
    """Freeze a module and put the layers of an adapter into it; its parameters may be on ``meta``.

    Returns:
        The table with the settings of its folder, the names of the adapted layers, and peft's config.

    Raises:
        ConfigError: as in ``attach``.
    """
    lora, targets, saved = adapted_layers(module, lora, role, whole)
    from peft import LoraConfig, inject_adapter_in_model

    from engine_plugin_torch.adapter import NAME

    base = Path(base_path)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=_shortest(module, targets),
        modules_to_save=saved or None,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        init_lora_weights=True if lora.init == "kaiming" else "gaussian",
        task_type="SEQ_CLS" if whole else "CAUSAL_LM",  # peft's type for a model with a new head
        base_model_name_or_path=str(base.resolve()) if base.is_dir() else base_path,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, module, NAME)
    _widen(module)
    return lora, targets, config


def adapted_layers(
    module: nn.Module, lora: LoRAConfig, role: str, whole: Collection[str]
) -> tuple[LoRAConfig, list[str], list[str]]:
    """Choose the layers of a module that get an adapter; its parameters may be on ``meta``.

    Args:
        module: the base model; left alone.
        lora: the role's table.
        role: the role's name, for messages.
        whole: name endings of modules that are trained whole in addition to `modules_to_save`.

    Returns:
        The table with the values of its adapter folder, the full names of the adapted layers, and the name endings of the
        modules that are trained whole.

    Raises:
        ConfigError: the model cannot be adapted in this way.
        DataError: the adapter folder does not fit.
    """
    if any(hasattr(part, "lora_A") for part in module.modules()):
        raise ConfigError(
            f"{role}.lora: the model has an adapter already. Give the base model, and the adapter as {role}.lora.path."
        )
    lora = lora if lora.path is None else _as_in_folder(lora, role)
    saved = [*dict.fromkeys([*lora.modules_to_save, *whole])]
    targets = _targets(module, lora, role, saved)
    _check(module, lora, role, targets, saved)
    return lora, targets, saved


def base_copy(module: Module) -> Module:
    """Return a copy of a module without the adapter that ``attach`` put into it."""
    made = copy.deepcopy(module)
    if module not in _ATTACHED:
        return made
    for name, part in list(made.named_modules()):
        for attribute in ("base_layer", "original_module"):  # an adapted layer; a module trained whole
            if attribute in part._modules:
                parent, _, own = name.rpartition(".")
                setattr(made.get_submodule(parent), own, part._modules[attribute])
    made.requires_grad_(True)
    return made


def _targets(module: nn.Module, lora: LoRAConfig, role: str, saved: Collection[str]) -> list[str]:
    """Return the full names of the layers that get an adapter; modules in ``saved`` are trained whole."""
    key, asked = f"{role}.lora.target_modules", lora.target_modules
    get_head = getattr(module, "get_output_embeddings", lambda: None)
    head = get_head()
    layers = {name: part for name, part in module.named_modules() if isinstance(part, ADAPTED)}
    if asked == "all-linear":
        found = [name for name, part in layers.items() if isinstance(part, LINEAR) and part is not head]
        bypassed = _bypassed(module)
        found = [
            name for name in found if name not in bypassed and not any(_inside(name, end) for end in saved)
        ]
        if not found:
            raise ConfigError(f"{key}: {type(module).__name__} has no linear layer besides its head.")
        return found
    if isinstance(asked, str):
        try:
            found = [name for name in layers if re.fullmatch(asked, name)]
        except re.error as error:
            raise ConfigError(f"{key}: '{asked}' is no regular expression: {error}.") from error
        return found or _unknown(key, asked, layers)
    chosen: dict[str, None] = {}
    for end in asked:
        chosen |= dict.fromkeys([n for n in layers if _is_end(end, n)] or _unknown(key, end, layers))
    if not chosen:
        raise ConfigError(f'{key}: an empty list. Name layers, or write "all-linear".')
    return [name for name in layers if name in chosen]


def _unknown(key: str, asked: str, layers: Collection[str]) -> list[str]:
    ends = {name.rpartition(".")[2] for name in layers}
    some = ", ".join(sorted(ends)[:20])
    raise ConfigError(
        f"{key}: '{asked}' is no layer of this model.{near(asked, {*ends, *layers})} Its layers end in: {some}."
    )


def _check(
    module: nn.Module, lora: LoRAConfig, role: str, targets: Collection[str], saved: Collection[str]
) -> None:
    """Refuse modules that are unknown, chosen twice, tied to others, or unfit for DoRA."""
    parts = dict(module.named_modules())
    names = {name: [n for n in parts if _is_end(name, n)] for name in saved}
    for end, found in names.items():
        if not found:
            known = {n.rpartition(".")[2] for n in parts if n}
            raise ConfigError(
                f"{role}.lora.modules_to_save: '{end}' is no module of this model.{near(end, {*known, *parts})}"
            )
        if both := [name for name in targets if any(_inside(name, n) for n in found)]:
            raise ConfigError(
                f"{role}.lora: '{both[0]}' is in target_modules and in modules_to_save. A module is adapted or "
                "trained whole: take it out of one."
            )
    tied = getattr(module, "all_tied_weights_keys", None) or {}
    shared = {name.rpartition(".")[0] for pair in tied.items() for name in pair}
    for name in (*targets, *(n for found in names.values() for n in found)):
        if name in shared:
            raise ConfigError(
                f"{role}.lora: '{name}' shares its weight with another module of this model (tied embeddings). "
                "Changing one of them cannot be written as one model: leave it out of target_modules and modules_to_save."
            )
    bypassed = _bypassed(module)
    if refused := [name for name in targets if name in bypassed]:
        raise ConfigError(
            f"{role}.lora.target_modules: '{refused[0]}' cannot have an adapter: {bypassed[refused[0]]}."
        )
    if lora.dora and (other := [name for name in targets if type(parts[name]) is not nn.Linear]):
        raise ConfigError(
            f"{role}.lora.dora: '{other[0]}' is a {type(parts[other[0]]).__name__}, not an nn.Linear."
        )


def _bypassed(module: nn.Module) -> dict[str, str]:
    """Return by the name of a layer why an adapter on it would not be used; other layers are left out."""
    parts = dict(module.named_modules())
    mamba = "the fused kernel of Mamba layers reads the weight itself"
    found = {
        f"{name}.out_proj": mamba
        for name, part in parts.items()
        if hasattr(part, "A_log") and hasattr(part, "D")
    }
    if any(getattr(getattr(part, "gate_up_proj", None), "ndim", 0) == 3 for part in parts.values()):
        experts = "peft adapts all experts of a mixture instead of a layer of this name"
        found |= {name: experts for name in parts if name.rpartition(".")[2] in EXPERT_PARTS}
    return found


def _shortest(module: nn.Module, targets: Collection[str]) -> list[str]:
    """Return name endings that match exactly these layers, as other programs expect them; else the full names."""
    ends = {name.rpartition(".")[2] for name in targets}
    meant = {name for name, _ in module.named_modules() if any(_is_end(end, name) for end in ends)}
    return sorted(ends) if meant == set(targets) else sorted(targets)


def _is_end(end: str, name: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _inside(name: str, whole: str) -> bool:
    """Return whether the module ``name`` is, or lies in, a module whose name ends in ``whole``."""
    return f".{name}.".find(f".{whole}.") >= 0


def _as_in_folder(lora: LoRAConfig, role: str) -> LoRAConfig:
    """Return the table with the values of the adapter folder; refuse a key that was set to another value."""
    path = Path(lora.path or "")
    file = path / "adapter_config.json"
    if not file.is_file() or not (path / "adapter_model.safetensors").is_file():
        raise ConfigError(
            f"{role}.lora.path: '{path}' is no adapter folder. Expected adapter_config.json and "
            "adapter_model.safetensors, as peft and `engine export --adapter` write them."
        )
    values = _supported(file)
    defaults, found = type(lora)(), {}
    for key, theirs in FROM_FOLDER.items():
        value = values.get(theirs)
        found[key] = getattr(defaults, key) if value is None else value
        mine = getattr(lora, key)
        if mine not in (getattr(defaults, key), found[key]) and not _same(mine, found[key]):
            raise ConfigError(
                f"{role}.lora.{key}: got {mine}, but the adapter in {path} has {found[key]}. Leave the key out."
            )
    try:
        return type(lora)(**{**lora.model_dump(), **found})
    except ValueError as error:
        raise DataError(f"{file}: {error}") from error


def _supported(file: Path) -> dict[str, Any]:
    """Return the values of an ``adapter_config.json``; refuse one that is damaged, or of an adapter not supported here."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is no JSON file: {error}. Write the adapter again.") from error
    if not isinstance(values, dict):
        raise DataError(f"{file} holds a {type(values).__name__}, not a table. Write the adapter again.")
    if values.get("peft_type") != "LORA" or values.get("bias", "none") != "none":
        raise DataError(
            f"{file}: peft_type {values.get('peft_type')!r}, bias {values.get('bias')!r}; expected 'LORA' and 'none'."
        )
    odd = [key for key in UNSUPPORTED if values.get(key)]
    if str(values.get("init_lora_weights")).lower().startswith(CHANGES_BASE):
        odd.append("init_lora_weights")
    if odd:
        raise DataError(
            f"{file}: '{odd[0]}' is {reprlib.repr(values[odd[0]])}, which is not supported here. Merge this adapter "
            "into its base."
        )
    return values


def _same(mine: Any, theirs: Any) -> bool:
    """Return whether two lists have the same members."""
    return isinstance(mine, list) and isinstance(theirs, list) and sorted(mine) == sorted(theirs)


def _widen(module: nn.Module) -> None:
    """Cast trained parameters to float32; modules trained whole still take and return the base's type."""
    from peft.utils.other import ModulesToSaveWrapper

    for part in module.modules():
        if isinstance(part, ModulesToSaveWrapper):
            kept = next(part.original_module.parameters()).dtype
            if kept in (torch.bfloat16, torch.float16):
                for made in part.modules_to_save.values():
                    made.register_forward_pre_hook(
                        lambda _, args: tuple(_cast(a, torch.float32) for a in args)
                    )
                    made.register_forward_hook(lambda _, args, out, kept=kept: _cast(out, kept))
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _tell(module: nn.Module, lora: LoRAConfig, targets: Collection[str]) -> None:
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    quantized = [part for part in module.modules() if isinstance(part, QuantizedLinear)]
    every = sum(p.numel() for p in module.parameters()) + sum(part.shape.numel() for part in quantized)
    ends = ", ".join(sorted({name.rpartition(".")[2] for name in targets}))
    log.info(
        "LoRA: rank %d on %d layers (%s); %s of %s parameters are trained (%.2g%%).",
        lora.rank,
        len(targets),
        ends,
        f"{trained:,}",
        f"{every:,}",
        100 * trained / every,
    )
