"""A train engine on ranks and a sampler that hurt their own process, where and when ``hurt.json`` beside them says.

``["actor", 1, "save", "kill"]``: rank 1 of the actor is killed in its next ``save``; once, since the file is then renamed.
"""

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

from data_parallel_engine import DataParallelEngine
from engine_plugin_hf_rollout.engine import HFRolloutEngine

from engine_core.errors import DataError

FOLDER = Path(__file__).parent


class NotFinite(Exception):
    """This rank's next gradient is to be NaN."""


def hurt(role, rank, place):
    """Do what the file says, if it means this place."""
    file = FOLDER / "hurt.json"
    if not file.exists():
        return
    *where, what = json.loads(file.read_text())
    if where != [role, rank, place]:
        return
    file.rename(FOLDER / "done")
    print(f"last words of rank {rank}", file=sys.stderr, flush=True)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "exit":
        os._exit(7)
    elif what == "raise":
        raise DataError("the shard of rank 1 cannot be read")
    elif what == "nospace":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif what == "nan":
        raise NotFinite
    else:
        time.sleep(600)


class HurtTrain(DataParallelEngine):
    def forward_backward(self, batch, loss):
        try:
            self._pass("forward")
        except NotFinite:
            output = super().forward_backward(batch, loss)
            self._grads()[0].fill_(float("nan"))
            return output
        return super().forward_backward(batch, loss)

    def save(self, folder):
        if self.context.rank == 0:
            folder.mkdir(parents=True)
            (folder / "begun").write_text("a part of a checkpoint")
        self._pass("save")
        return super().save(folder)

    def _pass(self, place):
        hurt(self.context.role, self.context.rank, place)


class HurtSampler(HFRolloutEngine):
    def step(self):
        hurt("rollout", self.context.rank, "sample")
        return super().step()
