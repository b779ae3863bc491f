"""A rollout engine without a model: it answers with the values of its weights, a request a step.

What a prompt's columns say happens when it is its turn, the first time (``flag`` is a file that remembers it):
``kill``, ``sleep``, ``freeze`` (stopped by a signal), ``raise``.
"""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch

from engine_core import hookimpl
from engine_core.contracts.engines import RolloutEngine
from engine_core.errors import DataError
from engine_core.specs import Options, RolloutBackend
from engine_core.types import Rollout


class CountingOptions(Options):
    starts: str = ""
    """File that gets a line for each process."""
    fail: str = ""
    """How to fail while it is built."""
    any_weight: bool = False
    """Weights that it does not know are received and left alone."""
    own_checksum: bool = False
    """Each process returns another checksum."""
    length: int = 2
    """Tokens of an answer."""


class Counting(RolloutEngine):
    def __init__(self, config, model_config, context):
        super().__init__(config, model_config, context)
        self.weights, self.queue, self.paused = {"a": torch.zeros(2), "b": torch.zeros(3)}, {}, False
        options = config.options
        if options.starts:
            with Path(options.starts).open("a") as file:
                file.write(f"{os.getpid()}\n")
        print("counting starts")
        if options.fail == "memory":
            raise MemoryError("no room for the cache")
        if options.fail == "exit":
            print("last words", file=sys.stderr)
            os._exit(3)
        if options.fail == "data":
            raise DataError("the model is of clay")

    @property
    def num_unfinished(self):
        return len(self.queue)

    def add(self, requests):
        self.queue |= {request.id: request for request in requests}

    def abort(self, ids):
        return [self.answer(self.queue.pop(id), "abort", 0) for id in ids if id in self.queue]

    def pause(self, mode="drain"):
        self.paused = True

    def resume(self):
        self.paused = False

    def sleep(self, keep=()):
        self.paused = True

    def wake(self, only=None):
        self.paused = False

    def step(self):
        if self.paused:
            raise RuntimeError("The sampler is paused or asleep.")
        request = next(iter(self.queue.values()))
        self.happens(**request.prompt.columns)
        del self.queue[request.id]
        return [self.answer(request, "stop", self.config.options.length)]

    def happens(self, do="", flag="", seconds=600.0, **other):
        if not do or (flag and Path(flag).exists()):
            return
        if flag:
            Path(flag).touch()
        print(f"it will {do}", file=sys.stderr, flush=True)
        if do == "kill":
            time.sleep(0.5)  # what it has sampled is on its way
            os.kill(os.getpid(), signal.SIGKILL)
        elif do == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif do == "raise":
            raise DataError("this request is bad")
        else:
            time.sleep(seconds)

    def answer(self, request, reason, length):
        values = {float(value) for tensor in self.weights.values() for value in tensor.flatten()}
        assert len(values) == 1, f"a mixture: {values}"
        prompt = request.prompt.token_ids
        zeros = [0.0] * len(prompt)
        return Rollout(
            request.id,
            request.prompt,
            torch.tensor(prompt + [7] * length),
            torch.tensor([False] * len(prompt) + [True] * length),
            torch.tensor(zeros + [-values.pop()] * length),
            torch.full((len(prompt) + length,), self.version, dtype=torch.int32),
            reason,
            request.group_id,
            request.index,
            extras={"pid": torch.full((len(prompt) + length,), os.getpid(), dtype=torch.int32)},
        )

    def update_weights(self, stream, version):
        digest = hashlib.sha256()
        for name, tensor in stream:
            if name not in self.weights:
                if self.config.options.any_weight:
                    continue
                raise DataError(f"Unknown weight '{name}'.")
            self.weights[name] = tensor.clone()
            digest.update(tensor.cpu().numpy().tobytes())
        self.version = version
        return str(os.getpid()) if self.config.options.own_checksum else digest.hexdigest()


@hookimpl
def engine_rollout_engines():
    return {"counting": RolloutBackend(load=Counting, config=CountingOptions)}
