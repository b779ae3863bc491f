"""The table of languages of programs: ``engine_code_languages``, entry-point group ``engine.code_languages``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine_core.hooks import hookspec
from engine_core.specs import Spec


@dataclass(frozen=True, kw_only=True)
class CodeLanguage(Spec):
    """A language of programs that a reward runs: ``load`` is a function without arguments that returns a ``Language``."""

    kind = "code_languages"
    noun = "code language"


SPECS = {"code_languages": CodeLanguage}


@hookspec
def engine_code_languages() -> Mapping[str, CodeLanguage]:
    """Offer languages of programs that a reward runs: ``[reward.code] language = "NAME"``.

    :returns: ``CodeLanguage`` by name; its ``load`` gives what the reward needs to run a program, a
        ``engine_plugin_rewards.code_languages.Language``, imported only in the workers that use it.

    Collects, as ``engine_train_engines``. Entry-point group ``engine.code_languages``.

    Called once in every process that loads plugins, before any model is built. Not collective.
    """
