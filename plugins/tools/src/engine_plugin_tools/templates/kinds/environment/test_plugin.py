"""A run of two steps on a random model."""

import json

from engine_core import Trainer, load_config
from engine_plugin_testing.reference import write_model


def test_a_run_of_two_steps_plays_episodes_of_several_turns(tmp_path):
    write_model(tmp_path / "model", {}, seed=0, tied=True)
    settings = {
        "model.path": str(tmp_path / "model"),
        "environment": {"name": "template_name", "max_turns": 2, "template_name": {"again": "?"}},
        "rollout": {"group_size": 2, "max_response_tokens": 16},
        "data.prompts_per_step": 2,
        "run": {"steps": 2, "dir": str(tmp_path), "name": "run"},
    }
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(4)]
    Trainer(load_config(settings), data=rows).train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["environment/turns"] > 1 for line in lines)
