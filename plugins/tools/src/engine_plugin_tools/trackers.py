"""Trackers, whose libraries are imported in the tracker's own thread, on first use."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import re
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.config.dump import leaves
from engine_core.config.read import key_text
from engine_core.errors import EnvironmentProblem
from engine_core.runs.tracking import RunFolder, Tracker
from engine_plugin_tools.packages import require_package
from engine_plugin_tools.tracker_threads import ENDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from engine_core.types import Rollout

log = logging.getLogger("engine")


class DetailTracker(Tracker):
    """The base of trackers that also show completions and histograms, and store files of the run.

    A derived class defines ``log`` and, of ``histograms``, ``completions`` and ``artifact``, what its backend has.
    """

    package: ClassVar[str]  #: the library, which the extra of the tracker's name installs

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        name = self.package.removesuffix("_client")
        require_package(self.package, name, f"Tracker '{name}'", ", or take it out of tracking.trackers")

    def start(self, run: RunFolder, config: Mapping[str, Any]) -> None:
        """Keep the run folder, and open the backend by ``begin``."""
        self._folder = run.path
        self.begin(run, config)

    def begin(self, run: RunFolder, config: Mapping[str, Any]) -> None:
        """Open the backend.

        Raises:
            NotImplementedError: by default.
        """
        raise NotImplementedError

    def on_event(self, event: str, step: int, data: Mapping[str, Any]) -> None:
        """Show rollouts and advantages of every ``details_every_steps``-th step; store files at the end."""
        every = getattr(self.options, "details_every_steps", 0)
        due = every and step % every == 0
        if event == "rollouts_finished" and due:
            self.show_rollouts(step, data["rollouts"])
        elif event == "advantages_computed" and due:
            values = data["advantages"].numpy(force=True)
            self.histograms(step, {"advantage": values} if values.size else {})
        elif event in ENDS:
            for pattern in getattr(self.options, "artifacts", ()):
                for path in sorted(self._folder.glob(pattern)):
                    self.artifact(path)

    def show_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Show rewards and lengths as histograms, and the first rollouts as a table."""
        import numpy

        values = {
            "reward": [rollout.reward for rollout in rollouts if rollout.valid],
            "response_length": [rollout.response_length for rollout in rollouts],
        }
        self.histograms(step, {name: numpy.array(found) for name, found in values.items() if found})
        rows = [
            {"step": step, "reward": r.reward, "prompt": r.prompt.text, "response": r.text}
            for r in rollouts[: self.options.completions]
        ]
        if rows:
            self.completions(step, rows)

    def histograms(self, step: int, values: Mapping[str, NDArray[Any]]) -> None:
        """Show the distribution of values [N] by name."""

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show rows of ``step``, ``reward``, ``prompt`` and ``response``."""

    def artifact(self, path: Path) -> None:
        """Store a file of the run folder."""


class TensorBoard(DetailTracker):
    """A tracker that writes event files next to the run folders: ``tensorboard --logdir runs/tensorboard``.

    Below a run folder they would be found twice, the second time through the link ``latest``.
    """

    package = "tensorboard"

    def begin(self, run: RunFolder, config: Mapping[str, Any]) -> None:
        """Open the event files."""
        from torch.utils.tensorboard import SummaryWriter

        # Steps at or after purge_step that an earlier attempt wrote are hidden.
        purge_step = run.start_step + 1 if run.attempt else None
        folder = run.path.parent / self.options.folder / run.path.name
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        keys = "\n".join(f"    {key_text(path)} = {value!r}" for path, value in leaves(dict(config)))
        self._writer.add_text("config", keys, run.start_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def histograms(self, step: int, values: Mapping[str, NDArray[Any]]) -> None:
        """Write histograms."""
        for name, found in values.items():
            self._writer.add_histogram(f"distribution/{name}", found, step)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a Markdown text: each prompt and response is a code block."""
        blocks = [
            f"reward {row['reward']:g}\n\n{_code(row['prompt'])}\n\n{_code(row['response'])}" for row in rows
        ]
        self._writer.add_text("completions", "\n\n---\n\n".join(blocks), step)

    def close(self) -> None:
        """Close the event files."""
        self._writer.close()


class Wandb(DetailTracker):
    """A tracker for Weights & Biases. Its key comes from ``wandb login`` or ``WANDB_API_KEY``, never from the TOML."""

    package = "wandb"

    def begin(self, run: RunFolder, config: Mapping[str, Any]) -> None:
        """Start the run, or resume it under its stored id."""
        self._library: Any = importlib.import_module(self.package)
        with contextlib.redirect_stdout(sys.stderr):  # stdout has results alone
            self._run = self.open(run, dict(config))

    def open(self, run: RunFolder, config: dict[str, Any]) -> Any:
        """Return the library's run."""
        # a random text: with the name of the folder it makes the id, so that a copied run gets another
        id_file = run.path / "wandb_id.txt"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(8))
        return self._library.init(
            project=self.options.project,
            entity=self.options.entity,
            mode=self.options.mode,
            name=run.path.name,
            id=hashlib.sha256(f"{id_file.read_text()} {run.path.name}".encode()).hexdigest()[:16],
            resume="allow",
            dir=str(run.path),
            config=config,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def histograms(self, step: int, values: Mapping[str, NDArray[Any]]) -> None:
        """Send histograms."""
        shown = {f"distribution/{name}": self._library.Histogram(found) for name, found in values.items()}
        self._run.log(shown, step=step)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send a table."""
        table = self._library.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({"completions": table}, step=step)

    def artifact(self, path: Path) -> None:
        """Store a file as an artifact of the run's name."""
        name = re.sub(r"[^\w.-]", "_", f"{self._folder.name}-{path.relative_to(self._folder)}")
        self._run.log_artifact(str(path), name=name, type="run")

    def close(self) -> None:
        """Finish the run."""
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


class Trackio(Wandb):
    """A tracker for trackio, whose library has the interface of W&B and stores runs on this machine."""

    package = "trackio"

    def open(self, run: RunFolder, config: dict[str, Any]) -> Any:
        """Return the library's run, continued if it has one of this name."""
        name = run.path.name
        return self._library.init(self.options.project, name, config=config, resume="allow", embed=False)


class Mlflow(DetailTracker):
    """A tracker for MLflow: a database on this machine, or a server."""

    package = "mlflow"

    def begin(self, run: RunFolder, config: Mapping[str, Any]) -> None:
        """Start the run, or continue that of an earlier attempt; a copied run folder starts another."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        database = Path(self.options.uri.removeprefix("sqlite:///"))
        if self.options.uri.startswith("sqlite:///") and not database.exists():
            # tables take seconds; a run that ends meanwhile would leave a database that no later run can open
            with tempfile.TemporaryDirectory(prefix=".mlflow", dir=database.parent) as folder:
                made = Path(folder) / "new.db"
                MlflowClient(f"sqlite:///{made}")
                with contextlib.suppress(FileExistsError):  # another run was first
                    database.hardlink_to(made)
        self._client = MlflowClient(self.options.uri)
        id_file, name = run.path / "mlflow_id.txt", run.path.name
        known = id_file.read_text().split(" ", 1) if id_file.exists() else ["", ""]
        self._id = known[0]
        if known[1] != name:
            experiment = self._client.get_experiment_by_name(self.options.experiment)
            number = (
                experiment.experiment_id
                if experiment
                else self._client.create_experiment(self.options.experiment)
            )
            self._id = self._client.create_run(number, run_name=name).info.run_id
            id_file.write_text(f"{self._id} {name}")
            keys = {mlflow_name(key_text(path)): value for path, value in leaves(dict(config))}
            params = [Param(key, str(value)[:500]) for key, value in keys.items()]
            for first in range(0, len(params), 100):  # the most that MLflow takes
                self._client.log_batch(self._id, params=params[first : first + 100])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        sent = [Metric(mlflow_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, sent)

    def histograms(self, step: int, values: Mapping[str, NDArray[Any]]) -> None:
        """Store counts and edges as JSON: MLflow draws no histograms."""
        import numpy

        for name, found in values.items():
            counts, edges = numpy.histogram(found, 32)
            shown = {"counts": counts.tolist(), "edges": edges.tolist()}
            self._client.log_dict(self._id, shown, f"distribution/{name}/step_{step:06d}.json")

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows to the run's table."""
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        self._client.log_table(self._id, columns, "completions.json")

    def artifact(self, path: Path) -> None:
        """Store a file."""
        below = str(path.relative_to(self._folder).parent)
        self._client.log_artifact(self._id, str(path), None if below == "." else below)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)


class Prometheus(DetailTracker):
    """A tracker that answers Prometheus on 127.0.0.1 with the metrics of the newest step."""

    package = "prometheus_client"

    def begin(self, run: RunFolder, config: Mapping[str, Any]) -> None:
        """Open the endpoint.

        Raises:
            EnvironmentProblem: the port cannot be opened; another run may have it.
        """
        import prometheus_client as prometheus

        self._registry, self._gauges = prometheus.CollectorRegistry(), dict[str, Any]()
        port = self.options.port
        try:
            self._server, _ = prometheus.start_http_server(port, "127.0.0.1", self._registry)
        except OSError as error:
            fix = "Set tracking.prometheus.port to another one, or to 0 for any free one."
            raise EnvironmentProblem(f"127.0.0.1:{port} cannot be opened: {error.strerror}. {fix}") from error
        log.info("Prometheus: http://127.0.0.1:%d/metrics", self._server.server_port)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Set a gauge for each metric; its name begins with ``engine_``."""
        from prometheus_client import Gauge

        for name, value in {"step": step, **metrics}.items():
            gauge = gauge_name(name)
            if gauge not in self._gauges:
                self._gauges[gauge] = Gauge(gauge, name, ["run"], registry=self._registry)
            self._gauges[gauge].labels(self._folder.name).set(value)

    def close(self) -> None:
        """Close the endpoint."""
        self._server.shutdown()
        self._server.server_close()


def mlflow_name(name: str) -> str:
    """Return the name of a metric or a key in MLflow, which refuses some characters: ``pass@4`` is ``pass_4``."""
    return re.sub(r"[^\w/.\- ]", "_", name.replace('"', ""))


def gauge_name(metric: str) -> str:
    """Return a metric's name in Prometheus: ``reward/mean`` is ``engine_reward_mean``."""
    return "engine_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


def _code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
