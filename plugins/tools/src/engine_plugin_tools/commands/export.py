"""``engine export``: write the trained model of a run as a Hugging Face folder."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core.cli.loading import chosen_checkpoint, placing, read_run
from engine_core.cli.options import Run, Sets, Step
from engine_core.cli.output import check_new
from engine_core.config.assemble import plugins_for
from engine_core.errors import ConfigError, did_you_mean
from engine_core.runs.tracking import RunFolder

if TYPE_CHECKING:
    from engine_core.config import EngineConfig


def export(
    run: Run,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    step: Step = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the LoRA adapter, as a folder of peft.")
    ] = False,
    role: Annotated[
        str, typer.Option("--role", metavar="ROLE", help="The trained role to write: actor or critic.")
    ] = "actor",
    card: Annotated[
        bool, typer.Option("--card", help="Also write a model card, README.md, from the files of the run.")
    ] = False,
    sets: Sets = None,
) -> None:
    """Write the trained model of a run as a Hugging Face folder: weights, config, tokenizer.

    A LoRA adapter ([actor.lora]) is merged into the model; '--adapter' writes the adapter alone.

    Example: engine export latest my-model --step 24
    """
    check_new(out)
    folder = RunFolder.open(run)
    config = read_run(folder, sets)
    checkpoint = chosen_checkpoint(folder, step, config)
    if card:  # it imports the hub's client, and must not fail after the export
        from engine_plugin_tools.model_card import write_card
    done = write_model(out, checkpoint, config, adapter, role)
    if card:
        write_card(out, folder, config, done, adapter, role)
    print(out)


def exported_role(checkpoint: Path, config: EngineConfig, adapter: bool, role: str) -> str:
    """Return the role of a checkpoint that is written: ``actor`` is the learned model also where its role has another name.

    Raises:
        ConfigError: the checkpoint does not hold the role, or its adapter is wanted and it has none.
    """
    known = sorted(folder.name for folder in checkpoint.iterdir() if folder.is_dir())
    role = known[0] if role == "actor" and len(known) == 1 else role
    if role not in known:
        raise ConfigError(f"--role: {checkpoint.name} holds no model '{role}'.{did_you_mean(role, known)}")
    if adapter and config.role(role).lora is None:
        raise ConfigError(f"--adapter: the run has no [{role}.lora]: it trained the whole model.")
    return role


def write_model(out: Path, checkpoint: Path, config: EngineConfig, adapter: bool, role: str) -> int:
    """Write the model of a checkpoint into a new folder; return the checkpoint's step.

    Only the role's model is built: no sampler, no rewards, and no data is read.

    Args:
        out: the folder.
        checkpoint: a verified checkpoint.
        config: config of its run.
        adapter: write the LoRA adapter alone.
        role: the trained role.

    Raises:
        ConfigError: see ``exported_role``.
    """
    from engine_core.contracts.runtime import Role
    from engine_core.data.tokenizer import load_tokenizer
    from engine_core.train.checkpointing import Resume

    plugins, found = plugins_for(config), Resume.at(checkpoint)
    role = exported_role(checkpoint, config, adapter, role)
    config = for_role(config, role)
    with placing(config):
        tokenizer = load_tokenizer(config.model)
        runtime = plugins.resolve("runtimes", config.runtime.backend)(
            config, plugins, {"tokenizer": tokenizer}
        )
        with closing(runtime):
            group = runtime.start({role: Role("train", trainable=False)}, 0)[role]
            group.call("load", folder=checkpoint / role).result()
            group.call("export", folder=out, **({"adapter": True} if adapter else {})).result()
    tokenizer.save_pretrained(out)
    return int(found.state["step"])


def for_role(config: EngineConfig, role: str) -> EngineConfig:
    """Return the config with the processes of one role."""
    pool = config.placement.pool_of(role)
    if pool is None:
        return config
    placement = config.placement.model_copy(update={"pools": {pool: config.placement.pools[pool]}})
    fewer = {"processes": "auto", "max_replacements": 0}
    options: Any = config.runtime.options
    options = options.model_copy(update={key: value for key, value in fewer.items() if hasattr(options, key)})
    runtime = config.runtime.model_copy(update={"options": options})
    return config.model_copy(update={"placement": placement, "runtime": runtime})
