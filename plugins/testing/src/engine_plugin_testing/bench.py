"""The base of all benches: settings, the worker's place, plugins loaded as a run loads them."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from engine_core.plugins.plugin_set import PluginSet

if TYPE_CHECKING:
    import torch

    from engine_plugin_testing.worker import Place


class Bench:
    """A builder of the objects that a contract needs, in a worker; they are closed after the contract.

    Args:
        settings: the suite's attributes.
        place: this worker.
    """

    kind = ""

    def __init__(self, settings: Mapping[str, Any], place: Place) -> None:
        self.settings, self.place = settings, place
        self.folder = place.folder
        self.stack = contextlib.ExitStack()

    @property
    def shared(self) -> Path:
        """The folder for both halves of a contract that continues on another number of ranks."""
        return Path(self.settings["shared"])

    @property
    def name(self) -> str:
        """The name under test."""
        return str(self.settings["backend"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.stack.close()

    @property
    def capabilities(self) -> frozenset[str]:
        """The capabilities that the plugin's spec declares."""
        spec: Any = self.load_plugins().spec(self.kind, self.name)
        return spec.capabilities

    def load_plugins(self, fresh: bool = False, **more: str) -> PluginSet:
        """Load the plugin under test, and names of other kinds: ``losses="ppo_clip"``; ``fresh``: into a new set."""
        names = {self.kind: self.name, **more}
        plugins, tables = tuple(self.settings["plugins"]), json.dumps(self.settings["plugin_options"])
        load: Callable[..., PluginSet] = _load.__wrapped__ if fresh else _load
        return load(tuple(sorted(names.items())), plugins, Path(self.settings["root"]), tables)

    def checked_options(self, plugins: PluginSet, more: Mapping[str, Any] | None = None) -> Any:
        """Validate the suite's options, and ``more``, by the plugin's own model, as the loader of a run file does."""
        config = plugins.spec(self.kind, self.name).config
        return config.model_validate(
            {**self.settings["options"], **(more or {})}, context={"folder": self.settings["root"]}
        )


@functools.lru_cache(maxsize=64)
def _load(names: Iterable[tuple[str, str]], modules: tuple[str, ...], root: Path, tables: str) -> PluginSet:
    return PluginSet.load({kind: {name} for kind, name in names}, modules, root, tables=json.loads(tables))


class EngineBench(Bench):
    """A bench with models and a device."""

    def __enter__(self) -> Self:
        import torch

        torch.manual_seed(1234 + self.place.rank)
        return self

    @property
    def device(self) -> torch.device:
        """The device of this rank: the suite's ``device``, else the default one."""
        import torch

        from engine_core.local.engine_host import default_device

        chosen = self.settings["device"]
        if not chosen:
            return default_device()
        found = torch.device(chosen)
        own = found.type != "cpu" and found.index is None and self.place.world_size > 1
        return torch.device(found.type, self.place.rank) if own else found

    def model(self, seed: int = 0, tied: bool = True, **changes: Any) -> str:
        """Return the folder of a tiny model with its tokenizer; the first rank makes it once. Collective."""
        from engine_plugin_testing import reference
        from engine_plugin_testing.worker import resolve

        own = self.settings["write_model"]
        write = resolve(own, Path(self.settings["root"])) if own else reference.write_model
        values = {**reference.SHAPE, "tie_word_embeddings": tied, **self.settings["model"], **changes}
        key = json.dumps([seed, tied, own, values], sort_keys=True, default=str)
        folder = self.place.cache / f"model-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
        if self.place.rank == 0 and not folder.exists():
            write(folder, values, seed, tied)
        self.barrier()
        _check_vocabulary(folder, values["vocab_size"])
        return str(folder)

    def load_reference(self, path: str) -> Any:
        """Load the module to compare with: the suite's, else that of transformers, which is read once for each model."""
        from engine_plugin_testing.reference import load_reference
        from engine_plugin_testing.worker import resolve

        if own := self.settings["reference"]:
            return resolve(own, Path(self.settings["root"]))(path)
        made = self.place.cache in Path(path).parents
        return copy.deepcopy(_loaded_once(path)) if made else load_reference(path)

    def barrier(self) -> None:
        """Wait for the other ranks."""
        if self.place.world_size > 1:
            import torch.distributed as dist

            dist.barrier()


@functools.lru_cache(maxsize=16)
def _loaded_once(path: str) -> Any:
    """Load the reference of a folder that ``model`` has made; such a folder never changes."""
    from engine_plugin_testing.reference import load_reference

    return load_reference(path)


def _check_vocabulary(folder: Path, expected: int) -> None:
    """Assert that the written config has the requested vocabulary; a config without ``vocab_size`` passes."""
    from engine_plugin_testing.reference import VOCABULARY

    assert expected >= VOCABULARY, (
        f"The suite's `model` has vocab_size {expected}; the kit's tokens need {VOCABULARY}. Leave it out."
    )
    config = folder / "config.json"
    found = json.loads(config.read_text("utf-8")).get("vocab_size", expected) if config.exists() else expected
    assert found == expected, (
        f"write_model wrote a config.json with vocab_size {found}; expected {expected}, which it is given as "
        "model['vocab_size']: the kit's tokenizer and batches have tokens up to there."
    )
