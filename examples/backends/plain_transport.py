"""A weight transport: buckets in the key-value store of the link. Slow; for small models."""

import itertools
import json
from datetime import timedelta

import numpy
import torch

from engine_core import hookimpl
from engine_core.contracts.weight_transport import WeightTransport
from engine_core.specs import TransportSpec
from engine_plugin_processes.starting import store_at
from engine_plugin_processes.transports.bucketing import flat_buckets, unpacked, verify
from engine_plugin_processes.transports.table import TransportOptions


class StoreTransport(WeightTransport):
    def join(self, peers):
        self.store = store_at(
            self.endpoint.rendezvous, len(peers), timedelta(seconds=self.options.timeout_seconds)
        )
        self.keys = []  # of the last update

    def send(self, stream, update):
        for key in self.keys:  # every receiver has read them
            self.store.delete_key(key)
        self.keys, count, sent = [], 0, 0
        try:
            for flat in flat_buckets(stream, torch.device("cpu")):
                self.put(update, flat.number, flat.header(update), flat.data.numpy().tobytes())
                count, sent = count + 1, sent + flat.weight_bytes
        except BaseException as error:
            self.put(update, count, {"error": repr(error)})
            raise
        self.put(update, count, {"end": True})
        return sent

    def receive(self, update):
        for number in itertools.count():
            header, data = self.get(update, number)
            if "error" in header:
                raise self.endpoint.failure(update, f"the stream of the trainer failed: {header['error']}")
            if "end" in header:
                return
            verify(self.endpoint, update, header, number, data)
            yield from unpacked(data, header["entries"])

    def put(self, update, number, header, data=b""):
        self.keys.append(f"{self.endpoint.link_id}/{update.number}/{number}")
        self.store.set(self.keys[-1], json.dumps(header).encode() + b"\n" + data)

    def get(self, update, number):
        try:
            found = self.store.get(f"{self.endpoint.link_id}/{update.number}/{number}")
        except RuntimeError as error:
            seconds = self.options.timeout_seconds
            raise self.endpoint.timeout(update, f"bucket {number} did not arrive", seconds) from error
        header, _, data = found.partition(b"\n")
        return json.loads(header), torch.from_numpy(numpy.frombuffer(bytearray(data), numpy.uint8))


@hookimpl
def engine_weight_transports():
    return {"store": TransportSpec(load=StoreTransport, config=TransportOptions)}
