"""A train engine on ranks and a sampler that hurt their own process, where and when ``hurt.json`` beside them says.

``["actor", 1, "save", "kill"]``: rank 1 of the actor is killed in its next ``save``; once, since the file is then renamed.
A list of such: the next one counts once the one before has happened; ``nothing`` is for the place alone.
"""

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from data_parallel_engine import DataParallelEngine

from engine_core.errors import DataError
from engine_plugin_fsdp.engine import FSDPEngine
from engine_plugin_hf_rollout.engine import HFRolloutEngine
from engine_plugin_torch import sharded_checkpoint

FOLDER = Path(__file__).parent


class NotFinite(Exception):
    """This rank's next gradient is to be NaN."""


def hurt(role, rank, place):
    """Do what the file says, if it means this place."""
    file = FOLDER / "hurt.json"
    try:
        planned = json.loads(file.read_text())
    except FileNotFoundError:  # nothing is planned, or the other rank has renamed it
        return
    planned = planned if isinstance(planned[0], list) else [planned]
    *where, what = planned[0]
    if where != [role, rank, place]:
        return
    if planned[1:]:
        (FOLDER / "hurt.part").write_text(json.dumps(planned[1:]))
        (FOLDER / "hurt.part").rename(file)
    else:
        file.rename(FOLDER / "done")
    with (FOLDER / "happened").open("a") as happened:
        happened.write(f"{place}\n")
    print(f"last words of rank {rank}", file=sys.stderr, flush=True)
    if what == "nothing":
        return
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "exit":
        os._exit(7)
    elif what == "garbage":
        os.write(int(sys.argv[1]), b"\xff" * 64)  # the worker's socket to its controller
        time.sleep(600)
    elif what == "raise":
        raise DataError("the shard of rank 1 cannot be read")
    elif what == "nospace":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif what == "nan":
        raise NotFinite
    elif what == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    else:
        time.sleep(600)


class Hurt:
    """Engines pass places at which they may be hurt."""

    def forward_backward(self, batch, loss):
        try:
            self._pass("forward")
        except NotFinite:
            output = super().forward_backward(batch, loss)
            gradient = self._grads()[0]
            getattr(gradient, "to_local", lambda: gradient)().fill_(float("nan"))
            return output
        return super().forward_backward(batch, loss)

    def optimizer_step(self):
        self._pass("step")
        return super().optimizer_step()

    def _pass(self, place):
        hurt(self.context.role, self.context.rank, place)


class HurtTrain(Hurt, DataParallelEngine):
    def _write(self, folder):
        if self.context.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "begun").write_text("a part of a checkpoint")
        self._pass("save")
        super()._write(folder)


class HurtFSDP(Hurt, FSDPEngine):
    def save(self, folder):
        self._pass("save")
        done = super().save(folder)
        done.add_done_callback(lambda _: self._pass("written"))
        return done


def hurt_write(path, parts, places):
    """A shard that is hurt before it is written, or with half of it on the disk."""
    kind, rank = path.name.split("-")[:2]
    hurt("actor", int(rank), f"begin {kind}")
    write_parts(path, parts, places)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    hurt("actor", int(rank), f"half {kind}")
    path.write_bytes(whole)


write_parts, sharded_checkpoint.write_parts = sharded_checkpoint.write_parts, hurt_write


class HurtSampler(HFRolloutEngine):
    def step(self):
        hurt("rollout", self.context.rank, "sample")
        return super().step()
