"""The engines ``vllm_server``: a frozen model that a running vLLM server holds.

``VLLMServedEngine`` scores for a teacher, a reward model, a verdict; ``VLLMServedSampler`` samples for a judge. The
server is looked at before anything is built. Left out: adapters, and weights that change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from engine_core.contracts.engines import Layout, RolloutEngine
from engine_core.data import load_tokenizer
from engine_core.errors import ConfigError
from engine_core.model_config import load_hf_config
from engine_core.types import Rollout
from engine_plugin_vllm_rollout.frozen_engine import FrozenEngine
from engine_plugin_vllm_rollout.sampling_options import PLAIN, sampling_options
from engine_plugin_vllm_rollout.scoring import TABLES, Given, check_lengths, infer
from engine_plugin_vllm_rollout.server import Server, chunks
from engine_plugin_vllm_rollout.workers import Workers

if TYPE_CHECKING:
    from engine_core.config import ModelConfig, RoleConfig, RolloutConfig
    from engine_core.contracts.engines import WorkerContext
    from engine_core.types import Batch, Request
    from engine_plugin_vllm_rollout.server_options import VLLMServerOptions

COMPLETIONS, CLASSIFY = "/v1/completions", "/classify"


class VLLMServedEngine(FrozenEngine):
    """A train engine for frozen models behind a ``vllm serve``; each rank queries it for its share."""

    def __init__(
        self, config: RoleConfig, model_config: ModelConfig, context: WorkerContext, *, trainable: bool = True
    ) -> None:
        super().__init__(config, model_config, context, trainable=trainable)
        model = model_config.model_copy(update={"path": config.path or model_config.path})
        self.where = f"{TABLES[context.role]}.vllm_server"
        self.vocabulary = int(load_hf_config(model).get_text_config().vocab_size)
        classifies = context.role == "reward_model"
        self._server = looked_at(config.options, self.where, model, context.world_size, classifies)
        self.model = Remote(self._server)
        try:
            self.model.check(classifies)
        except BaseException:
            self.close()
            raise

    @classmethod
    def check(cls, config: RoleConfig, context: WorkerContext, *, trainable: bool = True) -> None:
        super().check(config, context, trainable=trainable)
        if context.rank == 0 and config.options is not None and config.options.start is None:
            Server(config.options, f"{TABLES[context.role]}.vllm_server").check()

    @property
    def layout(self) -> Layout:
        return Layout(self.context.rank, self.context.world_size)

    def infer(self, batch: Batch, outputs: Sequence[str], adapter: bool = True) -> dict[str, Tensor]:
        """Compute the outputs [T] or [T, K] that ``scoring`` supports."""
        return infer(self.model, batch, outputs, self.vocabulary, self.where)

    def close(self) -> None:
        self.model.close()
        self._server.close()


def looked_at(
    options: VLLMServerOptions | None, table: str, model: ModelConfig, ranks: int, classifies: bool = False
) -> Server:
    """Return a server that is running, or is started, and serves this model.

    Args:
        options: options of the table.
        table: the table's name in the run file, for messages.
        model: the model whose tokenizer is compared.
        ranks: number of ranks that query the server.
        classifies: the model is a sequence classifier.

    Raises:
        ConfigError, EnvironmentProblem: it does not serve this model; see ``Server``. No started server is left
        running.
    """
    if options is None:
        raise ConfigError(
            f"{table}.url: missing. Expected the address of a vllm serve, such as http://127.0.0.1:8000."
        )
    if options.start is None:
        server = Server(options, table)
    elif ranks > 1:
        raise ConfigError(
            f"[{table}.start]: each of {ranks} ranks would start a server. Start one yourself (vllm serve) and name its `url`."
        )
    else:
        server = Server.started(options, table, model.path, classifies)
    try:
        server.check()
        server.check_tokens(load_tokenizer(model), model.path)
    except BaseException:
        server.close()
        raise
    return server


class Remote:
    """``scoring.Model`` behind a server.

    Args:
        server: that was looked at.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._workers = Workers(server.options.connections, "vllm-server")

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
        if len(found) != len(sequences) or any(len(values) != 1 for values in found):
            raise ConfigError(
                f"[{self._server.table}] the server's model gives {len(found[0]) if found else 0} labels to a sequence, "
                "expected one."
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
            "temperature": 1.0,
            "prompt_logprobs": max(top_k, 1),
            **PLAIN,
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

    def _each(self, job: Any, parts: Iterable[Any]) -> Iterator[Any]:
        """The answers in order, asked at the same time; where one fails the rest is not asked for."""
        futures = [self._workers.submit(job, part) for part in parts]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """End the threads."""
        self._workers.close()


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


class VLLMServedSampler(RolloutEngine):
    """Samples for a judge; see the module and ``RolloutEngine``."""

    def __init__(self, config: RolloutConfig, model_config: ModelConfig, context: WorkerContext) -> None:
        super().__init__(config, model_config, context)
        if context.role != "judge":
            raise ConfigError(
                f"{context.role}.backend: 'vllm_server' samples from a model that is never trained, that of [reward.judge]. "
                "Choose another rollout engine."
            )
        table = "reward.judge.vllm_server"
        if config.options is None:
            raise ConfigError(
                f"{table}.url: missing. Expected the address of a vllm serve, such as http://127.0.0.1:8000."
            )
        self._server = Server(config.options, table)
        self._server.check()
        self._server.check_tokens(load_tokenizer(model_config), model_config.path)
        self._workers = Workers(config.options.connections, "vllm-server")
        self._asked: dict[str, tuple[Request, Future[dict[str, Any]]]] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._asked)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests: all of them, or none if one is malformed.

        Raises:
            ConfigError: the server cannot answer a request: log-probs, a continued response, or an option that it
            lacks.
        """
        for request in requests:
            sampling, ids = request.sampling, request.prompt.token_ids
            if sampling.log_probs or request.begun is not None:
                raise ConfigError("vllm_server samples text for a judge, without log-probs.")
            if not ids or len(ids) + 1 > self._server.room:
                raise ConfigError(
                    f"[{self._server.table}] a question has {len(ids)} tokens, and the server holds 1 to "
                    f"{self._server.room - 1} with an answer. Set reward.judge.max_tokens."
                )
        for request in requests:
            self._asked[request.id] = (
                request,
                self._workers.submit(self._server.ask, COMPLETIONS, self._body(request)),
            )

    def _body(self, request: Request) -> dict[str, Any]:
        sampling, ids = request.sampling, request.prompt.token_ids
        return {
            "prompt": ids,
            **PLAIN,
            "max_tokens": min(sampling.max_response_tokens, self._server.room - len(ids)),
            **sampling_options(sampling),
            "seed": sampling.seed,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }

    def step(self) -> list[Rollout]:
        """Wait for the next answers."""
        if not self._asked:
            return []
        done, _ = wait([future for _, future in self._asked.values()], return_when=FIRST_COMPLETED)
        finished = [id for id, (_, future) in self._asked.items() if future in done]
        return [self._rollout(*self._asked.pop(id)) for id in finished]

    def _rollout(self, request: Request, future: Future[dict[str, Any]]) -> Rollout:
        answer = future.result()
        try:
            (choice,) = answer["choices"]
            tokens = [int(token) for token in choice["token_ids"]]
            reason = {"stop": "stop", "length": "length"}[choice["finish_reason"]]
        except (KeyError, TypeError, ValueError):
            raise self._server.broken(COMPLETIONS, answer) from None
        prompt = request.prompt.token_ids
        count = len(prompt) + len(tokens)
        mask = torch.zeros(count, dtype=torch.bool)
        mask[len(prompt) :] = True
        return Rollout(
            request_id=request.id,
            prompt=request.prompt,
            token_ids=torch.tensor(prompt + tokens),
            loss_mask=mask,
            rollout_log_probs=torch.zeros(count),
            policy_versions=torch.zeros(count, dtype=torch.int32),
            finish_reason=reason,
            group_id=request.group_id,
            index=request.index,
        )

    def abort(self, ids: Sequence[str]) -> list[Rollout]:
        """Nothing is had of an answer before its end; one that is under way ends at the server by itself."""
        stopped = []
        for id in ids:
            if id in self._asked:
                request, future = self._asked.pop(id)
                future.cancel()
                stopped.append(request.unsampled())
        return stopped

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> NoReturn:
        """Refuse new weights ``[D_1, D_2, ...]``: the server's model is frozen.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("The model of a server is never trained: its weights cannot be replaced.")

    def close(self) -> None:
        self._asked.clear()
        self._workers.close()
        self._server.close()
