"""Train engines, each with one mistake of adapters: rsLoRA, DoRA, modules trained whole, mixing and checkpoints."""

import contextlib
import shutil
from unittest import mock

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper

from engine_core.contracts.weight_sync import ADAPTER_PREFIX as PREFIX
from engine_plugin_torch import adapter as adapters
from engine_plugin_torch.adapter import NAME, Adapter
from engine_plugin_torch.engine import TorchEngine


class WithAdapter(TorchEngine):
    """``made`` is the class of the adapter."""

    made = Adapter

    def _distribute(self, module):
        module = super()._distribute(module)
        if self.adapter is not None:
            self.adapter.__class__ = self.made
        return module


class Merges(Adapter):
    """``weight`` merges a layer."""

    def merged(self):
        with mock.patch.object(adapters, "merged_weight", self.weight):
            found = list(super().merged())
        yield from found


class KeepsWhole(WithAdapter):
    class made(Adapter):
        @contextlib.contextmanager
        def off(self):
            with mock.patch.object(adapters, "AuxiliaryTrainingWrapper", BaseTunerLayer), super().off():
                yield


class AlphaOverRank(WithAdapter):
    class made(Merges):
        @staticmethod
        def weight(layer, lengths=True, merged=adapters.merged_weight):
            scale = layer.scaling[NAME]
            layer.scaling[NAME] = layer.lora_alpha[NAME] / layer.r[NAME]
            found = merged(layer, lengths)
            layer.scaling[NAME] = scale
            return found


class MergesNoLengths(WithAdapter):
    class made(Merges):
        @staticmethod
        def weight(layer, lengths=True, merged=adapters.merged_weight):
            return merged(layer, False)


class ExportsOldHead(WithAdapter):
    class made(Adapter):
        def merged(self):
            old = {
                f"{name}.weight": part.original_module.weight
                for name, part in self.module.named_modules()
                if isinstance(part, ModulesToSaveWrapper)
            }
            for name, value in super().merged():
                yield name, old.get(name, value)


class IgnoresKinds(TorchEngine):
    def __init__(self, config, model_config, context, *, trainable=True):
        if config.lora is not None:
            config = config.model_copy(update={"lora": config.lora.model_copy(update={"dora": False})})
        super().__init__(config, model_config, context, trainable=trainable)


class StillLengths(TorchEngine):
    def _distribute(self, module):
        module = super()._distribute(module)
        for name, parameter in module.named_parameters():
            if "lora_magnitude_vector" in name:
                parameter.requires_grad_(False)
        return module


class Remembers(Adapter):
    """Tensors with ``part`` in their name outlive a whole model."""

    def _begin_again(self):
        kept = {name: value.clone() for name, value in self.tensors().items() if self.part in name}
        super()._begin_again()
        for name, value in kept.items():
            with torch.no_grad():
                self.tensors()[name].copy_(value)


class KeepsHead(WithAdapter):
    class made(Remembers):
        part = "lm_head"


class KeepsLengths(WithAdapter):
    class made(Remembers):
        part = "lora_magnitude_vector"


class KeepsEmbedding(WithAdapter):
    class made(Remembers):
        part = "lora_embedding_A"


class OtherLayers(TorchEngine):
    def __init__(self, config, model_config, context, *, trainable=True):
        if config.lora is not None:
            lora = config.lora.model_copy(update={"target_modules": "all-linear"})
            config = config.model_copy(update={"lora": lora})
        super().__init__(config, model_config, context, trainable=trainable)


class DrawsAdapter(TorchEngine):
    def _distribute(self, module):
        own = self.model_config
        self.model_config = own.model_copy(update={"seed": int(torch.randint(2**30, ()))})
        found = super()._distribute(module)
        self.model_config = own
        return found


class ReplacesAdapter(TorchEngine):
    def load_named_weights(self, stream, mix=1.0):
        stream = dict(stream)
        super().load_named_weights(iter(stream.items()), 1.0 if min(stream).startswith(PREFIX) else mix)


class TakesPartOfAdapter(TorchEngine):
    def load_named_weights(self, stream, mix=1.0):
        stream = dict(stream)
        if min(stream).startswith(PREFIX):
            stream = self.adapter.tensors() | stream
        super().load_named_weights(iter(stream.items()), mix)


class ForgetsMoments(TorchEngine):
    def load(self, folder):
        super().load(folder)
        if self.adapter is not None:
            self.optimizer.state.clear()


class AnyBase(WithAdapter):
    class made(Adapter):
        def base_identity(self):
            return "the base"


class SameBase(WithAdapter):
    class made(Adapter):
        def _begin_again(self):
            kept = self._base
            super()._begin_again()
            self._base = kept


class ContinuesPlain(WithAdapter):
    def _distribute(self, module):
        module = super()._distribute(module)
        if self.adapter is not None and self.config.lora.path:
            for layer in module.modules():
                if isinstance(layer, LoraLayer):
                    layer.scaling[NAME] = layer.lora_alpha[NAME] / layer.r[NAME]
        return module


class FrozenOnceOff(WithAdapter):
    class made(Adapter):
        @contextlib.contextmanager
        def off(self):
            with super().off():
                yield
            self.module.requires_grad_(False)


class StaysOff(WithAdapter):
    class made(Adapter):
        @contextlib.contextmanager
        def off(self):
            self.switched = super().off()  # kept: its end would switch the adapter on
            self.switched.__enter__()
            yield
            self.switched.__exit__(None, None, None)


class ExportsAdapterOnce(TorchEngine):
    first = None

    def export(self, folder, adapter=False):
        super().export(folder, adapter)
        if adapter:
            self.first = self.first or folder
            if self.first != folder:
                shutil.copytree(self.first, folder, dirs_exist_ok=True)
