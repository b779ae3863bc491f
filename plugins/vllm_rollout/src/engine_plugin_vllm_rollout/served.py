"""The train engine ``vllm_server``: a frozen model behind a running vLLM server scores for a teacher or a reward.

The server is checked before anything is built. Left out: adapters, and weights that change.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine_core.contracts.engines import Layout
from engine_core.data import load_tokenizer
from engine_core.errors import ConfigError
from engine_core.model_config import load_hf_config
from engine_plugin_vllm_rollout.frozen_engine import FrozenEngine
from engine_plugin_vllm_rollout.scoring import TABLES, Given, check_lengths, infer
from engine_plugin_vllm_rollout.server import Server, chunks

if TYPE_CHECKING:
    from engine_core.config import ModelConfig, RoleConfig
    from engine_core.contracts.engines import WorkerContext
    from engine_core.types import Batch

COMPLETIONS, CLASSIFY = "/v1/completions", "/classify"


class VLLMServedEngine(FrozenEngine):
    """A train engine for frozen models behind a ``vllm serve``; each rank queries it for its share."""

    def __init__(
        self, config: RoleConfig, model_config: ModelConfig, context: WorkerContext, *, trainable: bool = True
    ) -> None:
        super().__init__(config, model_config, context, trainable=trainable)
        self.where = f"{TABLES[context.role]}.vllm_server"
        self.vocabulary = int(load_hf_config(model_config).get_text_config().vocab_size)
        server = Server(config.options, self.where)
        server.check()
        server.check_tokens(load_tokenizer(model_config), model_config.path)
        self.model = Remote(server)
        self.model.check(context.role == "reward_model")

    @classmethod
    def check(cls, config: RoleConfig, context: WorkerContext, *, trainable: bool = True) -> None:
        if context.rank == 0:
            Server(config.options, f"{TABLES[context.role]}.vllm_server").check()

    @property
    def layout(self) -> Layout:
        return Layout(self.context.rank, self.context.world_size)

    def infer(self, batch: Batch, outputs: Sequence[str], adapter: bool = True) -> dict[str, Tensor]:
        """Compute the outputs [T] or [T, K] that ``scoring`` supports."""
        return infer(self.model, batch, outputs, self.vocabulary, self.where)


class Remote:
    """``scoring.Model`` behind a server.

    Args:
        server: that was looked at.
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    def check(self, classifies: bool) -> None:
        """Ask one question of the kind that the run will ask.

        Raises:
            ConfigError: the server's model is of another kind.
        """
        try:
            if classifies:
                list(self.scores([[0]]))
            else:
                list(self.given([[0, 0]], 1))
        except ConfigError as error:
            how = (
                "with --runner pooling a sequence classifier"
                if classifies
                else "a language model that generates"
            )
            raise ConfigError(
                f"{error} Expected {how} of one label." if classifies else f"{error} Expected {how}."
            ) from None

    def scores(self, sequences: Sequence[list[int]]) -> Iterator[float]:
        """Yield each sequence's raw score, from the server's endpoint for classification."""
        check_lengths(sequences, self._server.room + 1, self._server.table)
        for answers in self._each(self._classified, chunks(sequences, self._server.options.batch_size)):
            yield from answers

    def _classified(self, sequences: Sequence[list[int]]) -> list[float]:
        asked = {"input": list(sequences), "use_activation": False, "add_special_tokens": False}
        answer = self._server.ask(CLASSIFY, asked)
        try:
            data = sorted(answer["data"], key=lambda entry: int(entry["index"]))
            found = [[float(value) for value in entry["probs"]] for entry in data]
        except (KeyError, TypeError, ValueError):
            raise self._server.broken(CLASSIFY, answer) from None
        if len(found) != len(sequences):
            raise self._server.broken(CLASSIFY, answer)
        if labels := {len(values) for values in found} - {1}:
            raise ConfigError(
                f"[{self._server.table}] the server's model gives {max(labels)} labels to a sequence, expected one."
            )
        return [values[0] for values in found]

    def next_tokens(
        self, prompts: Sequence[list[int]], candidates: Sequence[list[int]]
    ) -> Iterator[list[float]]:
        """Yield log-probs of the candidates: each is appended to the prompt, which needs no option of the server."""
        asked = [[*ids, token] for ids, tokens in zip(prompts, candidates, strict=True) for token in tokens]
        values = (float(answer.log_probs[-1]) for answer in self.given(asked, 0))
        for tokens in candidates:
            yield [next(values) for _ in tokens]

    def given(self, sequences: Sequence[list[int]], top_k: int) -> Iterator[Given]:
        """Yield each sequence's log-probs, as the server returns them for a prompt."""
        check_lengths(sequences, self._server.room, self._server.table)
        size = 1 if top_k > 1 else self._server.options.batch_size  # of a teacher one is large enough
        jobs = [(part, top_k) for part in chunks(sequences, size)]
        for answers in self._each(self._asked_given, jobs):
            yield from answers

    def _asked_given(self, job: tuple[Sequence[list[int]], int]) -> list[Given]:
        sequences, top_k = job
        asked = {
            "prompt": list(sequences),
            "max_tokens": 1,
            "prompt_logprobs": max(top_k, 1),
        }
        answer = self._server.ask(COMPLETIONS, asked)
        try:
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            return [
                read_given(choice["prompt_logprobs"], ids, top_k)
                for choice, ids in zip(choices, sequences, strict=True)
            ]
        except (KeyError, TypeError, ValueError):
            raise self._server.broken(COMPLETIONS, answer) from None

    def _each(self, job: Callable[[Any], Any], parts: Sequence[Any]) -> Iterator[Any]:
        """Yield the answer for each part, in order. If one fails, no further part is asked for.

        Threads ask at the same time; they end with the process, so that a stopped run does not wait for the server.
        consumes: parts; waits for: the server; unblocked by: its answers or timeouts; produces: results in futures.
        """
        futures: list[Future[Any]] = [Future() for _ in parts]
        jobs: queue.SimpleQueue[tuple[Future[Any], Any]] = queue.SimpleQueue()
        for entry in zip(futures, parts, strict=True):
            jobs.put(entry)

        def work() -> None:
            """Ask for parts until none is left."""
            with contextlib.suppress(queue.Empty):
                while True:
                    future, part = jobs.get_nowait()
                    if not future.set_running_or_notify_cancel():
                        continue
                    try:
                        future.set_result(job(part))
                    except BaseException as error:  # raised in the waiting caller
                        future.set_exception(error)

        for _ in range(min(self._server.options.connections, len(parts))):
            threading.Thread(target=work, name="vllm-server", daemon=True).start()
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def read_given(rows: Sequence[Any], token_ids: Sequence[int], top_k: int) -> Given:
    """``prompt_logprobs`` of a response: at each token but the first the likeliest ones, and the token itself.

    Args:
        rows: one for each token: null, or ``{"17": {"logprob": -0.5, "rank": 1}, ...}``.
        token_ids: that were asked about.
        top_k: likeliest tokens that are wanted.

    Raises:
        KeyError, TypeError, ValueError: that is not what it says.
    """
    if len(rows) != len(token_ids):
        raise ValueError(f"{len(rows)} rows for {len(token_ids)} tokens")
    own, ids, log_probs = [], [], []
    for row, token in zip(rows[1:], token_ids[1:], strict=True):
        if not isinstance(row, dict):
            raise TypeError(f"a row is {row!r:.40}")
        by_id = {int(id): float(entry["logprob"]) for id, entry in row.items()}
        own.append(by_id[token])
        best = sorted(by_id.items(), key=lambda entry: -entry[1])[:top_k]
        if len(best) < top_k:
            raise ValueError(f"{len(best)} likeliest tokens, {top_k} were asked for")
        ids.append([id for id, _ in best])
        log_probs.append([value for _, value in best])
    count = len(token_ids) - 1
    return Given(
        torch.tensor(own, dtype=torch.float64),
        torch.tensor(ids, dtype=torch.int64).reshape(count, top_k),
        torch.tensor(log_probs, dtype=torch.float64).reshape(count, top_k),
    )
