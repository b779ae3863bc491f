"""The bench of rollout engines: builds them, makes requests, and samples by brute force to compare."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine_core.config import ModelConfig, RolloutConfig
from engine_core.config.roles import ProcessConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.types import Prompt, Request, Rollout, Sampling
from engine_plugin_testing.bench import EngineBench
from engine_plugin_testing.reference import EOS, logits_of, tokenizer
from engine_plugin_testing.rollout_cuts import PRECISE, cuts

if TYPE_CHECKING:
    from engine_core.contracts.engines import RolloutEngine

TEXTS = ("2+2=", "Once upon a time", "x", "The answer to it is", "ab", "(a*b)-(c*d) = ?")
SECOND: Mapping[str, Any] = {
    "model_type": "qwen2",  # biases at queries, keys and values
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "attention_dropout": 0.3,
    "rms_norm_eps": 1e-3,
}
SHIFT = 0.3  # standard deviation of what is added to norm weights (1 at first) and biases (0 at first)
MARGIN = 0.02  # between the logits of the two best tokens: closer ones may swap by rounding of float32


class RolloutBench(EngineBench):
    """A bench that builds rollout engines and their requests."""

    kind = "rollout_engines"

    @property
    def tolerance(self) -> float:
        """The largest difference of a log-prob, in nats."""
        return float(self.settings["tolerance"])

    @property
    def margin(self) -> float:
        """The least distance of the logits of the two best tokens at which an engine must choose the same one."""
        return max(MARGIN, self.tolerance)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the kit's models."""
        return tokenizer()

    def engine(
        self, path: str | None = None, options: Mapping[str, Any] | None = None, **rollout: Any
    ) -> RolloutEngine:
        """Build a sampler on the tiny model (or ``path``) that is closed after the contract.

        Args:
            path: a model folder.
            options: further options of the engine.
            rollout: keys of ``[rollout]``.
        """
        plugins = self.load_plugins()
        context = WorkerContext(
            plugins=plugins,
            role="rollout",
            device=self.device,
            rank=self.place.rank,
            world_size=self.place.world_size,
            live={"tokenizer": self.tokenizer},
        )
        config = RolloutConfig(backend=self.name, options=self.checked_options(plugins, options), **rollout)
        model = ModelConfig(path=path or self.model())
        made: RolloutEngine
        if self.settings["process"] is not None:
            from engine_plugin_processes.sampler_process.engine import SamplerEngine

            config.process = ProcessConfig.model_validate(self.settings["process"])
            made = SamplerEngine(config, model, context).build(config)
        else:
            made = plugins.resolve(self.kind, self.name)(config, model, context)
        self.stack.callback(made.close)
        return made

    def second_model(self, seed: int = 0) -> str:
        """Return the folder of an untied model of another family, with random norm weights and biases. Collective.

        The family is the suite's ``second_model``. A suite with ``write_model`` gets an untied model from it.
        """
        own = bool(self.settings["write_model"])
        folder = Path(self.model(seed, tied=False, **({} if own else self.settings["second_model"])))
        if own:
            return str(folder)
        made = folder.with_name(f"second-{folder.name}")
        if self.place.rank == 0 and not made.exists():
            partial = folder.with_name(f"partial-{folder.name}")
            shutil.copytree(folder, partial)
            draws = torch.Generator().manual_seed(seed)
            for file in sorted(partial.glob("*.safetensors")):
                weights = load_file(file)
                for name, value in sorted(weights.items()):
                    if value.ndim == 1 and value.is_floating_point():
                        weights[name] = value + SHIFT * torch.randn(value.shape, generator=draws)
                save_file(weights, file, {"format": "pt"})
            partial.rename(made)
        self.barrier()
        return str(made)

    def reference(self, path: str | None = None) -> nn.Module:
        """Load the independent module in float64."""
        module: nn.Module = self.load_reference(path or self.model())
        return module

    @torch.no_grad()
    def greedy(self, module: nn.Module, prompt: Sequence[int], count: int) -> list[int]:
        """Return the most likely continuation, up to its end or to two tokens within ``margin``."""
        ids = list(prompt)
        for _ in range(count):
            best = logits_of(module, torch.tensor(ids))[-1].topk(2)
            if float(best.values[0] - best.values[1]) < self.margin:
                break
            ids.append(int(best.indices[0]))
            if ids[-1] == EOS:
                break
        return ids[len(prompt) :]

    def requests(
        self, texts: Sequence[str] = TEXTS, group: int = 1, seed: int | None = 0, **sampling: Any
    ) -> list[Request]:
        """Make ``group`` requests for each text; request i has the seed ``seed + i``, or none if ``seed`` is None."""
        made: list[Request] = []
        for i, text in enumerate(texts):
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            prompt = Prompt(f"train:{i}", ids, text, {"answer": str(i)})
            for index in range(group):
                own = None if seed is None else seed + len(made)
                asked = Sampling(**{"max_response_tokens": 12, "seed": own, **sampling})
                made.append(Request(f"{i}-{index}", prompt, asked, group_id=i, index=index))
        return made

    def supported(self, *cases: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the sampling options, of ``cases``, that the engine's spec declares."""
        spec: Any = self.load_plugins().spec(self.kind, self.name)
        return [case for case in cases if set(case) <= spec.sampling | {"seed"}]

    def stream(self, path: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights [D_1, D_2, ...] of a folder, as ``named_weights`` of an engine does."""
        for file in sorted(Path(path).glob("*.safetensors")):
            yield from load_file(file).items()


def response(rollout: Rollout) -> list[int]:
    """Return the sampled tokens."""
    found: list[int] = rollout.token_ids[rollout.prompt_length :].tolist()
    return found


@torch.no_grad()
def expected_log_probs(
    module: nn.Module, rollout: Rollout, sampling: Sampling, tolerance: float = PRECISE
) -> tuple[Tensor, Tensor]:
    """Return for each of the N sampled tokens its log-prob [N] and the log of the probability mass kept [N].

    If several cuts are right, return the values of the cut nearest to the rollout's log-prob.
    """
    logits = logits_of(module, rollout.token_ids)
    found = []
    for at in range(rollout.prompt_length, len(rollout.token_ids)):
        token, log_prob = int(rollout.token_ids[at]), rollout.rollout_log_probs[at : at + 1].double()
        right = cuts(logits[at - 1], sampling, tolerance)
        apart = [float((log_prob - cut.log_probs[token]).abs().nan_to_num(torch.inf).sum()) for cut in right]
        nearest = right[apart.index(min(apart))]
        found.append((float(nearest.log_probs[token]), nearest.log_mass))
    columns = list(zip(*found, strict=True)) or [(), ()]
    return torch.tensor(columns[0]), torch.tensor(columns[1])


def plain_text(bench: RolloutBench, tokens: Sequence[int]) -> str:
    """Decode tokens as rewards see them."""
    decoded: str = bench.tokenizer.decode(list(tokens), skip_special_tokens=True)
    return decoded
