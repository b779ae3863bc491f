"""Write the folder of a model with random weights in bfloat16, drawn on the accelerator where there is one.

python benchmarks/backends/weights.py --model qwen3-0.6b --out FOLDER

Every case reads this folder, so all of them begin with the same weights to the bit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from cases import MODELS

from engine_core.config import ModelConfig
from engine_core.local.engine_host import default_device
from engine_core.model_config import load_hf_config
from engine_plugin_torch.model_loading import cast_parameters, random_model


def write(name, folder, device):
    """``folder`` appears when it is whole."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        (Path(made) / "config.json").write_text(json.dumps(MODELS[name]))
        model = ModelConfig(path=made, attention="sdpa")
        built = cast_parameters(random_model(load_hf_config(model), model, device), torch.bfloat16)
        built.save_pretrained(Path(made) / "model", max_shard_size="4GB")
        (Path(made) / "model").rename(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=sorted(MODELS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="a folder of this name for each model")
    parser.add_argument("--device", choices=["cuda", "cpu"])
    given = parser.parse_args()
    device = torch.device(given.device) if given.device else default_device()
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.model:
        begun = time.perf_counter()
        write(name, given.out / name, device)
        print(f"{name}: {time.perf_counter() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
