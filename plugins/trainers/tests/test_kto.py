"""KTO as a whole run: which metrics a mini-batch of one or both kinds of responses has."""

from __future__ import annotations

import json

from engine_core import load_config
from engine_core.config.assemble import plugins_for

OF_KIND = {"rewards/chosen": True, "logps/chosen": True, "rewards/rejected": False, "logps/rejected": False}


def rows(*labels):
    return [
        {"prompt": f"{i}+{i}=", "completion": str(2 * i), "label": label} for i, label in enumerate(labels)
    ]


def test_a_kind_of_responses_that_a_mini_batch_lacks_has_no_metric_and_no_margin(tiny_model, tmp_path):
    held_out = tmp_path / "heldout.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows(False, False)))
    settings = {
        "trainer": "kto",
        "model.path": str(tiny_model),
        "data.validation": str(held_out),
        "data.prompts_per_step": 2,
        "data.shuffle": False,
        "actor.optim.lr": 1e-2,
        "eval.at_end": True,
        "run.dir": str(tmp_path / "runs"),
        "run.steps": 3,
        "tracking.trackers": [],
    }
    config = load_config(overrides=settings)
    data = rows(True, False, True, True, False, False)
    trainer = plugins_for(config).resolve("trainers", "kto")(config, data=data)
    trainer.train()
    trainer.close()
    lines = [json.loads(line) for line in (trainer.folder.path / "metrics.jsonl").read_text().splitlines()]
    both, desirable, undesirable = lines
    assert OF_KIND.keys() <= both.keys()
    assert both["rewards/margin"] == both["rewards/chosen"] - both["rewards/rejected"]
    for line, prefix, kind in (
        (desirable, "", True),
        (undesirable, "", False),
        (undesirable, "eval/", False),
    ):
        found = {name for name in (*OF_KIND, "rewards/margin") if prefix + name in line}
        assert found == {name for name in OF_KIND if OF_KIND[name] is kind}
        assert line[f"{prefix}rewards/desirable_share"] == float(kind)
    assert undesirable["rewards/rejected"] != 0
