"""Tokens a second of the ``hf`` sampler beside ``generate`` and continuous batching of transformers.

    python benchmarks/hf_rollout/compare.py --size small --lengths ragged

One process, the ways in turn within each round, so that a busy machine slows all of them: read the
ratios. Only tokens that were asked for count. Prompts have 8 to 40 tokens, eight responses each.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from collections.abc import Callable

import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from engine_core.config import ModelConfig, RolloutConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Prompt, Request, Sampling

GROUP = 8
SIZES = {
    "small": (3, 128, 512),
    "large": (6, 256, 8192),
}  # layers, width, vocabulary: 0.6M and 7.7M parameters


def build(size: str, device: torch.device) -> PreTrainedModel:
    layers, width, vocabulary = SIZES[size]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=width // 4, max_position_embeddings=1024,
        tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    config.eos_token_id = None
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device).eval()


def workload(count: int, tokens: int, ragged: bool, vocabulary: int) -> tuple[list[list[int]], list[int]]:
    """Prompts, and how many tokens each response has (ragged: exponential, a third of the most on average)."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(3, vocabulary) for _ in range(rng.randrange(8, 40))] for _ in range(count // GROUP)
    ]
    lengths = [min(tokens, 1 + int(rng.expovariate(3 / tokens))) if ragged else tokens for _ in range(count)]
    return [prompt for prompt in prompts for _ in range(GROUP)], lengths


class Lengths(StoppingCriteria):
    """Ends each row at its own length."""

    def __init__(self, prompt_width: int, lengths: torch.Tensor) -> None:
        self.width, self.lengths = prompt_width, lengths

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return input_ids.shape[1] - self.width >= self.lengths


def with_generate(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int]) -> None:
    width, device = max(map(len, prompts)), model.device
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    ends = StoppingCriteriaList([Lengths(width, torch.tensor(lengths, device=device))])
    with torch.inference_mode():
        model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=max(lengths), do_sample=True, top_k=0,
            eos_token_id=None, pad_token_id=0, stopping_criteria=ends,
        )  # fmt: skip


def with_continuous_batching(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int]) -> None:
    # Sizes are given, since the default takes all of the memory; shared blocks would be stale after an update.
    sizes = ContinuousBatchingConfig(
        block_size=32, num_blocks=2048, max_batch_tokens=512, allow_block_sharing=False, return_logprobs=True
    )
    sampling = GenerationConfig(
        max_new_tokens=max(lengths), do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    with model.continuous_batching_context_manager(
        generation_config=sampling, continuous_batching_config=sizes, block=True, timeout=120
    ) as manager:
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            manager.add_request(prompt, request_id=f"r{i}", max_new_tokens=length)
        finished = 0
        while finished < len(prompts):
            result = manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError(f"Continuous batching returned {finished} of {len(prompts)} responses.")
            finished += result.is_finished()
    model.set_attn_implementation("sdpa")


def engine_sampler(model: PreTrainedModel, batch_size: int) -> Callable[..., None]:
    plugins = PluginSet.load({"rollout_engines": {"hf"}})
    words = Tokenizer(models.WordLevel({str(i): i for i in range(model.config.vocab_size)}, unk_token="0"))
    context = WorkerContext(
        plugins=plugins, role="rollout", device=model.device,
        live={"model": copy.deepcopy(model), "tokenizer": PreTrainedTokenizerFast(tokenizer_object=words)},
    )  # fmt: skip
    context.live["tokenizer"].eos_token = "0"  # some engines want an end; id 0 hardly ever comes
    spec = plugins.spec("rollout_engines", "hf")
    config = RolloutConfig(backend="hf", options=spec.config(batch_size=batch_size))
    engine = plugins.resolve("rollout_engines", "hf")(config, ModelConfig(), context)

    def sample(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int]) -> None:
        engine.add([
            Request(f"r{i}", Prompt(f"p{i // GROUP}", prompt, ""), Sampling(max_response_tokens=length, seed=i))
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ])  # fmt: skip
        while engine.num_unfinished:
            engine.step()

    return sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--lengths", choices=("full", "ragged"), default="ragged")
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default="generate,hf,continuous")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = build(arguments.size, device)
    prompts, lengths = workload(
        arguments.responses, arguments.tokens, arguments.lengths == "ragged", model.config.vocab_size
    )
    known = {
        "generate": with_generate,
        "hf": engine_sampler(model, arguments.responses),
        "continuous": with_continuous_batching,
    }
    rates: dict[str, list[float]] = {name: [] for name in arguments.ways.split(",")}
    for turn in range(arguments.rounds + 1):  # the first warms up
        for name, found in rates.items():
            start = time.perf_counter()
            known[name](model, prompts, lengths)
            if turn:
                found.append(sum(lengths) / (time.perf_counter() - start))
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    first = rates[next(iter(rates))]
    print(
        f"{parameters:.1f}M parameters, {arguments.responses} responses, {arguments.lengths}, {arguments.threads} threads, {device}"
    )
    for name, found in rates.items():
        ratio = statistics.median(a / b for a, b in zip(found, first, strict=True))
        print(
            f"  {name:12} {statistics.median(found):8,.0f} tok/s   x{ratio:.2f}   rounds {[round(x) for x in found]}"
        )


if __name__ == "__main__":
    main()
