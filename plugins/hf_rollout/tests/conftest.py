"""Tiny real models, a tokenizer of bytes, and slow references of what is sampled."""

import copy
import itertools
import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

import engine_plugin_torch.attention  # noqa: F401  registers "varlen"
from engine_core.types import Prompt, Request, Sampling

EOS = 1
VOCABULARY = 260  # <pad>, <eos>, 256 bytes, "ab", "bc"
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # logits far from uniform, so that a mistake shows
    "pad_token_id": 0,
    "eos_token_id": EOS,
    "bos_token_id": None,
}
CONFIGS = {
    "qwen3": lambda **shape: Qwen3Config(**SHAPE | shape, tie_word_embeddings=True),
    "llama": lambda **shape: LlamaConfig(**SHAPE | shape),
    "mistral": lambda **shape: MistralConfig(**SHAPE | shape, sliding_window=6),
}


@pytest.fixture(scope="session")
def tokenizer():
    """Byte-level, with two merges: a character of two bytes is two tokens, "ab" is one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", *alphabet, "ab", "bc"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("b", "c")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="session")
def decode(tokenizer):
    return lambda rows: tokenizer.batch_decode(rows, skip_special_tokens=False)


@pytest.fixture(scope="session")
def make_model():
    """``make_model("llama", seed=0, **shape)``: random weights, eval mode."""

    def make(family="qwen3", seed=0, attention="varlen", **shape):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(
                CONFIGS[family](**shape), attn_implementation=attention, dtype=torch.float32
            ).eval()

    return make


@pytest.fixture(scope="session")
def speaker(make_model, tokenizer):
    """``speaker("text")``: a model that says this text, whose tokens are distinct, after its first token.

    Embeddings are unit vectors, the layers add nothing, and the head knows each token's successor.
    """

    def make(text):
        model = make_model("llama", hidden_size=VOCABULARY, num_hidden_layers=1)
        tokens = [*tokenizer.encode(text, add_special_tokens=False), EOS]
        assert len(set(tokens)) == len(tokens)
        with torch.no_grad():
            for parameter in model.model.layers.parameters():
                parameter.zero_()
            model.model.embed_tokens.weight.copy_(torch.eye(VOCABULARY))
            model.lm_head.weight.zero_()
            for token, following in itertools.pairwise(tokens):
                # about 8 after the norm: others come now and then
                model.lm_head.weight[following, token] = 0.5
        return model

    return make


@pytest.fixture(scope="session")
def make_requests():
    """``make_requests([[5, 6], [7]], temperature=0.7)``: one request a prompt, seeds 0, 1, ..."""

    def make(prompts, **sampling):
        return [
            Request(
                f"r{i}",
                Prompt(f"train:{i}", list(ids), ""),
                Sampling(**{"max_response_tokens": 12, "seed": i} | sampling),
                group_id=i // 2,
                index=i % 2,
            )
            for i, ids in enumerate(prompts)
        ]

    return make


@pytest.fixture(scope="session")
def ragged():
    """Nine prompts of 1 to 20 tokens."""
    generator = torch.Generator().manual_seed(7)
    lengths = [3, 11, 1, 20, 7, 2, 14, 5, 9]
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="session")
def slow_log_probs():
    """Log-probs and log of the kept mass of a response, worked out in float64 one sequence at a time."""

    def compute(model, prompt, response, sampling):
        exact = copy.deepcopy(model).double()
        exact.set_attn_implementation("eager")
        with torch.no_grad():
            logits = exact(torch.tensor([prompt + response]), use_cache=False).logits[0]
        rows = [
            slow_distribution(logits[len(prompt) + i - 1].tolist(), sampling) for i in range(len(response))
        ]
        found = [math.log(kept[token]) for (kept, _), token in zip(rows, response, strict=True)]
        return found, [math.log(mass) for _, mass in rows]

    return compute


def slow_distribution(logits, sampling):
    """Probability by token of those that top-k and then top-p keep, and the share that they had of all."""
    largest = max(logits)
    weights = [math.exp((x - largest) / (sampling.temperature or 1.0)) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: -weights[i])
    candidates = ranked[: sampling.top_k] if sampling.top_k else ranked
    left = math.fsum(weights[i] for i in candidates)
    chosen, reached = [], 0.0
    for i in candidates:
        if reached >= sampling.top_p and sampling.top_p < 1:
            break
        chosen.append(i)
        reached += weights[i] / left
    kept = math.fsum(weights[i] for i in chosen)
    return {i: weights[i] / kept for i in chosen}, kept / math.fsum(weights)


@pytest.fixture(scope="session", name="slow_distribution")
def slow_distribution_fixture():
    return slow_distribution
