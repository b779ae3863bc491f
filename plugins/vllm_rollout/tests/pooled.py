"""One engine of vLLM for many contracts: each start takes seconds, and the kit wants an engine a contract.

A closed engine waits here with nothing queued. The next one with the same model shape, tokenizer and options gets it, with the
weights of its own folder loaded anew.
"""

import contextlib
import json
from pathlib import Path

from safetensors.torch import load_file

from engine_plugin_vllm_rollout import engine, versions


@contextlib.contextmanager
def one_engine(rank, world_size):
    """While the kit's worker lives, engines are lent."""
    free, made = {}, {}
    start, shut_down = engine.start, versions.shut_down

    def lend(model, tokenizer, options, place, **rest):
        key = _key(model, tokenizer, options, place)
        if not free.get(key):
            llm = start(model, tokenizer, options, place, **rest)
            made[id(llm)] = key
            return llm
        llm = free[key].pop()
        versions.reload(llm, list(_weights(model).items()))
        llm.reset_prefix_cache(reset_running_requests=True)
        return llm

    def give_back(llm):
        for internal in list(llm.output_processor.request_states):
            llm.abort_request([internal], internal=True)
        free.setdefault(made[id(llm)], []).append(llm)

    engine.start, versions.shut_down = lend, give_back
    try:
        yield
    finally:
        engine.start, versions.shut_down = start, shut_down


def _key(model, tokenizer, options, place):
    files = [(Path(model) / "config.json"), (Path(tokenizer) / "tokenizer.json")]
    return json.dumps(
        [*(json.loads(file.read_text()) for file in files), options.model_dump(), str(place)], sort_keys=True
    )


def _weights(model):
    return {
        name: value
        for file in sorted(Path(model).glob("*.safetensors"))
        for name, value in load_file(file).items()
    }
