"""Cases of models on real ranks over gloo, beside transformers on one; see ``test_build.py`` and ``test_weights.py``."""

import itertools
import math
import types

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from engine_plugin_megatron.layout import MeshLayout
from engine_plugin_megatron.models import build, weights
from engine_plugin_megatron.ranks import end_groups
from engine_plugin_megatron.reading import in_memory
from engine_plugin_testing.contracts import refused
from engine_plugin_torch.weights import published_weights

LENGTHS = ((7, 13, 4), (16, 1, 3), (8,), (2, 10))  # of the sequences of packs; 4 ranks divide each sum
CLOSE = 1e-5
KINDS = {
    "llama": (LlamaConfig, {"head_dim": 16}),
    "mixtral": (MixtralConfig, {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 24}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
        },
    ),
    "seed_oss": (
        SeedOssConfig,
        {"head_dim": 16, "pad_token_id": None, "attention_dropout": 0.0, "residual_dropout": 0.0},
    ),
    "smollm3": (SmolLM3Config, {"no_rope_layer_interval": 3, "pad_token_id": None}),
}


class Bench:
    """One layout of the ranks; what a case is given."""

    def __init__(self, settings, place):
        self.settings, self.place = settings, place
        axes = {name: settings.get(name, 1) for name in ("tp", "pp", "vp", "ep")}
        self.layout = MeshLayout(**axes, dp=place.world_size // axes["tp"] // axes["pp"])

    def __enter__(self):
        layout = self.layout
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            layout.vp if layout.vp > 1 else None,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.tp,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        return self

    def __exit__(self, *_):
        end_groups()

    def reference(self, **changes):
        """A model of transformers whose norms and biases are not those of the beginning."""
        kind, own = KINDS[self.settings["kind"]]
        shape = {
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "attn_implementation": "eager",
            **own,
        }
        torch.manual_seed(0)
        config = kind(**{**shape, **self.settings.get("model", {}), **changes})
        model = AutoModelForCausalLM.from_config(config).float()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                scale = 0.3 if parameter.ndim == 1 else 0.05
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
        return model

    def chunks(self, hf_config, value_head=False, dtype=torch.float32, **options):
        """This rank's part of the model, its weights not loaded."""
        given = types.SimpleNamespace(
            sequence_parallel=self.settings.get("sequence_parallel", False), **options
        )
        config = build.transformer_config(hf_config, self.layout, given, dtype=dtype)
        return [
            build.gpt_model(
                hf_config,
                config,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
                vp_stage=chunk if self.layout.vp > 1 else None,
                value_head=value_head,
            )
            for chunk in range(self.layout.vp)
        ]


def packs(vocabulary, lengths=LENGTHS):
    """Of each pack: [T] tokens, [T] what follows each (itself at the ends), [T] weights of log-probs (0 at the ends)."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for sizes in lengths:
        ids = [torch.randint(0, vocabulary, (n,), generator=generator) for n in sizes]
        targets = torch.cat([torch.cat([x[1:], x[-1:]]) for x in ids])
        scale = torch.cat(
            [torch.cat([torch.rand(n - 1, generator=generator), torch.zeros(1)]) for n in sizes]
        )
        made.append((torch.cat(ids), targets, scale / 16, sizes))
    return made


def expected(model, made, output=None):
    """Logits of each pack, the loss, and its gradient by name; each sequence alone."""
    logits, loss = [], 0.0
    for ids, targets, scale, sizes in made:
        one = torch.cat(
            [
                (model if output is None else output)(input_ids=x[None], use_cache=False).logits[0]
                for x in ids.split(sizes)
            ]
        )
        logits.append(one.detach())
        loss = loss + loss_of(one, targets, scale)
    loss.backward()
    gradient = ((name, p.grad) for name, p in model.named_parameters())
    return logits, float(loss), dict(published_weights(model, gradient))


def loss_of(logits, targets, scale):
    """Of log-probs where there are logits of tokens, of the values where there is one a token."""
    if logits.shape[-1] == 1:
        return (logits[:, 0] * scale).sum() + (logits[:, 0] ** 2 * scale).sum()
    return -(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0] * scale).sum()


def packed(ids, sizes):
    """Arguments of a forward pass of one pack."""
    boundaries = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in sizes])
    parameters = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(sizes),
        max_seqlen_kv=max(sizes),
    )
    return ids[None], positions[None], parameters


def found(chunks, hf_config, made):
    """As ``expected``, by megatron-core's schedule and its sums over ranks."""
    config = chunks[0].config
    wrapped = [
        DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), chunk)
        for chunk in chunks
    ]
    config.finalize_model_grads_func = finalize_model_grads
    seen, losses = [], []
    replicas = parallel_state.get_data_parallel_world_size()
    made = made[parallel_state.get_data_parallel_rank() :: replicas]

    def forward_step(batches, model):
        ids, targets, scale, sizes = next(batches)
        tokens, positions, parameters = packed(ids, sizes)
        output = model(tokens, positions, None, packed_seq_params=parameters)

        def loss(logits):
            whole = (
                logits
                if logits.shape[-1] == 1
                else tensor_parallel.gather_from_tensor_model_parallel_region(logits)
            )
            seen.append(whole[0].detach())
            one = loss_of(whole[0], targets, scale)
            losses.append(float(one))
            # Megatron divides by the number of micro-batches (in place), and averages over data-parallel ranks
            return one * len(made) * replicas, {}

        return output, loss

    shape = sum(made[0][3])
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(made) for _ in chunks] if len(chunks) > 1 else iter(made),
        model=wrapped if len(chunks) > 1 else wrapped[0],
        num_microbatches=len(made),
        seq_length=shape,
        micro_batch_size=1,
        forward_only=False,
    )
    gradient = dict(weights.stream(wrapped, hf_config, of=lambda p: p.main_grad))
    total = torch.tensor(sum(losses))
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return seen, float(total), gradient


def close(found, expected, what, tolerance=CLOSE):
    gap = float((found.double() - expected.double()).abs().max())
    limit = tolerance * max(1.0, float(expected.abs().max()))
    assert gap <= limit, f"{what}: {gap} > {limit}"


def computes_as_transformers(bench):
    """Logits and all gradients of packs are those of each sequence alone in transformers."""
    model = bench.reference()
    chunks = bench.chunks(model.config)
    weights.load(chunks, model.config, in_memory(dict(published_weights(model)), {}))
    made = packs(model.config.vocab_size)
    compare(bench, chunks, model.config, made, expected(model, made))


def values_compute_as_in_transformers(bench):
    """So are the values of a critic, whose head stands where logits were."""
    model = bench.reference()
    config, decoder = model.config, model.model
    head = torch.nn.Parameter(torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(3)))

    def values(**inputs):
        return types.SimpleNamespace(logits=decoder(**inputs).last_hidden_state @ head.T)

    state = {f"model.{name}": tensor for name, tensor in decoder.state_dict().items()}
    chunks = bench.chunks(config, value_head=True)
    weights.load(chunks, config, in_memory({**state, "score.weight": head.detach()}, {}))
    same(dict(weights.stream(chunks, config)), {**state, "score.weight": head.detach()})
    made = packs(config.vocab_size)
    logits, loss, gradient = expected(model, made, values)
    gradient = {name: value for name, value in gradient.items() if name in state}
    compare(bench, chunks, config, made, (logits, loss, {**gradient, "score.weight": head.grad}))


def compare(bench, chunks, hf_config, made, reference):
    logits, loss, gradient = reference
    seen, total, grads = found(chunks, hf_config, made)
    if parallel_state.is_pipeline_last_stage():
        vocabulary = hf_config.vocab_size
        mine = logits[parallel_state.get_data_parallel_rank() :: bench.layout.dp]
        for one, other in zip(seen, mine, strict=True):
            close(one[:, :vocabulary], other, "logits")
            assert (one[:, vocabulary:] < -1e4).all()
        assert math.isclose(total, loss, rel_tol=CLOSE), (total, loss)
    assert grads.keys() == gradient.keys(), grads.keys() ^ gradient.keys()
    for name, value in gradient.items():
        assert float(value.abs().max()) > 0, name
        close(grads[name], value, name)


def padding_of_the_vocabulary_takes_no_part(bench):
    """Rows that only fill up the last rank's part are zero, and so are their gradients; outputs do not know of them."""
    computes_as_transformers(bench)
    model = bench.reference()
    chunks = bench.chunks(model.config)
    weights.load(chunks, model.config, in_memory(dict(published_weights(model)), {}))
    found(chunks, model.config, packs(model.config.vocab_size))
    size, tp = model.config.vocab_size, bench.layout.tp
    own = -(-size // tp)
    padding = min(own, max(0, (parallel_state.get_tensor_model_parallel_rank() + 1) * own - size))
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        weight = chunks[0].get_parameter(name)
        assert len(weight) == own, name
        assert not weight[own - padding :].any(), name
        assert not weight.main_grad[own - padding :].any(), name
        assert bool(weight.main_grad[: own - padding].any()) == (padding < own), name


def a_norm_that_is_not_marked_learns_wrong(bench):
    """What marks on the norms are for: without them each rank has the gradient of its own tokens alone."""
    model = bench.reference()
    chunks = bench.chunks(model.config)
    weights.load(chunks, model.config, in_memory(dict(published_weights(model)), {}))
    made = packs(model.config.vocab_size)
    gradient = expected(model, made)[2]
    norms = [p for name, p in chunks[0].named_parameters() if "layernorm" in name and p.sequence_parallel]
    assert len(norms) == 2 * model.config.num_hidden_layers + 1
    for weight in norms:
        weight.sequence_parallel = False
    grads = found(chunks, model.config, made)[2]
    wrong = [name for name, value in gradient.items() if float((grads[name] - value).abs().max()) > 1e-3]
    assert {name for name in gradient if name.endswith(("layernorm.weight", "model.norm.weight"))} == {*wrong}


def a_rectangle_computes_as_its_rows(bench):
    """Without packing: [batch, length], padding behind."""
    model = bench.reference()
    chunks = bench.chunks(model.config)
    weights.load(chunks, model.config, in_memory(dict(published_weights(model)), {}))
    ids = torch.randint(3, model.config.vocab_size, (3, 12), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(12).expand(3, 12)
    with torch.no_grad():
        logits = chunks[0](ids, positions, None)
        whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
        close(whole, model(input_ids=ids, use_cache=False).logits, "logits")


def half_precision_is_that_of_transformers(bench):
    """In bfloat16 all parameters are, weights pass exactly, and logits differ as roundings do."""
    model = bench.reference().to(torch.bfloat16)
    chunks = bench.chunks(model.config, dtype=torch.bfloat16)
    state = dict(published_weights(model))
    weights.load(chunks, model.config, in_memory(state, {}))
    assert {p.dtype for p in chunks[0].parameters()} == {torch.bfloat16}
    same(dict(weights.stream(chunks, model.config)), state)
    for ids, _, _, sizes in packs(model.config.vocab_size)[:2]:
        tokens, positions, parameters = packed(ids, sizes)
        with torch.no_grad():
            logits = chunks[0](tokens, positions, None, packed_seq_params=parameters)
            whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits)[0].float()
            own = torch.cat([model(input_ids=x[None], use_cache=False).logits[0] for x in ids.split(sizes)])
            exact = bench.reference()
            true = torch.cat([exact(input_ids=x[None], use_cache=False).logits[0] for x in ids.split(sizes)])
        gap, theirs = float((whole - true).norm()), float((own.float() - true).norm())
        assert gap <= 2 * theirs, f"off by {gap}, transformers by {theirs}, of {float(true.norm())}"


def loads_and_streams_exactly(bench):
    """What is loaded is gathered again, to the bit, under its names, and the slices of all ranks are the whole tensors."""
    model = bench.reference()
    chunks = bench.chunks(model.config)
    state = dict(published_weights(model))
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(math.nan)
    weights.load(chunks, model.config, in_memory(state, {}))
    same(dict(weights.stream(chunks, model.config)), state)
    own = [
        (name, shape, at, part.tolist())
        for place in weights.names(chunks, model.config)
        if place.writes
        for name, shape, at, part in weights.parts(place)
    ]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    put = {name: torch.full(tensor.shape, math.nan) for name, tensor in state.items()}
    for name, shape, at, part in itertools.chain(*everyone):
        box = torch.tensor(part)
        where = put[name][tuple(slice(first, first + n) for first, n in zip(at, box.shape, strict=True))]
        assert where.isnan().all(), f"{name}: two ranks write {at}"
        where.copy_(box)
        assert tuple(put[name].shape) == shape
    same(put, state)


def mixes_what_is_loaded(bench):
    """``mix`` of the new values, the rest of the old ones."""
    model, other = bench.reference(), bench.reference()
    chunks = bench.chunks(model.config)
    new, old = dict(published_weights(other)), dict(published_weights(model))
    new = {name: tensor * 3 - 0.5 for name, tensor in new.items()}
    weights.load(chunks, model.config, in_memory(old, {}))
    weights.load(chunks, model.config, in_memory(new, {}), mix=0.25)
    for name, tensor in weights.stream(chunks, model.config):
        close(tensor, 0.75 * old[name] + 0.25 * new[name], name)


def refuses_another_shape(bench):
    """A tensor of another model is refused with its name."""
    model = bench.reference()
    chunks = bench.chunks(model.config)
    state = dict(published_weights(model))
    name = "model.layers.1.mlp.down_proj.weight"
    with refused("another model's tensor", f"'{name}' has shape [96, 64]; expected [64, 96]"):
        weights.load(
            chunks, model.config, in_memory({**state, name: state[name].T}, {name: state[name].shape})
        )


def no_group_is_left(bench):
    """megatron-core forgets its groups; ended they must be, or their threads go on."""
    groups = dist.distributed_c10d._world.pg_map
    assert len(groups) > 1
    end_groups()
    assert list(groups) == [dist.group.WORLD]
    end_groups()  # nothing: they are gone


def same(found, expected):
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
