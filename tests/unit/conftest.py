"""What several unit tests need: tiny distributions, really installed."""

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from engine_core import plugin_metadata


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """``install(name, {"rewards": {"x": "mod"}}, {"mod": source})``: a dist-info folder and modules on sys.path.

    Module names may be dotted; the packages above them are made. Everything is gone after the test.
    """
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    modules_before = set(sys.modules)

    def write(
        name: str,
        offers: Mapping[str, Mapping[str, str]],
        modules: Mapping[str, str] = {},
        version: str = "1.0",
        requires: Sequence[str] = (),
    ) -> Path:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        groups = [
            f"[engine.{kind}]\n" + "".join(f"{offer} = {module}\n" for offer, module in names.items())
            for kind, names in offers.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(groups))
        for module, source in modules.items():
            path = site.joinpath(*module.split("."))
            path.parent.mkdir(parents=True, exist_ok=True)
            for package in list(path.relative_to(site).parents)[:-1]:
                (site / package / "__init__.py").touch()
            path.with_suffix(".py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return site

    yield write
    for name in set(sys.modules) - modules_before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def without_our_plugins(monkeypatch):
    """Whatever is installed where the tests run: as if only the core were."""
    everything = plugin_metadata.installed
    monkeypatch.setattr(
        plugin_metadata,
        "installed",
        lambda: tuple(o for o in everything() if not o.distribution.name.startswith("engine-plugin-")),
    )
