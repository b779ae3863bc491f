"""Copies between host and device that nobody waits for: what they know, on any device."""

from __future__ import annotations

import pytest
import torch

from engine_plugin_torch import transfer
from engine_plugin_torch.transfer import Fetched, numbers, on_host, predicted, send_batch

CPU = torch.device("cpu")


def test_a_batch_arrives_whole(batch):
    sent = send_batch(batch, CPU)
    assert torch.equal(sent.token_ids, batch.token_ids)
    assert sent.tokens.keys() == batch.tokens.keys()
    assert torch.equal(sent["weights"], batch["weights"])


def test_the_source_of_what_was_sent_is_found_without_asking_the_device(batch):
    sent = send_batch(batch, torch.device("meta"))  # a device whose values nobody can read
    assert on_host(sent.lengths) is batch.lengths
    assert on_host(sent["loss_mask"]) is batch["loss_mask"]
    with pytest.raises(NotImplementedError):
        on_host(sent["weights"])


def test_a_tensor_made_of_one_that_was_sent_is_not_taken_for_it(batch):
    sent = send_batch(batch, torch.device("meta"))
    with pytest.raises(NotImplementedError):
        on_host(sent.lengths + 1)


def test_predicted_tokens_are_loss_tokens_behind_another_of_their_sequence(batch_of):
    batch = batch_of([3, 0, 1, 4])
    batch.tokens["loss_mask"] = torch.tensor([True, False, True, True, True, True, False, True])
    assert predicted(batch).tolist() == [2, 5, 7]


def test_numbers_come_together_in_their_order_and_type():
    values = [
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(2),
        torch.tensor(0.5, dtype=torch.bfloat16),
    ]
    assert numbers(values, CPU) == [0.1, 2.0, 0.5]
    assert numbers([torch.tensor(0.1)], CPU) == [pytest.approx(0.1, rel=1e-7)]
    assert numbers([], CPU) == []


def test_what_is_fetched_is_there_after_waiting():
    fetched = Fetched(CPU)
    tensor = fetched.fetch(torch.arange(3.0))
    fetched.wait()
    assert tensor.tolist() == [0.0, 1.0, 2.0]


def test_the_sources_of_tensors_that_are_gone_are_forgotten(batch):
    before = len(transfer._SOURCES)
    sent = send_batch(batch, torch.device("meta"))
    assert len(transfer._SOURCES) == before + 2
    del sent
    assert len(transfer._SOURCES) == before
