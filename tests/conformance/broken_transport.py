"""Transports that are broken on purpose, each in one way."""

import itertools

from engine_core.errors import TrainingFailed
from engine_plugin_processes.buckets import checksum, unpacked
from engine_plugin_processes.transports.bucketing import verify
from engine_plugin_processes.transports.tcp import TCP
from engine_plugin_testing import transport_bench


class LosesLast(TCP):
    def receive(self, update):
        *found, _ = super().receive(update)
        yield from found


class CountsForEach(TCP):
    def send(self, stream, update):
        return super().send(stream, update) * len(self.addresses)


class ReusesBuffers(TCP):
    def receive(self, update):
        self.kept = getattr(self, "kept", {})
        for name, tensor in super().receive(update):
            self.kept.setdefault(name, tensor).copy_(tensor)
            yield name, self.kept[name]


class StopsAtLast(TCP):
    def send(self, stream, update):
        return super().send(itertools.islice(stream, 8), update)


class Credulous(TCP):
    """Takes what comes; subclasses say what of it they look at."""

    def look(self, message, update, expected):
        pass

    def receive(self, update):
        channel = self._accepted(update)
        for expected in itertools.count():
            message = channel.receive()
            if "end" in message:
                channel.send({"taken": True})
                channel.close()
                return
            self.look(message, update, expected)
            yield from unpacked(message["data"], message["entries"])


class NoChecksum(Credulous):
    def look(self, message, update, expected):
        verify(
            self.endpoint, update, {**message, "sum": checksum(message["data"])}, expected, message["data"]
        )


class AnyVersion(Credulous):
    def look(self, message, update, expected):
        if checksum(message["data"]) != message["sum"]:
            raise self.endpoint.failure(update, "its checksum is wrong")


class BreaksAreEnds(TCP):
    def receive(self, update):
        try:
            yield from super().receive(update)
        except TrainingFailed:
            return


class WaitsForEver(TCP):
    """Patience of the kit with it is shorter than with others, which may be slow."""

    def __init__(self, options, endpoint):
        transport_bench.SLACK_SECONDS = 8.0
        super().__init__(options.model_copy(update={"timeout_seconds": 3600.0}), endpoint)
