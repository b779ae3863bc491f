"""Contract 4: a weight transport carries weight updates from a trained model to the processes of another pool.

A *link* connects one sender, the first rank of the pool that trains, with all processes of the pool that receives. Each
of these processes has one endpoint: an instance of the transport. The runtime calls, at every endpoint of a link:

1. ``open``, which returns a plain value, such as an address;
2. ``join``, once all endpoints are open, with the values of all of them;
3. for each update, ``send`` at the sender and ``receive`` at the receivers;
4. ``close``.

After a failed update, and when processes join or leave, the runtime closes the endpoints and creates new ones. The
transport chooses the encoding of the weights. ``engine_plugin_processes.transports.bucketing`` has the code that the
transports of engine-plugin-processes share: numbered buckets with checksums.
"""

from __future__ import annotations

import abc
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_core.errors import TrainingFailed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine_core.specs import Options


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """An update over a link, the same at the sender and at the receivers."""

    number: int  #: within the link, counted from 1
    version: int  #: policy version of the weights


@dataclass(frozen=True, slots=True)
class TransportEndpoint:
    """The process of an endpoint, and the values it needs to find the other processes of its link."""

    transport: str  #: name of the transport in the run file, for error messages
    index: int  #: 0: the sender; 1 and above: the receivers
    names: tuple[str, ...]  #: of all processes by index, for error messages: "actor[0] on HOST"
    device: torch.device  #: of the weights in this process
    host: str  #: address at which the other processes reach this one
    token: str  #: secret of the run, with which a connection proves that it belongs to the run
    #: key-value store of torch.distributed: "file" (path of a FileStore) or "tcp" (host and port of a TCPStore, prefix);
    #: the other one is None
    rendezvous: Mapping[str, Any]
    link_id: str  #: unique among the links of all runs

    @property
    def route(self) -> str:
        """The sender and the receivers as this endpoint sees them, for error messages."""
        receivers = self.names[1:] if self.index == 0 else (self.names[self.index],)
        return f"from {self.names[0]} to {', '.join(receivers)}"

    def failure(self, update: WeightUpdate, problem: str) -> TrainingFailed:
        """Return the error of a failed update, which names the transport, both sides and the policy version."""
        source = f"rollout.transport = '{self.transport}', policy version {update.version}"
        return TrainingFailed(f"Weights {self.route} ({source}): {problem}")

    def timeout(self, update: WeightUpdate, problem: str, seconds: float) -> TrainingFailed:
        """Return the error of an update that exceeded ``timeout_seconds`` of the transport's option table."""
        key = f"rollout.{self.transport.rpartition(':')[2]}.timeout_seconds"
        return self.failure(update, f"{problem} within {seconds:g} s ({key}).")


class WeightTransport(abc.ABC):
    """An endpoint of a link. A plugin offers its subclass with the hook ``engine_weight_transports``.

    Args:
        options: the transport's option table, ``[rollout.NAME]``.
        endpoint: the process that this instance runs in.
    """

    def __init__(self, options: Options, endpoint: TransportEndpoint) -> None:
        self.options: Any = options  #: the option table
        self.endpoint = endpoint  #: the process of this instance

    @classmethod
    def check(cls, options: Any, one_machine: bool) -> None:
        """Refuse a run in which the transport cannot work. Called in the controller before any worker is started.

        Args:
            options: the transport's option table.
            one_machine: whether the run starts all its processes itself, on this machine.

        Raises:
            ConfigError: the message names the key to change.
        """

    def open(self) -> Any:
        """Prepare for connections of the other endpoints; return a plain value that every endpoint gets in ``join``."""
        return None

    def join(self, peers: Sequence[Any]) -> None:
        """Connect to the other endpoints, all of which are open. Collective: runs at all endpoints at the same time.

        Args:
            peers: what ``open`` returned at each endpoint, by index.
        """

    @abc.abstractmethod
    def send(self, stream: Iterable[tuple[str, Tensor]], update: WeightUpdate) -> int:
        """Send weights to every receiver. Called at index 0.

        Args:
            stream: names and tensors ``[D1, ..., Dn]`` of a train engine. It must be run to its end. An error that it
                raises is reported to the receivers and raised.
            update: its number and version must reach the receivers with the weights.

        Returns:
            Bytes of the weights, counted once for any number of receivers.

        Raises:
            TrainingFailed: a receiver is lost or does not accept the weights in time.
        """

    @abc.abstractmethod
    def receive(self, update: WeightUpdate) -> Generator[tuple[str, Tensor], None, None]:
        """Yield names and tensors ``[D1, ..., Dn]`` in the order of ``send``, each after its checksum was verified.

        Called at index 1 and above. The caller keeps the tensors: later updates must not overwrite them. A receiver
        that closes the generator before its end must not block the others.

        Args:
            update: the update that the receiver expects; another one is refused before its first tensor.

        Raises:
            TrainingFailed: the weights are damaged, of another update, or not complete in time. Tensors that were
                yielded before are valid, but the engine is unusable until it has received a complete update.
        """

    def close(self) -> None:
        """Release all resources. May be called twice."""
