"""Separate classes for the modules that vLLM takes from transformers.

vLLM runs many families (SmolLM3, OLMo 2 and 3, Seed-OSS, ...) with transformers' own modules. For that it changes the class of
the model in place: its constructor then needs vLLM's config, and a call runs vLLM's compiled code. The trainer in the same
process could no longer build or run such a model.
"""

from __future__ import annotations

import inspect
from typing import Any


def separate(model: Any) -> None:
    """Move vLLM's changes from transformers' classes to new classes, which only vLLM's modules have.

    Args:
        model: vLLM's model in this process.
    """
    from vllm.compilation.decorators import IGNORE_COMPILE_KEY
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper as Wrapper

    for module in model.modules():
        changed = type(module)
        if Wrapper not in changed.__bases__ or not changed.__module__.startswith("transformers."):
            continue
        original = inspect.getclosurevars(changed.__init__).nonlocals["old_init"]
        names = ("__call__", "save_aot_compiled_function", IGNORE_COMPILE_KEY)
        taken = {name: vars(changed)[name] for name in names if name in vars(changed)}
        changed.__init__ = original
        for name in taken:
            delattr(changed, name)
        changed.__bases__ = tuple(base for base in changed.__bases__ if base is not Wrapper)
        module.__class__ = type(
            changed.__name__, (changed, Wrapper), {"__module__": changed.__module__, **taken}
        )
