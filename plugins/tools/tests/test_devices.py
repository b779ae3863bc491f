"""The devices of a plan, by name and of this machine."""

from __future__ import annotations

import pytest

from engine_core.errors import ConfigError
from engine_plugin_tools import devices
from engine_plugin_tools.bench.shapes import BANDWIDTH, DENSE_BF16_FLOPS
from engine_plugin_tools.devices import CPU, DEVICES, GIB, Device, Limits, find_devices, installed_devices


def test_every_device_of_a_data_sheet_has_both_rates():
    assert BANDWIDTH.keys() == DENSE_BF16_FLOPS.keys()
    assert all(Device(name, 1).limits for name in DEVICES)


@pytest.mark.parametrize(
    ("name", "sheet"),
    [
        ("h200", "H200"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_the_rates_of_a_device_are_found_by_its_name(name, sheet):
    assert Limits.of(name) == Limits(sheet, DENSE_BF16_FLOPS[sheet], BANDWIDTH[sheet])


def test_a_device_without_a_data_sheet_has_no_rates_but_a_cpu_has_assumed_ones():
    assert Limits.of("NVIDIA T4") is None
    assert Device("", GIB).limits is None
    assert Device("cpu", GIB).limits is CPU


def test_devices_are_named_with_their_number(monkeypatch):
    assert find_devices("h200x2", None) == Device("h200", int(DEVICES["h200"] * GIB), 2)
    assert find_devices("RTX4090", None) == Device("rtx4090", int(DEVICES["rtx4090"] * GIB), 1)
    assert find_devices("x4", 24) == Device("", 24 * GIB, 4)
    assert find_devices("cpu", None).memory > GIB
    found = [Device("NVIDIA H100", size * GIB) for size in (80, 40)]
    monkeypatch.setattr(devices, "installed_devices", lambda: found)
    assert find_devices(None, None) == Device("NVIDIA H100", 40 * GIB, 2)


def test_a_device_that_is_unknown_or_absent_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"--devices 'h20x2' is not known\. Did you mean 'h200'\?"):
        find_devices("h20x2", None)
    monkeypatch.setattr(devices, "installed_devices", list)
    with pytest.raises(ConfigError, match=r"This machine reports no GPU\. Name the devices"):
        find_devices(None, None)


def test_the_drivers_tool_is_asked_for_memory_and_name(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 143771, NVIDIA H200\necho 81559, NVIDIA H100 PCIe\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = [Device("NVIDIA H200", 143771 * 2**20), Device("NVIDIA H100 PCIe", 81559 * 2**20)]
    assert installed_devices() == found
    tool.unlink()
    assert installed_devices() == []
