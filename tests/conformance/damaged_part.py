"""Damage on a disk: a file of the transport ``folder`` changes between being written and being read."""

import contextlib

from engine_plugin_processes.transports import folder


@contextlib.contextmanager
def after_it_was_written():
    publish = folder._publish

    def damaged(place, manifest):
        part = place / "part-00001.safetensors"
        data = bytearray(part.read_bytes())
        data[-1] ^= 1
        part.write_bytes(data)
        publish(place, manifest)

    folder._publish = damaged
    try:
        yield
    finally:
        folder._publish = publish
