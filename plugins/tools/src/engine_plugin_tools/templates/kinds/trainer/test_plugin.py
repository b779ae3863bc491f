"""A resumed run ends like one that was not stopped, on a random model."""

from engine_core import load_config
from engine_plugin_template.plugin import TemplateName
from engine_plugin_testing.reference import write_model


def vowels(completion):
    """Return the share of vowels in a response."""
    return sum(letter in "aeiou" for letter in completion) / (len(completion) or 1)


def test_a_resumed_run_ends_like_one_that_was_not_stopped(tmp_path):
    write_model(tmp_path / "model", {}, seed=0, tied=True)
    rows = [{"prompt": f"{number}+1="} for number in range(8)]

    def trainer(name, steps):
        settings = {
            "trainer": "template_name",
            "template_name.keep": 2,
            "model.path": str(tmp_path / "model"),
            "rollout": {"group_size": 4, "max_response_tokens": 8},
            "data.prompts_per_step": 2,
            "run": {"steps": steps, "dir": str(tmp_path), "name": name},
        }
        return TemplateName(load_config(settings), data=rows, rewards=[vowels])

    whole = trainer("whole", 4).train()
    trainer("half", 2).train()
    resumed = trainer("half", 4).train(resume=tmp_path / "half")
    assert resumed["template_name/best"] == whole["template_name/best"] >= 0
    assert resumed["actor/loss"] == whole["actor/loss"]
