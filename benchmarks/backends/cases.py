"""What run.py compares: train backends and their layouts over the same weights and the same global batch.

A case is a backend, its option table, a model and a batch. Cases of one ``family`` share processes. In ``bf16`` every backend computes
in bfloat16 and steps float32 weights, whatever it calls that.
"""

from __future__ import annotations

from engine_plugin_tools.bench.shapes import SHAPES

MOE = {
    **SHAPES["qwen3-0.6b"],
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_hidden_layers": 8,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
TINY_MOE = {
    **MOE,
    **SHAPES["tiny"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
MODELS = {**SHAPES, "moe": MOE, "tiny-moe": TINY_MOE}

TYPES = {
    "torch": {
        "fp32": {"param_dtype": "fp32", "compute_dtype": "fp32"},
        "bf16": {"param_dtype": "fp32", "compute_dtype": "bf16"},
    },
    "fsdp": {
        kind: {"param_dtype": "fp32", "mixed_precision": {"param_dtype": kind}} for kind in ("fp32", "bf16")
    },
    "megatron": {kind: {"compute_dtype": kind} for kind in ("fp32", "bf16")},
    "deepspeed": {kind: {"compute_dtype": kind} for kind in ("fp32", "bf16")},
}
TYPES["ddp"] = TYPES["torch"]
PLAIN = {"compile": False, "log_prob_chunk_tokens": 4096}
READ = {"loading": "sharded", "probe": False}
OPTIONS = {
    "torch": PLAIN,
    "ddp": PLAIN,
    "fsdp": {**PLAIN, **READ, "sharding": "full"},
    "megatron": {"log_prob_chunk_tokens": 4096},
    "deepspeed": PLAIN,
}
FAMILIES = {
    "torch": "torch",
    "ddp": "torch",
    "fsdp": "torch",
    "megatron": "megatron",
    "deepspeed": "deepspeed",
}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
COMPILED = {"compile": True}


def case(name, backend, types="bf16", *, model, lengths, prompt, budget, ranks=None, **options):
    """``lengths`` are of the global batch; ``budget`` is the size of a micro-batch, 0: all that a rank is given."""
    return {
        "name": f"{name} {types}",
        "family": FAMILIES[backend],
        "backend": backend,
        "types": types,
        "model": model,
        "options": {**OPTIONS[backend], **TYPES[backend][types], **options},
        "lengths": lengths,
        "prompt": prompt,
        "budget": budget,
        "ranks": ranks,
    }


def parity(world, model="qwen3-0.6b", moe="moe", short=1):
    """Loss and gradient norm of two steps: fp32 and bf16, dense and with experts."""
    lengths = [n // short for n in (512, 384, 256, 640, 128, 512, 256, 384)]
    batch = {"lengths": lengths, "prompt": lengths[4] // 2, "budget": 1024 // short}
    dense, sparse = {**batch, "model": model}, {**batch, "model": moe}
    found = []
    for types in TYPES["megatron"]:
        whole = {**dense, "budget": 0}
        found += [
            case("torch, one process", "torch", types, **dense, ranks=1),
            case("DDP", "ddp", types, **whole),
            case("FSDP full", "fsdp", types, **dense),
            case("FSDP tp 2", "fsdp", types, **dense, tp=2, loading="auto"),
            *(case(f"Megatron {name}", "megatron", types, **dense, **how) for name, how in _dense(world)),
            *(case(f"ZeRO-{stage}", "deepspeed", types, **dense, stage=stage) for stage in (1, 2, 3)),
        ]
    for types in TYPES["megatron"]:
        found += [
            case("experts: torch, one process", "torch", types, **sparse, ranks=1),
            case("experts: FSDP full", "fsdp", types, **sparse, loading="auto"),
            *(
                case(f"experts: Megatron {name}", "megatron", types, **sparse, **how)
                for name, how in _sparse(world)
            ),
        ]
    return found


def _dense(world):
    tp, together = {"tp": 2}, {"tp": 2, "sequence_parallel": True}
    if world == 2:
        return [
            ("dp 2", OVERLAP),
            ("tp 2", tp),
            ("tp 2 sp", together),
            ("pp 2", {"pp": 2}),
            ("pp 2 vp 2", {"pp": 2, "virtual_pp": 2}),
            ("cp 2", {"cp": 2}),
        ]
    return [
        ("dp 4", OVERLAP),
        ("tp 2 pp 2 sp", {**together, "pp": 2}),
        ("tp 4 sp", {**together, "tp": 4}),
        ("tp 2 dp 2", {**tp, **OVERLAP}),
        ("pp 4", {"pp": 4}),
        ("pp 2 dp 2", {"pp": 2, **OVERLAP}),
        ("cp 2 dp 2", {"cp": 2}),
        ("tp 2 cp 2 sp", {**together, "cp": 2}),
    ]


def _sparse(world):
    together = {"tp": 2, "sequence_parallel": True}
    if world == 2:
        return [("dp 2", {}), ("ep 2", {"ep": 2})]
    return [
        ("ep 2 dp 4", {"ep": 2}),
        ("ep 4", {"ep": 4}),
        ("ep 2 tp 2 sp", {**together, "ep": 2}),
        ("ep 2 pp 2", {"ep": 2, "pp": 2}),
    ]


def speed(world, model="qwen3-1.7b", length=1024, each=16):
    """Tokens a second: ``each`` sequences of ``length`` a GPU, all layers' activations kept."""
    batch = {"model": model, "lengths": [length] * each * world, "prompt": length // 4}
    micro = {**batch, "budget": length * each // 2}
    finer = {**micro, "budget": length * each // 4}  # a pipeline is filled by many
    together = {"tp": 2, "sequence_parallel": True}
    found = [
        case("DDP compiled", "ddp", **batch, budget=0, **COMPILED),
        case("FSDP full compiled", "fsdp", **micro, **COMPILED),
        case("FSDP full", "fsdp", **micro),
    ]
    # whatever keeps memory when it is closed comes after what does not
    if world == 2:
        found += [
            case("Megatron tp 2 sp", "megatron", **micro, **together),
            case("Megatron pp 2", "megatron", **finer, pp=2),
            case("Megatron cp 2", "megatron", **micro, cp=2),
        ]
    else:
        found += [
            case("Megatron tp 2 pp 2 sp", "megatron", **finer, **together, pp=2),
            case("Megatron tp 4 sp", "megatron", **micro, **{**together, "tp": 4}),
            case("Megatron tp 2 dp 2 sp", "megatron", **micro, **together, **OVERLAP),
            case("Megatron pp 2 dp 2", "megatron", **finer, pp=2, **OVERLAP),
        ]
    found.append(case(f"Megatron dp {world}", "megatron", **micro, **OVERLAP))
    return found + [case(f"ZeRO-{stage}", "deepspeed", **micro, stage=stage) for stage in (1, 2, 3)]


def large(world, model="qwen3-8b", length=4096, each=4):
    """The same of 8B: what is most telling comes first, since the time may end."""
    batch = {"model": model, "lengths": [length] * each * world, "prompt": 1}
    micro, finer = {**batch, "budget": 2 * length}, {**batch, "budget": length}
    together = {"tp": 2, "sequence_parallel": True}
    found = [case("FSDP full compiled", "fsdp", **micro, **COMPILED)]
    if world == 2:
        found += [
            case("Megatron tp 2 sp", "megatron", **micro, **together),
            case("Megatron pp 2", "megatron", **finer, pp=2),
        ]
    else:
        found += [
            case("Megatron tp 2 pp 2 sp", "megatron", **finer, **together, pp=2),
            case("Megatron tp 4 sp", "megatron", **micro, **{**together, "tp": 4}),
            case("Megatron tp 2 dp 2 sp", "megatron", **micro, **together, **OVERLAP),
        ]
    return [
        *found,
        case("ZeRO-3", "deepspeed", **finer, stage=3, loading="sharded"),
        case("FSDP full", "fsdp", **finer),
        case(f"Megatron dp {world} recomputed", "megatron", **finer, **OVERLAP, recompute="full"),
    ]


def tiny(world):
    """All layouts of ``parity`` in seconds, on a CPU too."""
    return parity(world, "tiny", "tiny-moe", short=16)


def tiny_speed(world):
    """What ``speed`` and ``large`` do, of a tiny model."""
    told = [{**made, "name": f"large: {made['name']}"} for made in large(world, "tiny", 32, 4)]
    return [*speed(world, "tiny", 32, 4), *told]


SETS = {"parity": parity, "speed": speed, "large": large, "tiny": tiny, "tiny-speed": tiny_speed}
