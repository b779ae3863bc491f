"""Transports that are broken on purpose, each in one way."""

import contextlib
import itertools
import socket
import tempfile
import threading
from unittest import mock

import torch

from engine_core.errors import TrainingFailed
from engine_plugin_processes.transports import bucketing, tcp
from engine_plugin_processes.transports.bucketing import checksum, unpacked, verify
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
        with contextlib.closing(self._accepted(update)) as channel:
            for expected in itertools.count():
                message = channel.receive()
                if "end" in message:
                    channel.send({"taken": True})
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


class AnyNumber(TCP):
    """Looks at the version, but not at the number of the update."""

    def receive(self, update):
        def of_version(endpoint, mine, header, expected, data):
            verify(endpoint, mine, {**header, "update": mine.number}, expected, data)

        with mock.patch.object(tcp, "verify", of_version):
            yield from super().receive(update)


class LooksOnce(Credulous):
    """Looks at the number of the update in its first bucket."""

    def look(self, message, update, expected):
        known = {"update": update.number} if expected else {}
        verify(self.endpoint, update, {**message, **known}, expected, message["data"])


class AnyBucket(Credulous):
    def look(self, message, update, expected):
        verify(self.endpoint, update, message, message["bucket"], message["data"])


class DoesNotWait(TCP):
    def _all_have(self, channels, update):
        pass


class PlainSum(Credulous):
    """Compares the sum of the words without their places."""

    def look(self, message, update, expected):
        if checksum(message["data"])[:16] != message["sum"][:16]:
            raise self.endpoint.failure(update, "its checksum is wrong")


class FirstBuckets(NoChecksum):
    def look(self, message, update, expected):
        if expected < 3:
            super().look(message, update, expected)


class ChunkSums(TCP):
    """Sums the checksums of chunks, at both ends of a link as long as it is open."""

    def open(self):
        def summed(data, chunk=8 * 2**20):
            return f"{sum(int(checksum(part), 16) for part in data.split(chunk)):x}"

        self.patches = [mock.patch.object(bucketing, "checksum", summed)]
        for patch in self.patches:
            patch.start()
        return super().open()

    def close(self):
        while self.patches:
            self.patches.pop().stop()
        super().close()


class Received(TCP):
    """``kept`` is what a receiver makes of a tensor."""

    def receive(self, update):
        for name, tensor in super().receive(update):
            found = self.kept(tensor)
            if found is not None:
                yield name, found

    def kept(self, tensor):
        return tensor


class NoNaN(Received):
    def kept(self, tensor):
        return tensor.nan_to_num(0.0, torch.inf, -torch.inf) if tensor.is_floating_point() else tensor


class Rounds(Received):
    def kept(self, tensor):
        return tensor.float().double() if tensor.dtype == torch.float64 else tensor


class Unsigned(Received):
    def kept(self, tensor):
        signed = not tensor.is_floating_point() and tensor.dtype not in (torch.bool, torch.uint8)
        return tensor.clamp(min=0) if signed else tensor


class CutsLarge(Received):
    def kept(self, tensor):
        found = tensor.flatten().clone()
        found[100 * 1024 // tensor.element_size() :] = 0
        return found.view(tensor.shape)


class NoEmpty(Received):
    def kept(self, tensor):
        return tensor if tensor.numel() else None


class NeverNothing(TCP):
    def receive(self, update):
        found = list(super().receive(update))
        if not found:
            raise self.endpoint.failure(update, "nothing came")
        yield from found


class StaleAfterSixteen(TCP):
    def receive(self, update):
        found = list(super().receive(update))
        self.last = found if update.number <= 16 else self.last
        yield from self.last


class LeavesThread(TCP):
    def open(self):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().open()


class StripsNames(Received):
    def receive(self, update):
        for name, tensor in super().receive(update):
            yield name.strip(" "), tensor


class OrderOfMemory(TCP):
    """A tensor of four dimensions crosses in the order of its memory."""

    def send(self, stream, update):
        return super().send(((name, self.laid_out(tensor)) for name, tensor in stream), update)

    def laid_out(self, tensor):
        if tensor.ndim < 4 or tensor.is_contiguous():
            return tensor
        return tensor.as_strided(tensor.shape, torch.empty(tensor.shape).stride())


class OneForShared(TCP):
    def send(self, stream, update):
        first = {}
        pairs = ((name, first.setdefault(tensor.data_ptr() or name, tensor)) for name, tensor in stream)
        return super().send(pairs, update)


class KeepsRepeated(Received):
    """A tensor that came before is taken from what was given then."""

    def kept(self, tensor):
        self.given = getattr(self, "given", {})
        key = (
            tensor.dtype,
            tuple(tensor.shape),
            bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()),
        )
        return self.given.setdefault(key, tensor)


LEFT = []


class LeavesSocket(TCP):
    def open(self):
        LEFT.append(socket.socket())
        return super().open()


class LeavesFile(TCP):
    def send(self, stream, update):
        LEFT.append(tempfile.TemporaryFile())  # noqa: SIM115 (left open on purpose)
        return super().send(stream, update)


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


class WaitsForRest(TCP):
    def _accepted(self, update):
        transport_bench.SLACK_SECONDS = 8.0
        channel = super()._accepted(update)
        channel.socket.settimeout(3600.0)
        return channel


class TakesFromStrangers(TCP):
    def _accepted(self, update):
        with transport_bench.trusting():
            return super()._accepted(update)


class GivesToStrangers(TCP):
    @contextlib.contextmanager
    def _connected(self, update):
        with transport_bench.trusting(), super()._connected(update) as channels:
            yield channels


class NamesAnother(TCP):
    def _broken(self, error, update, what):
        first, last = self.endpoint.names[1], self.endpoint.names[-1]
        return self.endpoint.failure(update, f"{what.replace(last, first)}: {error}")
