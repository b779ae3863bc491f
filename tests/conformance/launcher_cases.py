"""Cases that do what a case may do wrong, for tests of the launcher."""

import contextlib
import os
import sys
import time


class Bench:
    def __init__(self, settings, place):
        self.settings, self.place = settings, place

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        pass


entered = []


@contextlib.contextmanager
def context(rank, world_size):
    entered.append((rank, world_size))
    print("noise on stdout while the context is entered", flush=True)
    yield


@contextlib.contextmanager
def broken_context(rank, world_size):
    raise OSError("no device for this rank")
    yield


def holds(bench):
    pass


def prints(bench):
    print('{"failed": "not from the worker"}', flush=True)
    os.write(1, b"\x00\xff garbage\n")
    assert sys.stdin.read() == ""


def fails(bench):
    assert bench.settings["answer"] == 42, f"The answer is {bench.settings['answer']}; expected 42."


def crashes(bench):
    raise ValueError("not an answer")


def in_the_context(bench):
    from engine_plugin_testing.worker import resolve

    found = resolve(bench.settings["module"] + ":entered")
    assert found == [(bench.place.rank, bench.place.world_size)], found


def is_as_told(bench):
    told = bench.settings
    assert ("torch" in sys.modules) == told["imported"]
    assert {name: os.environ.get(name) for name in told["environment"]} == told["environment"]
    assert os.getcwd() == told["folder"]


def computes_in_one_thread(bench):
    import torch

    assert torch.get_num_threads() == 1, f"{torch.get_num_threads()} threads"


def dies(bench):
    print("last words", file=sys.stderr)
    os._exit(7)


def hangs(bench):
    time.sleep(600)


def first_rank_fails_before_a_collective(bench):
    import torch
    import torch.distributed as dist

    assert bench.place.rank != 0, "rank 0 is wrong"
    dist.all_reduce(torch.ones(1))


def sums_over_ranks(bench):
    import torch
    import torch.distributed as dist

    total = torch.tensor([1.0 + bench.place.rank])
    dist.all_reduce(total)
    assert total.item() == 3.0
