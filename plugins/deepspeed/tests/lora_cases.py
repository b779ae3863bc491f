"""Cases of an adapter under ZeRO, against the reference engine; run by ``Workers``, see ``test_lora.py``."""

import json
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from engine_core.config import ModelConfig, OptimConfig, RoleConfig
from engine_core.config.roles import LoRAConfig
from engine_core.contracts.engines import WorkerContext
from engine_plugin_testing.contracts import close, identical, refused
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.options import TorchOptions


def adapted(bench, alone=False, path=None):
    """The bench's engine with an adapter over the tiny model; ``alone``: the reference engine in each process."""
    plugins = bench.load_plugins()
    lora = LoRAConfig(**{"rank": 3, **bench.settings.get("adapter", {})})
    kind = TorchEngine if alone else plugins.resolve("train_engines", bench.name)
    options = TorchOptions() if alone else bench.checked_options(plugins)
    config = RoleConfig(backend=bench.name, lora=lora, optim=OptimConfig(lr=1e-2, eps=1e-3), options=options)
    place = {} if alone else {"rank": bench.place.rank, "world_size": bench.place.world_size}
    context = WorkerContext(plugins=plugins, role="actor", device=bench.device, **place)
    engine = kind(
        config, ModelConfig(path=path or bench.model(tied=bench.settings.get("tied", True))), context
    )
    bench.stack.callback(engine.close)
    return engine


def an_adapter_learns_as_alone(bench):
    """Norms, merged weights, adapter tensors, samples and the base's log-probs are those of the engine ``torch``."""
    engine, plain, batch = adapted(bench), adapted(bench, alone=True), bench.batch()
    folder, share = bench.model(tied=bench.settings.get("tied", True)), bench.share(engine, batch)[1]
    for _ in range(3):
        norms = bench.step(engine, batch).grad_norm, bench.step(plain, batch).grad_norm
        assert abs(norms[0] / norms[1] - 1) < 1e-4, norms
    for adapter in (True, False):
        expected = dict(plain.named_weights(adapter=adapter))
        for name, value in engine.named_weights(adapter=adapter):
            close(value, expected.pop(name), 1e-4, name)
        assert not expected
    for on in (False, True):
        found, alone = (e.infer(share, ("log_probs",), adapter=on)["log_probs"] for e in (engine, plain))
        close(found, alone, 1e-4, f"log_probs, adapter {on}")
    assert engine.adapter.base_identity() == plain.adapter.base_identity()
    ids = torch.arange(2, 12)[None]
    with engine.generation_module() as ours, plain.generation_module() as theirs:
        close(
            ours(input_ids=ids).logits, theirs(input_ids=ids).logits, 1e-3, "logits of the sampler's module"
        )
    norms = bench.step(engine, batch).grad_norm, bench.step(plain, batch).grad_norm
    assert abs(norms[0] / norms[1] - 1) < 1e-4, norms  # the base's pass left the adapter trainable
    engine.export(bench.folder / "adapter", adapter=True)
    engine.export(bench.folder / "merged")
    bench.barrier()
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), bench.folder / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(bench.folder / "merged")
    expected = plain.module(input_ids=ids).logits
    close(peft(input_ids=ids).logits, expected, 1e-3, "logits of the exported adapter")
    close(merged(input_ids=ids).logits, expected, 1e-3, "logits of the exported model")


def only_the_adapter_is_trained(bench):
    """The optimizer and checkpoints hold the adapter alone; at stage 3 the base lies in parts."""
    engine, batch = adapted(bench), bench.batch()
    before = {n: t.clone() for n, t in engine.partitions.weights(1 << 20) if "lora_" not in n}
    bench.step(engine, batch)
    after = {n: t.clone() for n, t in engine.partitions.weights(1 << 20) if "lora_" not in n}
    identical(after, before, "weights of the base")
    trained = sum(p.ds_numel if hasattr(p, "ds_id") else p.numel() for p in engine._trainable_parameters())
    kept = sum(v.numel() for s in engine.optimizer.state.values() for v in s.values() if v.ndim)
    # two moments, over the ranks; stages 1 and 2 fill up each rank's part to a multiple
    shared = engine.ranks.size if engine.options.stage else 1
    assert 2 * trained <= kept * shared <= 2 * trained * 1.1 + 64
    engine.save(bench.folder / "state").result()
    bench.barrier()
    from engine_plugin_torch.shards import Shards

    names = Shards(bench.folder / "state", "weights").shapes
    assert names.keys() == engine.adapter.places().keys()
    assert all("lora_" in name for name in names)


def save_for_another(bench):
    """Two steps and a checkpoint; what the steps after it gave, for another engine to compare."""
    folder, batch = Path(bench.settings["shared"]), bench.batch()
    engine = adapted(bench)
    for _ in range(2):
        bench.step(engine, batch)
    engine.save(folder / "state").result()
    bench.barrier()
    norms = [bench.step(engine, batch).grad_norm for _ in range(2)]
    if bench.place.rank == 0:
        (folder / "norms.json").write_text(json.dumps(norms))


def go_on_from_another(bench):
    """The same norms in the next two steps; over another base it is refused."""
    folder, batch = Path(bench.settings["shared"]), bench.batch()
    engine = adapted(bench)
    engine.load(folder / "state")
    for expected in json.loads((folder / "norms.json").read_text()):
        assert abs(bench.step(engine, batch).grad_norm / expected - 1) < 1e-4
    other = adapted(bench, path=bench.model(seed=1))
    with refused("an adapter of another base", "another base model"):
        other.load(folder / "state")


def weights_that_come_are_taken(bench):
    """Those of an adapter become its own; a whole model becomes the base, and the adapter adds nothing."""
    engine, batch, share = adapted(bench), bench.batch(), None
    bench.step(engine, batch)
    share = bench.share(engine, batch)[1]
    own = dict(engine.named_weights(adapter=True))
    learned = engine.infer(share, ("log_probs",))["log_probs"]
    bench.step(engine, batch)
    assert (engine.infer(share, ("log_probs",))["log_probs"] - learned).abs().max() > 1e-3
    engine.load_named_weights(own.items())
    close(engine.infer(share, ("log_probs",))["log_probs"], learned, 1e-5, "log_probs")
    identity = engine.adapter.base_identity()
    whole = dict(engine.named_weights())
    engine.load_named_weights(whole.items())
    close(engine.infer(share, ("log_probs",))["log_probs"], learned, 1e-4, "log_probs of the base")
    close(engine.infer(share, ("log_probs",), adapter=False)["log_probs"], learned, 1e-4, "without")
    assert engine.adapter.base_identity() != identity
