"""What measure.py compares: sets of cases, each a shape, a batch for each GPU, a backend and its options."""

from engine_plugin_tools.bench.shapes import SHAPES

LLAMA_7B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY = {**SHAPES["tiny"]}
MIXED = {"param_dtype": "fp32", "mixed_precision": {"param_dtype": "bf16"}}
PURE = {"param_dtype": "bf16", "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "bf16"}}
DDP_MIXED = {"param_dtype": "fp32", "compute_dtype": "bf16"}
DDP_PURE = {"param_dtype": "bf16"}
SPREAD = {  # ways of one and the same sharding
    "full": {},
    "full, two layers a unit": {"wrap": {"layers_per_unit": 2}},
}
EVERY = {"compile": True, "log_prob_chunk_tokens": 4096}


def shape_config(name):
    """The config of a shape, for the config.json of a model folder."""
    return {"llama-7b": LLAMA_7B}.get(name) or dict(SHAPES[name])


def case(name, shape, backend, options, *, sequences=8, length=1024, prompt=256, budget=0, **shared):
    return {
        "name": name,
        "shape": shape,
        "backend": backend,
        "options": options,
        "shared": {**EVERY, **shared},
        "sequences": sequences,
        "length": length,
        "prompt": prompt,
        "budget": budget or sequences * length,
    }


def _recomputed(backend):
    return {"activation_checkpointing": "full" if backend == "fsdp" else True}


def speed():
    """1.7B, 8,192 tokens a GPU, layers recomputed: copies and shards; then what the saved memory buys."""
    found = []
    for types, ours, theirs in (("bf16", PURE, DDP_PURE), ("fp32+bf16", MIXED, DDP_MIXED)):
        found.append(case(f"1.7B {types} DDP recomputed", "qwen3-1.7b", "ddp", theirs, **_recomputed("ddp")))
        for sharding in ("none", "full", "grad_op"):
            found.append(
                case(
                    f"1.7B {types} {sharding} recomputed",
                    "qwen3-1.7b",
                    "fsdp",
                    {**ours, "sharding": sharding},
                    **_recomputed("fsdp"),
                )
            )
    for times in (2, 4, 8):
        batch = {"sequences": 8 * times}
        found.append(
            case(
                f"1.7B fp32+bf16 DDP x{times}", "qwen3-1.7b", "ddp", DDP_MIXED, **batch, **_recomputed("ddp")
            )
        )
        found.append(
            case(
                f"1.7B fp32+bf16 full x{times}",
                "qwen3-1.7b",
                "fsdp",
                {**MIXED, "sharding": "full"},
                **batch,
                **_recomputed("fsdp"),
            )
        )
    return found


def large():
    """8B, sequences of 8,192, all of them learned."""
    long = {"sequences": 1, "length": 8192, "prompt": 1}
    shards = {**PURE, "sharding": "full"}
    return [
        _large("recomputed", shards, **long, activation_checkpointing="full"),
        _large("every 2nd recomputed", shards, **long, activation_checkpointing=2),
        _large("kept", shards, **long),
        _large("grad_op, kept", {**shards, "sharding": "grad_op"}, **long),
        _large("kept, 16k", shards, **{**long, "sequences": 2}),
        _large("every 2nd recomputed, 16k", shards, **{**long, "sequences": 2}, activation_checkpointing=2),
        _large("tp 2, kept, not compiled", {**shards, "tp": 2}, **long, compile=False),
    ]


def _large(name, options, **settings):
    return case(f"8B bf16 full, {name}", "qwen3-8b", "fsdp", options, **settings)


def memory_of(types):
    """7B, 4,096 tokens a GPU: copies and shards, what lies in host memory, recomputing; what is wanted most goes first."""
    ours, theirs = {"bf16": (PURE, DDP_PURE), "fp32+bf16": (MIXED, DDP_MIXED)}[types]
    shards = {**ours, "sharding": "full"}
    found = [
        _seven(f"{types} DDP recomputed", "ddp", theirs, **_recomputed("ddp")),
        _seven(f"{types} full recomputed", "fsdp", shards, **_recomputed("fsdp")),
        *(
            _seven(
                f"{types} full recomputed, offload {where}",
                "fsdp",
                {**shards, "cpu_offload": where},
                **_recomputed("fsdp"),
            )
            for where in ("optimizer", "params")
        ),
        _seven(f"{types} DDP kept", "ddp", theirs),
        _seven(f"{types} full kept", "fsdp", shards),
    ]
    if (
        types == "fp32+bf16"
    ):  # weights, gradients and state of 7B: 107 GB, more than the host of one GPU may have
        found[3]["least_world"] = 2
    return found


def _seven(name, backend, options, **settings):
    steps = {"steps": 2, "warmup": 1} if "cpu_offload" in options else {}
    batch = {"sequences": 4, "length": 1024}
    return {**case(f"7B {name}", "llama-7b", backend, options, **batch, **settings), **steps}


def memory():
    """Both types."""
    return memory_of("bf16") + memory_of("fp32+bf16")


def four():
    """Four GPUs: 1.7B copied and spread with the same kernels, what the saved memory buys, and 8B."""
    found = []
    for types, ours, theirs in (("bf16", PURE, DDP_PURE), ("fp32+bf16", MIXED, DDP_MIXED)):
        found.append(case(f"1.7B {types} DDP recomputed", "qwen3-1.7b", "ddp", theirs, **_recomputed("ddp")))
        for name, extra in SPREAD.items():
            options = {**ours, "sharding": "full", **extra}
            found.append(case(f"1.7B {types} {name}", "qwen3-1.7b", "fsdp", options, **_recomputed("fsdp")))
    for times in (4, 8):
        batch = {"sequences": 8 * times}
        ddp = case(f"1.7B bf16 DDP x{times}", "qwen3-1.7b", "ddp", DDP_PURE, **batch, **_recomputed("ddp"))
        options = {**PURE, "sharding": "full"}
        full = case(f"1.7B bf16 full x{times}", "qwen3-1.7b", "fsdp", options, **batch, **_recomputed("fsdp"))
        found += [ddp, full]
    found.append(_large("kept, 16k", {**PURE, "sharding": "full"}, sequences=2, length=8192, prompt=1))
    return found


def host():
    """1.7B in bf16, 8,192 tokens a GPU: where the host's time shows; ways of having less of it."""
    found = [case("1.7B bf16 DDP recomputed", "qwen3-1.7b", "ddp", DDP_PURE, **_recomputed("ddp"))]
    ways = {
        "full": {},
        "full, two layers a unit": {"wrap": {"layers_per_unit": 2}},
        "full, four layers a unit": {"wrap": {"layers_per_unit": 4}},
        "grad_op": {"sharding": "grad_op"},
    }
    for name, extra in ways.items():
        options = {**PURE, "sharding": "full", **extra}
        found.append(case(f"1.7B bf16 {name}", "qwen3-1.7b", "fsdp", options, **_recomputed("fsdp")))
    options, batch = {**PURE, "sharding": "full"}, {"sequences": 32}
    found.append(case("1.7B bf16 full x4", "qwen3-1.7b", "fsdp", options, **batch, **_recomputed("fsdp")))
    for name, of in (("DDP", found[0]), ("full", found[1])):
        found.append({**of, "name": f"1.7B bf16 {name}, in the graph", "in_graph": True})
    return found


def tiny():
    """The same program on a CPU, to see that it runs."""
    batch = {"sequences": 2, "length": 32, "prompt": 8, "compile": False}
    return [
        case("tiny DDP", "tiny", "ddp", {"param_dtype": "fp32"}, **batch),
        case("tiny none", "tiny", "fsdp", {"sharding": "none"}, **batch),
        case("tiny full recomputed", "tiny", "fsdp", {"sharding": "full"}, **batch, **_recomputed("fsdp")),
    ]


def shrunk(case):
    """The same case of a tiny model, to see on a CPU that it runs."""
    shared = {**case["shared"], "compile": case.get("in_graph", False)}
    return {
        **case,
        "shape": "tiny",
        "sequences": 2,
        "length": 32,
        "prompt": 8,
        "budget": 64,
        "shared": shared,
    }


CASES = {
    "speed": speed(),
    "large": large(),
    "memory": memory(),
    "memory_bf16": memory_of("bf16"),
    "memory_fp32": memory_of("fp32+bf16"),
    "four": four(),
    "host": host(),
    "tiny": tiny(),
}
