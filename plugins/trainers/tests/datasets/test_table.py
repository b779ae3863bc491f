"""The table of public data sets is complete, and its columns are those of the repositories."""

import re

import hub_folders
import pytest

from engine_plugin_trainers.datasets import plugin
from engine_plugin_trainers.datasets.table import SETS, DatasetOptions, PairOptions, QuestionOptions


@pytest.mark.parametrize("name", SETS)
def test_an_entry_is_complete(name):
    chosen = SETS[name]
    assert re.fullmatch(r"[0-9a-f]{40}", chosen.revision)
    assert chosen.license
    assert {split for split in ("train", "validation") if getattr(chosen, split)} == {*chosen.rows}
    assert bool(chosen.trainers) == bool(chosen.train)
    assert bool(chosen.suffix) == bool(chosen.reward)
    assert {*chosen.columns} <= {*hub_folders.rows_of(name)[0]}


def test_every_set_is_a_data_source_with_license_revision_and_address():
    sources = plugin.engine_data_sources()
    assert {*sources} == {*SETS} == {*hub_folders.SETS}
    gsm8k = sources["gsm8k"]
    assert (gsm8k.license, gsm8k.url) == ("MIT", "https://huggingface.co/datasets/openai/gsm8k")
    assert gsm8k.revision == SETS["gsm8k"].revision
    assert gsm8k.config is QuestionOptions
    assert sources["hh_rlhf"].config is PairOptions
    assert sources["tulu3_sft"].config is DatasetOptions
