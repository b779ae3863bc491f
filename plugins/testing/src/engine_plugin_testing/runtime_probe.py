"""Engines without a model, for the suite of runtimes: they log the calls that reach them and fail on request.

A plugin file: workers load it by its path. Each rank appends a line per call to ``FOLDER/ROLE.RANK.jsonl``.
"""

import dataclasses
import errno
import hashlib
import json
import logging
import math
import os
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist

from engine_core import errors, hookimpl
from engine_core.contracts.engines import Layout, RolloutEngine, TrainEngine
from engine_core.specs import Options, RolloutBackend, TrainBackend
from engine_core.types import Rollout, StepOutput, TrainOutput

WEIGHTS = {"a": 30_000, "b": 3, "c": 0}  # name -> number of values
METRICS = {"tiny": 5e-324, "max/none": -math.inf, "\u00e9/third": 1 / 3, "zero": -0.0}
FAILURES = {"KeyError": KeyError, "MemoryError": MemoryError} | {
    name: getattr(errors, name) for name in ("ConfigError", "DataError", "TrainingFailed")
}


class ProbeOptions(Options):
    """The options of both probe engines."""

    folder: str = ""
    """Where ranks write down what reaches them."""
    fail: str = ""
    """Class of an error that is raised while the engine is built, and the rank on which it is, ``CLASS@RANK``."""


class Journal:
    """A log of the calls that reached one rank."""

    def __init__(self, options, context):
        self.path = Path(options.folder) / f"{context.role}.{context.rank}.jsonl"
        kind, _, rank = options.fail.partition("@")
        if kind and int(rank) == context.rank:
            raise FAILURES[kind]("requested failure")

    def build(self, context, **fields):
        """Append the line of an engine that is built: its place, its seeds, what the launcher says, and ``fields``."""
        launched = [int(os.environ.get(name, -1)) for name in ("RANK", "WORLD_SIZE")]
        place, seeds = [context.rank, context.world_size], [torch.initial_seed(), context.seed]
        self.write("build", place=place, launched=launched, seeds=seeds, **fields)

    def write(self, method, **fields):
        """Append a line: the method, this process's id and ``fields``."""
        with self.path.open("a") as file:
            file.write(json.dumps({"method": method, "pid": os.getpid(), **fields}) + "\n")


def happens(what):
    """Raise an error for ``raise:CLASS``, or run ``kill``, ``die:FILE``, ``sleep:SECONDS`` or ``log:TEXT``; ignore other text.

    With ``die`` this process is killed unless the file exists, once what it has sent had time to arrive.
    """
    kind, _, detail = what.partition(":")
    if kind == "raise":
        error = FAILURES[detail]("requested failure")
        error.add_note("requested note")
        raise error
    if kind == "die" and not Path(detail).exists():
        Path(detail).touch()
        time.sleep(0.5)
        kind = "kill"
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "log":
        logging.getLogger("engine").warning("%s", detail)
    if kind == "sleep":
        deadline = time.monotonic() + float(detail)
        while time.monotonic() < deadline:
            time.sleep(0.01)


def described(value):
    """Describe a value of any type that crosses processes, to the bit, as JSON values."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return ["tensor", str(value.dtype), list(value.shape), hashlib.sha256(data).hexdigest()]
    if dataclasses.is_dataclass(value):
        fields = {field.name: described(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return [type(value).__name__, fields]
    if isinstance(value, dict):
        return ["dict", [[described(key), described(entry)] for key, entry in value.items()]]
    if isinstance(value, list | tuple):
        return [type(value).__name__, [described(entry) for entry in value]]
    return [type(value).__name__, value.hex() if isinstance(value, float) else repr(value)]


def full_rollout(request):
    """Return a rollout of ``request`` in which no field has its default; of an episode that failed."""
    prompt, count = request.prompt.token_ids, len(request.prompt.token_ids) + 4
    mask = torch.tensor([False] * len(prompt) + [True, False, True, True])
    at = torch.arange(count)
    return Rollout(
        request_id=request.id,
        prompt=request.prompt,
        token_ids=torch.tensor([*prompt, 5, 6, 7, request.index]),
        loss_mask=mask,
        rollout_log_probs=torch.where(mask, -(at + 1) / 3, 0.0),
        policy_versions=torch.where(mask, 0, at + 2**20).int(),
        finish_reason="length",
        group_id=request.group_id,
        index=request.index,
        text="d\u00e9j\u00e0 \U0001f600\x00",
        reward=-0.1,
        rewards={"a": None, "b": 1e300},
        greedy_reward=0.1 + 0.2,
        answers={"a": "4\n"},
        valid=False,
        failure="timeout",
        messages=[{"role": "user", "content": "\u4f60"}],
        extras={
            "half": at.bfloat16() / 7,
            "wide": torch.stack([at.double() / 3, torch.full((count,), math.nan).double()], 1),
            "support_ids": torch.stack([at, -at], 1).int(),
            "bits": mask.clone(),
        },
    )


class ProbeTrain(TrainEngine):
    """A train engine whose ``infer`` doubles tokens (``double``), or runs the action in an output's name."""

    def __init__(self, config, model_config, context, *, trainable=True):
        super().__init__(config, model_config, context, trainable=trainable)
        self.module, self.steps = torch.nn.Identity(), 0
        self.journal = Journal(config.options, context)
        self.journal.build(
            context, total_steps=context.total_steps, trainable=trainable, frozen=context.frozen
        )

    @property
    def layout(self):
        """A separate data-parallel slice for each rank."""
        return Layout(self.context.rank, self.context.world_size)

    def _build_model_optimizer(self, **_):
        """Return the module, which has no weights."""
        return self.module

    def infer(self, batch, outputs, adapter=True):
        """Log the batch and run the actions in ``outputs``; return ``double`` [T] float64 and ``world`` [T] float32.

        With ``columns`` in ``outputs`` a description of the batch is logged and its columns are returned as outputs.
        """
        self.journal.write("infer", lengths=batch.lengths.tolist(), bytes=_bytes(batch), what=list(outputs))
        for output in outputs:
            name, at, rank = output.partition("@")  # ``kill@1``: on rank 1 alone
            if name not in ("double", "world", "columns", "meet") and (
                not at or int(rank) == self.context.rank
            ):
                happens(name)
        if "meet@" in outputs and dist.is_initialized():
            dist.barrier()
        size = dist.get_world_size() if dist.is_initialized() else 1
        world = torch.full((batch.num_tokens,), size, dtype=torch.float32)
        found = {"double": batch.token_ids.double() * 2, "world": world}
        if "columns" in outputs:
            together = [] if batch.keep_together is None else batch.keep_together.tolist()
            self.journal.write("columns", batch=described(batch), together=together)
            found |= batch.tokens
        return found

    def forward_backward(self, batch, loss):
        """Log the batch; return constants that only an exact encoding preserves."""
        self.journal.write("forward_backward", lengths=batch.lengths.tolist(), loss=described(loss))
        return TrainOutput(loss.parameters.get("found", 0.1 + 0.2), dict(METRICS), 3)

    def optimizer_step(self):
        """Count and log the step, which changes the values of ``named_weights``."""
        self.steps += 1
        self.journal.write("optimizer_step", number=self.steps)
        return StepOutput(float("inf"), 0.25, True)

    def named_weights(self, to="all", adapter=False):
        """Yield float32 vectors of the sizes of ``WEIGHTS``, shifted by the number of steps."""
        for name, size in WEIGHTS.items():
            yield name, torch.arange(size, dtype=torch.float32) + self.steps

    def load_named_weights(self, stream, mix=1.0):
        """Log the sum of each weight and ``mix``."""
        self.journal.write("load_named_weights", sums=[float(t.sum()) for _, t in stream], mix=mix)

    def save(self, folder):
        """Write nothing; return a completed future. In a folder ``full@RANK`` the disk is full on this rank, a while later."""
        done: Future[None] = Future()
        self.journal.write("save", folder=str(folder))
        name, _, rank = folder.name.partition("@")
        if name == "full" and int(rank) == self.context.rank:
            full = OSError(errno.ENOSPC, "requested failure")
            threading.Timer(0.2, done.set_exception, (full,)).start()
        else:
            done.set_result(None)
        return done

    def load(self, folder):
        """Log the folder."""
        self.journal.write("load", folder=str(folder))

    def export(self, folder, adapter=False):
        """Log the folder."""
        self.journal.write("export", folder=str(folder), adapter=adapter)

    def sleep(self, keep=()):
        """Log what is kept."""
        self.journal.write("sleep", keep=list(keep))

    def wake(self, only=None):
        """Log the call."""
        self.journal.write("wake", only=only)

    def close(self):
        """Log the call."""
        self.journal.write("close")


class ProbeSampler(RolloutEngine):
    """A rollout engine that finishes one request per step; the prompt's column ``do`` runs first (``happens``)."""

    def __init__(self, config, model_config, context):
        super().__init__(config, model_config, context)
        self.queue, self.journal = {}, Journal(config.options, context)
        self.journal.build(context, actor=context.actor)

    @property
    def num_unfinished(self):
        """Number of queued requests."""
        return len(self.queue)

    def add(self, requests):
        """Log and queue requests."""
        left = [[request.prompt.token_ids[0], request.sampling.timeout_s] for request in requests]
        ids, asked = [request.id for request in requests], described(list(requests))
        self.journal.write("add", ids=ids, left=left, asked=asked)
        self.queue |= {request.id: request for request in requests}

    def abort(self, ids):
        """Remove queued requests; return their rollouts, with the reason ``abort``."""
        return [self.answer(self.queue.pop(id), "abort") for id in ids if id in self.queue]

    def step(self):
        """Run the action of the oldest request and return its rollout; one with ``die:FILE`` comes after the others."""
        request = min(self.queue.values(), key=lambda one: one.prompt.columns.get("do", "")[:3] == "die")
        happens(request.prompt.columns.get("do", ""))
        self.journal.write("step", prompt=list(request.prompt.token_ids))
        return [self.answer(self.queue.pop(request.id), "stop")]

    def answer(self, request, reason):
        """Return the rollout of ``request``: what it begins with, its index and the version of the weights; or a full one."""
        if request.prompt.columns.get("do") == "full":
            return full_rollout(request)
        before = request.begun or request.unsampled()
        ids = torch.cat([before.token_ids, torch.tensor([request.index, self.version])])
        mask = torch.cat([before.loss_mask, torch.tensor([True] * 2)])
        versions = torch.cat([before.policy_versions, torch.tensor([self.version] * 2).int()])
        return Rollout(
            request.id, request.prompt, ids, mask, torch.zeros(len(ids)), versions, reason, request.group_id, request.index
        )  # fmt: skip

    def update_weights(self, stream, version):
        """Log bytes and checksum of the weights; return the checksum."""
        digest, moved = hashlib.sha256(), 0
        for name, tensor in stream:
            digest.update(name.encode() + tensor.numpy().tobytes())
            moved += tensor.numel() * tensor.element_size()
        self.version = version
        self.journal.write("update_weights", version=version, bytes=moved, checksum=digest.hexdigest())
        return digest.hexdigest()

    def sleep(self, keep=()):
        """Log what is kept."""
        self.journal.write("sleep", keep=list(keep))

    def wake(self, only=None):
        """Log the call."""
        self.journal.write("wake", only=only)

    def close(self):
        """Log the call."""
        self.journal.write("close")


def _bytes(batch):
    columns = (batch.token_ids, batch.lengths, *batch.tokens.values(), *batch.sequences.values())
    return sum(tensor.numel() * tensor.element_size() for tensor in columns)


@hookimpl
def engine_train_engines():
    """Offer ``probe``."""
    return {"probe": TrainBackend(load=ProbeTrain, config=ProbeOptions)}


@hookimpl
def engine_rollout_engines():
    """Offer ``probe_sampler``."""
    return {"probe_sampler": RolloutBackend(load=ProbeSampler, config=ProbeOptions)}
