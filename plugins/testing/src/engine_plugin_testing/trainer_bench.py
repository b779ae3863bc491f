"""The benches of trainers and environments: short runs on a random model, in the worker."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.config.assemble import load_config, plugins_for
from engine_plugin_testing.bench import Bench

if TYPE_CHECKING:
    from engine_core.config import EngineConfig

ROWS = [
    {"prompt": f"{number}+1=", "response": str(number + 1), "answer": str(number + 1)} for number in range(16)
]
CHAT = (
    "{% if tools %}{{ tools | tojson }}<eos>{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A chat template that shows tools, and whose turns end with the tokenizer's end token."""
MEASURED = re.compile(r"^(time$|time/|throughput/|memory/|gpu/)|seconds")
"""Metrics of the machine, which differ from run to run."""


def digits(completion: str) -> float:
    """Return the share of digits in a response."""
    return sum(letter.isdigit() for letter in completion) / (len(completion) or 1)


class TrainerBench(Bench):
    """A bench that trains with a trainer."""

    kind = "trainers"

    @property
    def name(self) -> str:
        """The name of the trainer."""
        return str(self.settings["name"])

    @property
    def trainer(self) -> str:
        """The name of the trainer of the runs."""
        return self.name

    def own(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of a run file that choose what is tested, with its options."""
        return {self.name: dict(options)} if options else {}

    def config(
        self, run: str, steps: int, options: Mapping[str, Any] | None = None, **keys: Any
    ) -> EngineConfig:
        """Return the config of a run.

        Args:
            run: its name.
            steps: its number of steps.
            options: the table of what is tested; default: that of the suite.
            keys: further keys, with ``__`` for the dot.
        """
        root = Path(self.settings["root"])
        files = [
            str(root / plugin) if plugin.endswith(".py") else plugin for plugin in self.settings["plugins"]
        ]
        settings = {
            "trainer": self.trainer,
            "plugins": files,
            "plugin": self.settings["plugin_options"],
            "model.path": self.model(),
            "data.prompts_per_step": 2,
            "actor.optim.lr": 1e-3,
            "checkpoint.every_steps": 1,
            "run": {"name": run, "dir": str(self.folder / "runs"), "steps": steps},
            "tracking.trackers": [],
        }
        own = self.own(self.settings["options"] if options is None else options)
        further = {name.replace("__", "."): value for name, value in keys.items()}
        return load_config(settings, overrides={**own, **self.settings["keys"], **further}, allow_code=True)

    def train(self, run: str, steps: int, resume: bool = False, **keys: Any) -> list[dict[str, float]]:
        """Train a run to its step, and return the metrics of its steps without those of the machine."""
        config = self.config(run, steps, **keys)
        plugins = plugins_for(config)
        spec: Any = plugins.spec("trainers", self.trainer)
        read = spec.sections or {"reward"}  # a trainer that names no section reads all of them
        scores = "reward" in read - spec.for_eval
        live = {"rewards": [digits]} if scores else {}
        trainer = plugins.resolve("trainers", self.trainer)(
            config, data=self.settings["rows"] or ROWS, **live
        )
        folder = Path(config.run.dir) / run
        try:
            trainer.train(resume=folder if resume else None)
        finally:
            trainer.close()
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
        return [
            {name: value for name, value in line.items() if not MEASURED.search(name)}
            for line in lines
            if line["step"]
        ]

    def stopped(self, run: str, steps: int, at: int, **keys: Any) -> int:
        """Train a run that a signal stops in the middle of optimizer step ``at``; return its exit code.

        The weights have changed then, and the rest of the step is to come. 0: the run was not stopped.
        """
        from torch.optim.optimizer import register_optimizer_step_post_hook

        left = [at]

        def stop(*_: object) -> None:
            """Raise the signal in its turn."""
            left[0] -= 1
            if not left[0]:
                signal.raise_signal(signal.SIGTERM)

        handle = register_optimizer_step_post_hook(stop)
        try:
            self.train(run, steps, **keys)
        except SystemExit as ended:
            return int(ended.code or 0)
        finally:
            handle.remove()
        return 0

    def model(self) -> str:
        """Return the folder of a random model with its tokenizer."""
        from engine_plugin_testing.reference import write_model

        folder = self.place.cache / "trainer-model"
        if not folder.exists():
            write_model(folder, {}, seed=0, tied=True)
        return str(folder)


class EnvironmentBench(TrainerBench):
    """A bench that trains with an environment, by the trainer ``rl``."""

    kind = "environments"
    trainer = "rl"

    def own(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the table of the environment, and a group of short responses."""
        table = {
            "name": self.name,
            "max_turns": 3,
            "max_failure_share": 1.0,
            **({self.name: dict(options)} if options else {}),
        }
        keys: dict[str, Any] = {"data.chat_template": True} if self.settings["chat"] else {}
        keys |= {"rollout.group_size": 2, "rollout.max_response_tokens": 24}
        keys["rollout.hf.batch_size"] = 1  # rounding must not depend on when a turn is sampled
        return {"environment": table, **keys}

    def model(self) -> str:
        """Return the folder of a random model; with ``chat`` its tokenizer has a chat template."""
        if not self.settings["chat"]:
            return super().model()
        from engine_plugin_testing.reference import tokenizer, write_model

        folder = self.place.cache / "chat-model"
        if not folder.exists():
            write_model(
                folder, {"max_position_embeddings": 4096}, seed=0, tied=True
            )  # schemas of tools are long
            made = tokenizer()
            made.chat_template = CHAT
            made.save_pretrained(folder)
        return str(folder)
