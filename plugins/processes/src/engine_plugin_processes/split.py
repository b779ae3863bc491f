"""The split of batches and requests over data-parallel slices, and the merge of results in order, for all backends."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from engine_core.errors import PluginError
from engine_core.types import Batch, Request, Rollout
from engine_plugin_processes.balance import partition, sequence_cost

Merge = Callable[[Sequence[Any]], Any]
"""Makes one result of the slices' results, which come in the order of the slices."""


def split_batch(batch: Batch, slices: int, attention: float) -> tuple[list[Batch], Merge]:
    """Return each slice's sequences, balanced by cost, and a function that merges the results.

    Sequences with the same ``keep_together`` id stay together. A single slice gets the batch unchanged.

    Args:
        batch: batch of B sequences with T tokens in total.
        slices: number of slices.
        attention: attention share for ``balance.sequence_cost``.
    """
    if slices == 1:
        return [batch], lambda results: results[0]
    costs = [sequence_cost(length, attention) for length in batch.lengths.tolist()]
    together = None if batch.keep_together is None else batch.keep_together.tolist()
    parts = partition(costs, slices, together)

    def merge(results: Sequence[Any]) -> Any:
        """Return results per token [T, ...] or sequence [B, ...] in the batch's order, others unchanged."""
        if not isinstance(results[0], Mapping):
            return results[0]  # a result for the whole batch, equal on every slice
        return {name: _put_back(name, [r[name] for r in results], parts, batch) for name in results[0]}

    ordered = batch.select([index for part in parts for index in part])
    return ordered.split([len(part) for part in parts]), merge


def split_requests(requests: Sequence[Request], slices: int) -> list[list[Request]]:
    """Return each slice's requests, balanced by their maximum tokens.

    The rollouts of a group may be sampled by several slices: each request has its own seed.
    """
    parts = partition([_tokens(request) for request in requests], slices)
    return [[requests[i] for i in part] for part in parts]


class Running:
    """The requests in flight on each slice; a new request goes to the slice with the fewest tokens left to sample.

    Args:
        slices: number of slices.
    """

    def __init__(self, slices: int) -> None:
        self.left = [0] * slices  # tokens that each slice may still sample
        self.under_way = [0] * slices  # number of requests in flight
        self._asked: dict[str, tuple[Request, int]] = {}  # id -> request, slice
        self._lock = threading.Lock()  # requests are added while answers arrive

    def share(self, requests: Sequence[Request], among: Sequence[int] | None = None) -> list[list[Request]]:
        """Assign new requests to slices; return one list for each slice.

        Consecutive requests of one prompt go to one slice, unless that could leave a slice idle.

        Args:
            requests: assigned in this order.
            among: slices that may receive requests; default: all.
        """
        shares: list[list[Request]] = [[] for _ in self.left]
        if not requests:  # samplers only continue
            return shares
        with self._lock:
            slices = range(len(self.left)) if among is None else among
            least = [(self.left[at], place, at) for place, at in enumerate(slices)]
            heapq.heapify(least)
            units = [list(unit) for _, unit in itertools.groupby(requests, key=lambda each: id(each.prompt))]
            in_flight = sum(self.under_way[at] for at in slices) + len(requests)
            if in_flight < len(slices) * max(map(len, units)):
                units = [[request] for request in requests]
            for unit in units:
                left, place, chosen = least[0]
                left += sum(map(_tokens, unit))
                heapq.heapreplace(least, (left, place, chosen))
                shares[chosen] += unit
                self.left[chosen] = left
                self.under_way[chosen] += len(unit)
                self._asked |= {request.id: (request, chosen) for request in unit}
        return shares

    def forget(self, ids: Iterable[str]) -> dict[int, list[str]]:
        """Remove canceled requests; return slice -> ids of its removed requests."""
        found: dict[int, list[str]] = {}
        with self._lock:
            for id in ids:
                if (entry := self._settle(id)) is not None:
                    found.setdefault(entry[1], []).append(id)
        return found

    def lose(self, slice: int) -> list[Request]:
        """Remove and return the unfinished requests of a slice, in the order in which they were assigned."""
        with self._lock:
            lost = [request for request, chosen in self._asked.values() if chosen == slice]
            for request in lost:
                self._settle(request.id)
        return lost

    def merge(self, results: Sequence[Any]) -> Any:
        """Merge results as ``merge_plain``; rollouts count as finished and get the controller's prompts."""
        found = merge_plain(results)
        if isinstance(found, list):
            self.settle(found)
        return found

    def settle(self, rollouts: Sequence[Rollout]) -> None:
        """Remove the requests of finished rollouts, and set the rollouts' prompts to the controller's objects."""
        with self._lock:
            for rollout in rollouts:
                if (entry := self._settle(rollout.request_id)) is not None:
                    rollout.prompt = entry[0].prompt

    def _settle(self, id: str) -> tuple[Request, int] | None:
        """Remove a request, while holding the lock; return the request and its slice, or None if unknown."""
        found = self._asked.pop(id, None)
        if found is not None:
            request, chosen = found
            self.left[chosen] -= _tokens(request)
            self.under_way[chosen] -= 1
        return found


def _tokens(request: Request) -> int:
    """Return the tokens of the prompt plus the maximum of the response."""
    return len(request.prompt.token_ids) + request.sampling.max_response_tokens


def merge_plain(results: Sequence[Any]) -> Any:
    """Merge results of a call without a batch: concatenate lists of rollouts, else return the first slice's result."""
    first = results[0]
    if isinstance(first, list) and all(isinstance(entry, Rollout) for result in results for entry in result):
        return [rollout for result in results for rollout in result]
    return first


def merge_futures(futures: Sequence[Future[Any]]) -> Future[Any]:
    """Return a future that is done when all are, with the first error, or else the first result."""
    done: Future[Any] = Future()
    if not futures:
        done.set_result(None)
    left = [len(futures)]

    def settle(_: Future[Any]) -> None:
        """Count a finished future; after the last one set the result or the first error."""
        left[0] -= 1
        if left[0]:
            return
        errors = [error for future in futures if (error := future.exception())]
        if errors:
            done.set_exception(errors[0])
        else:
            done.set_result(futures[0].result())

    for future in futures:
        future.add_done_callback(settle)
    return done


def _put_back(name: str, found: Sequence[Tensor], parts: Sequence[Sequence[int]], batch: Batch) -> Tensor:
    """Return the slices' values per token [T, ...] or per sequence [B, ...] in the order of the batch."""
    lengths, offsets = batch.lengths.tolist(), batch.offsets.tolist()
    rows = [len(values) for values in found]
    if rows == [sum(lengths[i] for i in part) for part in parts]:
        places = [torch.arange(offsets[i], offsets[i + 1]) for part in parts for i in part]
        size = batch.num_tokens
    elif rows == [len(part) for part in parts]:
        places = [torch.tensor(part, dtype=torch.int64) for part in parts]
        size = len(batch)
    else:
        raise PluginError(
            f"The engine gave {rows} values of '{name}' on its slices; expected one a token or one a sequence. "
            "This is a bug of the plugin."
        )
    whole = found[0].new_empty((size, *found[0].shape[1:]))
    whole[torch.cat(places)] = torch.cat(list(found))
    return whole
