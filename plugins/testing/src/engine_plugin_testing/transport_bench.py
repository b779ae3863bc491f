"""The bench of weight transports: links between the ranks of the suite, weights to send, a process that is killed.

Every rank is a process, as in a run. Rank 0 of a link sends, the other ranks receive. Ranks exchange the addresses of
a link, and wait for each other, through files: a process that replaces a rank is not in the process group.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar
from unittest import mock

import torch
from torch import Tensor

from engine_core.contracts.weight_transport import TransportEndpoint, WeightTransport, WeightUpdate
from engine_core.errors import TrainingFailed
from engine_plugin_processes.transports import bucketing
from engine_plugin_testing import forking
from engine_plugin_testing.bench import EngineBench
from engine_plugin_testing.transport_damage import FAR, FAR_BYTES, WAYS, WORD
from engine_plugin_testing.worker import Place, resolve

T = TypeVar("T")
BUCKET_BYTES = 4096  # so that the weights are several buckets, and some are larger than one
SLACK_SECONDS = 30.0  # within which a timeout of a few seconds must have expired
MEET_SECONDS = 60.0
POLL_SECONDS = 0.01
FAILED = "failed-"
OTHER_TOKEN = "-stranger"  # of a process that does not belong to the run
DAMAGE = "engine_plugin_testing.transport_damage:after_the_checksum"


class TransportBench(EngineBench):
    """A bench whose ranks are the endpoints of a weight transport."""

    kind = "weight_transports"

    def __init__(self, settings: Mapping[str, Any], place: Place) -> None:
        super().__init__({"model": {}, "write_model": "", **settings}, place)
        self._members: dict[str, list[int]] = {}  # the ranks of each link
        self.peers: dict[str, list[Any]] = {}  #: of each link, what its endpoints returned from ``open``

    def __enter__(self) -> Self:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_device(self.device)
        before, bucketing.BUCKET_BYTES = bucketing.BUCKET_BYTES, BUCKET_BYTES
        self.stack.callback(setattr, bucketing, "BUCKET_BYTES", before)
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        if raised[0] is not None:
            (self.folder / f"{FAILED}{self.rank}").touch()  # ranks that wait for this one fail, too
        super().__exit__(*raised)

    @property
    def device(self) -> torch.device:
        """The device of this rank's weights: the suite's ``device``, else the CPU."""
        return super().device if self.settings["device"] else torch.device("cpu")

    @property
    def rank(self) -> int:
        """The rank of this process; rank 0 sends."""
        return self.place.rank

    @property
    def ranks(self) -> range:
        """All ranks of the suite."""
        return range(self.place.world_size)

    # -- links --------------------------------------------------------------

    def link(
        self,
        label: str = "link",
        ranks: Sequence[int] = (),
        soon: bool = False,
        token: str = "",
        may_fail: bool = False,
    ) -> WeightTransport | None:
        """Open and join this rank's endpoint of a link; return None for other ranks. Collective over its ranks.

        Args:
            label: unique name of the link within a contract.
            ranks: the link's ranks by index, the sender first; default: all.
            soon: with the suite's options ``soon``, so that timeouts expire within seconds.
            token: as for ``endpoint``.
            may_fail: None is returned, too, if the endpoint cannot join.

        Raises:
            Exception: the endpoint's, if it cannot join.
        """
        members = list(ranks or self.ranks)
        if self.rank not in members:
            return None
        self._members[label] = members
        made = self.endpoint(label, members, soon, token)
        self.peers[label] = self.exchange(f"open-{label}", made.open(), members)
        try:
            made.join(self.peers[label])
        except Exception:
            if not may_fail:
                raise
            return None
        return made

    def endpoint(
        self, label: str, members: Sequence[int], soon: bool = False, token: str = ""
    ) -> WeightTransport:
        """Build this rank's endpoint of a link without opening it; it is closed after the contract.

        Args:
            label: name of the link.
            members: the link's ranks by index.
            soon: as for ``link``.
            token: of a stranger, which has another rendezvous, too; default: the link's own.
        """
        name = self.name
        plugins = self.load_plugins()
        given = {**self.settings["options"], **(self.settings["soon"] if soon else {})}
        options = plugins.spec(self.kind, name).config.model_validate(
            given, context={"folder": self.settings["root"]}
        )
        endpoint = TransportEndpoint(
            transport=name,
            index=members.index(self.rank),
            names=tuple(name_of(index, rank) for index, rank in enumerate(members)),
            device=self.device,
            host="127.0.0.1",
            token=token or f"token of {self.folder.name}",
            rendezvous={"file": str(self.folder / f"meet-{label}{token}"), "tcp": None},
            link_id=f"{label}{token}",
        )
        made: WeightTransport = plugins.resolve(self.kind, name)(options, endpoint)
        self.stack.callback(made.close)
        return made

    def update(
        self, link: WeightTransport, stream: Iterable[tuple[str, Tensor]], update: WeightUpdate
    ) -> Any:
        """Run one update at this endpoint, within ``SLACK_SECONDS``.

        Args:
            stream: names and tensors [D_1, D_2, ...]; read by the sender alone.

        Returns:
            What ``send`` returns at the sender; at a receiver the list of (name, tensor) received.
        """
        if link.endpoint.index == 0:
            return self.in_time(lambda: link.send(iter(stream), update))
        return self.in_time(lambda: list(link.receive(update)))

    def whole(self, link: WeightTransport, stream: Iterable[tuple[str, Tensor]], update: WeightUpdate) -> Any:
        """Run ``update`` and wait until every endpoint has it, so that none closes what another still reads.

        Args:
            stream: names and tensors [D_1, D_2, ...]; read by the sender alone.
        """
        found = self.update(link, stream, update)
        members = self._members[link.endpoint.link_id]
        self.exchange(f"whole-{link.endpoint.link_id}-{update.number}", True, members)
        return found

    def goes_on(self, label: str = "again", ranks: Sequence[int] = ()) -> None:
        """Check that a new link carries a whole update after a failed one, as in a run. Collective over its ranks."""
        link = self.link(label, ranks)
        if link is None:
            return
        weights = self.weights(seed=99)
        got = self.whole(link, weights.items(), WeightUpdate(1, 99))
        if link.endpoint.index:
            same_weights(got, weights, "after an update that failed, over a new link")
        link.close()

    # -- weights ------------------------------------------------------------

    def weights(self, seed: int = 0) -> dict[str, Tensor]:
        """Return test weights by name on this rank's device, the same on every rank.

        Several types and shapes: [300, 7], [7], [40, 33] (a transpose), [0, 3], [3, 8, 24] (strided), [] (a scalar),
        [501] and [90, 31]; some exceed a bucket.
        """
        made = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            """Return random values in [0, 1), of shape ``shape`` [D_1, D_2, ...]."""
            return torch.rand(shape, generator=made)

        found = {
            "z.embed.weight": drawn(300, 7),
            "layers.0.norm.weight": drawn(7).to(torch.bfloat16),
            "layers.0.mlp.weight": drawn(33, 40).half().T,
            "layers.0.mlp.empty": torch.zeros(0, 3),
            "layers.0.experts": drawn(3, 16, 24).to(torch.bfloat16)[:, ::2],
            "layers.0.steps": torch.tensor(seed),
            "layers.0.codes": (drawn(501) * 255).to(torch.uint8),
            "a.head.weight": drawn(90, 31),
        }
        return {name: tensor.to(self.device) for name, tensor in found.items()}

    def weights_for(self, way: str) -> dict[str, Tensor]:
        """Return the weights [D_1, D_2, ...] of an update that is damaged in one of ``ways``."""
        if way != FAR:
            return self.weights()
        return {"large": torch.arange(2 * FAR_BYTES // WORD, dtype=torch.int64, device=self.device)}

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways of damaging an update: those of the kit, or one if the suite has a ``damage`` of its author."""
        return WAYS if self.settings["damage"] == DAMAGE else ("damaged",)

    @contextlib.contextmanager
    def damage(self, way: str) -> Iterator[None]:
        """Damage an update after its checksum, within the block, in one of ``ways``; called at the sender."""
        made = resolve(self.settings["damage"], Path(self.settings["root"]))
        with made(way) if self.settings["damage"] == DAMAGE else made():
            yield

    # -- ranks --------------------------------------------------------------

    def exchange(self, what: str, value: Any, ranks: Sequence[int] = ()) -> list[Any]:
        """Exchange JSON values: wait for every rank's value and return them in the order of ``ranks``. Collective.

        Args:
            what: unique name of the exchange.
            value: this rank's value.
            ranks: default: all.
        """
        ranks = ranks or self.ranks
        mine = self.folder / f"{what}-{self.rank}"
        mine.with_suffix(".partial").write_text(json.dumps(value))
        mine.with_suffix(".partial").rename(mine)
        files = [self.folder / f"{what}-{rank}" for rank in ranks]
        end = time.monotonic() + MEET_SECONDS
        while missing := [file.name for file in files if not file.is_file()]:
            failed = sorted(file.name.removeprefix(FAILED) for file in self.folder.glob(f"{FAILED}*"))
            assert not failed, (
                f"It did not hold on rank {', '.join(failed)}, for which rank {self.rank} waited."
            )
            assert time.monotonic() < end, (
                f"Rank {self.rank} waits for {missing}: a rank did not come so far."
            )
            time.sleep(POLL_SECONDS)
        return [json.loads(file.read_text()) for file in files]

    def all_here(self, what: str) -> None:
        """Wait until every rank has called this with the same ``what``."""
        self.exchange(f"here-{what}", True)

    def in_time(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread and return its result or raise its error.

        Raises:
            BaseException: the error of ``work``.
            AssertionError: ``work`` still runs after ``SLACK_SECONDS``, which every timeout is within.
        """
        found: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            """Run ``work`` on this rank's device; store its result or its error."""
            if self.device.type != "cpu":
                torch.get_device_module(self.device).set_device(self.device)
            try:
                found.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(SLACK_SECONDS)
        assert not thread.is_alive(), (
            f"Rank {self.rank} still waits after {SLACK_SECONDS:g} s: a transport waits no longer than its time-out, and "
            "not at all for an end that has gone."
        )
        if errors:
            raise errors[0]
        return found[0]

    def dies(self, label: str) -> None:
        """Start a process in place of this rank that joins a link and is killed in the middle of its first update.

        It is a fork of this process where workers are forks, too, and has no accelerator; else a fresh interpreter.
        """
        order = {
            "settings": dict(self.settings), "label": label, "path": sys.path, "rank": self.rank,
            "world_size": self.place.world_size, "cache": str(self.place.cache), "folder": str(self.folder),
        }  # fmt: skip
        if forking.wanted() and self.device.type == "cpu":
            process = multiprocessing.get_context("fork").Process(target=die, args=(order,), daemon=True)
            process.start()
            process.join(MEET_SECONDS)
            code, printed = process.exitcode, ""  # its lines are among those of this worker
        else:
            done = subprocess.run(
                [sys.executable, "-c", CHILD, json.dumps(order)],
                capture_output=True, text=True, timeout=MEET_SECONDS, check=False,
            )  # fmt: skip
            code, printed = done.returncode, done.stderr[-2000:]
        assert code == -signal.SIGKILL, (
            f"It was to be killed in its update; its exit code is {code}. {printed}"
        )


CHILD = """
import json, sys
order = json.loads(sys.argv[1])
sys.path[:] = order["path"]
from engine_plugin_testing.transport_bench import die
die(order)
"""


def die(order: Mapping[str, Any]) -> None:
    """Run the process of ``TransportBench.dies``: kill it in the middle of an update."""
    place = Place(order["rank"], order["world_size"], Path(order["cache"]), Path(order["folder"]))
    with TransportBench(order["settings"], place) as bench:
        link = bench.link(order["label"], soon=True)
        assert link is not None

        def stream() -> Iterator[tuple[str, Tensor]]:
            """Yield weights [D_1, D_2, ...]; kill this process at the fifth."""
            for number, entry in enumerate(bench.weights().items()):
                if number == 4:  # a bucket is in flight
                    os.kill(os.getpid(), signal.SIGKILL)
                yield entry

        if link.endpoint.index == 0:
            link.send(stream(), WeightUpdate(1, 7))
        else:
            next(link.receive(WeightUpdate(1, 7)))
            os.kill(os.getpid(), signal.SIGKILL)


def name_of(index: int, rank: int) -> str:
    """Return the name of an endpoint, in the form that the links of a run use."""
    return f"actor[{rank}] on sender" if index == 0 else f"rollout[{rank}] on receiver{index}"


@contextlib.contextmanager
def trusting() -> Iterator[None]:
    """Make this process accept any proof of a token within the block: a stranger does not check its peers."""
    with mock.patch.object(hmac, "compare_digest", return_value=True):
        yield


def same_weights(found: Sequence[tuple[str, Tensor]], sent: Mapping[str, Tensor], what: str) -> None:
    """Assert that names, their order, types, shapes and bits are equal.

    Args:
        found: received names and tensors [D_1, D_2, ...].
        sent: tensors [D_1, D_2, ...] by name, in the order sent.
        what: context for the failure's message.
    """
    names = [name for name, _ in found]
    assert names == list(sent), f"Weights {what}: got {names}; expected {list(sent)}, in this order."
    for name, tensor in found:
        expected = sent[name].cpu()
        about = f"Weight {name!r} {what}"
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), (
            f"{about} is {tensor.dtype} {list(tensor.shape)}; expected {expected.dtype} {list(expected.shape)}."
        )
        assert torch.equal(_bits(tensor.cpu()), _bits(expected)), f"{about} has other values than were sent."


def _bits(values: Tensor) -> Tensor:
    """Return the bytes [N] of a tensor [D_1, D_2, ...]: NaN is not equal to itself, and 0 is equal to -0."""
    return values.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def refusal(
    bench: TransportBench, link: WeightTransport, work: Callable[[], object], what: str, last: bool = False
) -> TrainingFailed:
    """Return the ``TrainingFailed`` of ``work``, which must name the transport, this endpoint and the other side.

    Raises:
        AssertionError: ``work`` raises none, or the error lacks one of these names. Or a sender names another receiver
            more often than the last one, which has failed if ``last``.
    """
    try:
        work()
    except TrainingFailed as error:
        text, endpoint = str(error), link.endpoint
        others = endpoint.names[1:] if endpoint.index == 0 else endpoint.names[:1]
        named = [name for name in (endpoint.names[endpoint.index], *others) if name in text]
        assert endpoint.names[endpoint.index] in named, (
            f"{what}: the error does not name {endpoint.names[endpoint.index]}: {text}"
        )
        assert len(named) > 1, f"{what}: the error does not name the other side ({list(others)}): {text}"
        assert bench.name in text, f"{what}: the error does not name the transport '{bench.name}': {text}"
        assert not last or text.count(others[-1]) == max(map(text.count, others)), (
            f"{what}: the error names another receiver than {others[-1]}: {text}"
        )
        return error
    raise AssertionError(f"{what}: no TrainingFailed was raised on rank {bench.rank}.")


def whole_or_told(
    bench: TransportBench, link: WeightTransport, work: Callable[[], object], what: str, last: bool = False
) -> bool:
    """Return whether an endpoint completed the update; an error that it raises must satisfy ``refusal``, with ``last``."""
    done: list[object] = []
    try:
        refusal(bench, link, lambda: done.append(work()), what, last)
    except AssertionError:
        if not done:
            raise
    return bool(done)
