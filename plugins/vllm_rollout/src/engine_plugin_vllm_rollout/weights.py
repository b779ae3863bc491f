"""Weights into the running engine: checked against the model, in bounded buckets, on the device that they are on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine_core.contracts.checksum import Checksum
from engine_core.contracts.weight_names import published
from engine_core.contracts.weight_sync import buckets
from engine_core.errors import DataError, near
from engine_plugin_vllm_rollout import versions

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

BUCKET = 1 << 29  # bytes handed over at once; a stream that gathers holds no more than this


def expected_shapes(config: Any) -> dict[str, torch.Size]:
    """Names and shapes of the weights as ``save_pretrained`` writes them, tied ones once. Allocates none.

    Args:
        config: of a model of transformers.
    """
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    return {name: tensor.shape for name, tensor in published(module)}


class Updater:
    """A receiver of weight streams for one engine.

    Args:
        engine: vLLM's engine.
        shapes: the shape of every weight that must come. None: of a plugin's architecture, whose weights only vLLM
        knows; the
            first update must bring every parameter, later ones the same names.

    Attributes:
        how: ``direct`` copies into the model's own tensors while the stream arrives; ``layerwise`` waits for the whole
            stream and processes each layer again, for kernels that hold weights in another form.
    """

    request = None  # what requests carry: no adapter

    def __init__(self, engine: LLMEngine, shapes: Mapping[str, torch.Size] | None) -> None:
        self._engine, self._shapes = engine, shapes
        self.how = "layerwise" if versions.needs_layerwise(engine) else "direct"
        self.touched = False

    def take(self, stream: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Replace all weights ``[D_1, D_2, ...]``; return the checksum of the received ones.

        Raises:
            DataError: a name, a shape or the set of names does not fit; ``touched`` says whether some weights were
            already
                replaced.
        """
        self.touched = False
        if self._shapes is None:
            return self._take_first(stream, version)
        checksum = Checksum()
        if self.how == "layerwise":
            whole = list(self._checked(stream, version))
            checksum.add(whole)
            self.touched = True
            self._load(whole)
        else:
            for bucket in buckets(self._checked(stream, version), BUCKET):
                checksum.add(bucket)
                self.touched = True
                self._load(bucket)
        return checksum.result()

    @torch.no_grad()
    def _load(self, weights: list[tuple[str, Tensor]]) -> None:
        if self.how == "layerwise":
            versions.reload(self._engine, weights)
        else:
            versions.model_of(self._engine).load_weights(iter(weights))

    def _take_first(self, stream: Iterable[tuple[str, Tensor]], version: int) -> str:
        """``take`` of the first update of a registered architecture."""
        checksum, came = Checksum(), list(stream)
        checksum.add(came)
        self.touched = True
        try:
            with versions.loaded(self._engine) as missing:
                self._load(came)
        except (ValueError, KeyError, AssertionError) as error:
            raise DataError(
                f"vLLM's model does not take the weights of the update to version {version}: {error}. Rename or leave out "
                "weights with engine_map_weights, or see load_weights of the class that engine_register_model registers."
            ) from error
        if missing:
            raise DataError(
                f"The update to version {version} lacks {len(missing)} weights of vLLM's model, such as '{min(missing)}'. Map "
                "them with engine_map_weights, or in load_weights of the class that engine_register_model registers."
            )
        self._shapes = {name: tensor.shape for name, tensor in came}
        return checksum.result()

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _checked(self, stream: Iterable[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        assert self._shapes is not None
        left = dict(self._shapes)
        for name, tensor in stream:
            if name not in self._shapes:
                raise DataError(
                    f"Unknown weight '{name}' in the update to version {version}." + near(name, self._shapes)
                )
            if tensor.shape != self._shapes[name]:
                raise DataError(
                    f"Weight '{name}' came as {list(tensor.shape)}; expected {list(self._shapes[name])}."
                )
            left.pop(name, None)
            yield name, tensor
        if left:
            raise DataError(
                f"The update to version {version} lacks {len(left)} weights, such as '{min(left)}'."
            )
