"""The restoring of transformers' classes that vLLM changes when it starts.

vLLM runs many families (SmolLM3, OLMo 2 and 3, Seed-OSS, ...) with transformers' modules. For that it changes the model's class in
place: the constructor then needs vLLM's config, and a call runs vLLM's compiled code. The trainer in the same process could no
longer build or run such a model.
"""

from __future__ import annotations

import inspect
from typing import Any


def restore_classes(model: Any) -> None:
    """Give vLLM's modules new classes that have its changes, and restore the classes of transformers.

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
