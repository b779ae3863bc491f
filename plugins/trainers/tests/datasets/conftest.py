"""Copies of the hub repositories of all public data sets, and a cache of the library ``datasets`` for these tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import hub_folders
import pytest


@pytest.fixture(scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which the library keeps what it reads."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        datasets.disable_progress_bars()
        yield folder
        datasets.enable_progress_bars()


@pytest.fixture(scope="session")
def copy_of(own_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """``copy_of("gsm8k")``: a folder with the set's files, written once."""

    @functools.cache
    def write(name: str) -> str:
        return str(hub_folders.write(name, tmp_path_factory.mktemp("hub") / name))

    return write
