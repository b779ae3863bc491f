"""The memory of a device: a device without an index is the current one, as vendors' modules demand."""

from __future__ import annotations

import pytest
import torch

from engine_core.local.device_memory import device_bytes, has_others


class Cards:
    """Two cards of a vendor whose calls, as those of ``torch.cuda``, accept a fraction only by index."""

    totals, fractions = (1000, 2000), (1.0, 0.25)

    def current_device(self) -> int:
        return 1

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 10, self.totals[index]

    def memory_reserved(self, index: int) -> int:
        return (950, 0)[index]

    def get_per_process_memory_fraction(self, index: int) -> float:
        if not isinstance(index, int):
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{index}")
        return self.fractions[index]


@pytest.mark.parametrize(("name", "size"), [("cuda", 500), ("cuda:0", 1000), ("cuda:1", 500)])
def test_a_device_has_the_bytes_of_its_card_within_the_process_limit(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: Cards())
    assert device_bytes(torch.device(name)) == size


def test_memory_of_other_processes_is_what_this_one_has_not_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: Cards())
    assert not has_others(torch.device("cuda:0"))
    assert has_others(torch.device("cuda"))


def test_the_cpu_does_not_report_bytes() -> None:
    assert device_bytes(torch.device("cpu")) is None
