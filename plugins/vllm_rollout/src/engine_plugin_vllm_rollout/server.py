"""A vLLM server that runs: what it must be before a run begins, and how it is asked.

::

    GET  /version                  its release
    GET  /v1/models                whether it takes the token, and which models it has
    POST /tokenize, /detokenize    whether its tokens are those of the run's folder
    POST /v1/completions, /classify

Everything is token ids: no text is tokenised there. Tokens, addresses, tries and time-outs are those of
``engine_plugin_processes.http``. vLLM guards only paths below ``/v1`` with its token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from engine_core.errors import ConfigError, EnvironmentProblem, TrainingFailed, did_you_mean
from engine_plugin_processes.http.connections import Connections
from engine_plugin_processes.http.requests import LONGEST_BACKOFF, Asker, NoAnswer, secret_parts
from engine_plugin_vllm_rollout import installed
from engine_plugin_vllm_rollout.serve_process import (
    ServerProcess,
    environment,
    free_port,
    new_token,
    vllm_serve,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine_plugin_vllm_rollout.server_options import VLLMServerOptions

PROBE = "Say 3 + 4 = 7, \u00fcber \u4f60\u597d?\n\tdef f(x): return x"
PROBED_IDS = 512  # of the vocabulary, evenly spread
START_SECONDS = 30.0  # for one question at the start
ANSWER_SECONDS = 2.0  # for a starting server to answer


class Server:
    """One server, asked by several threads.

    Args:
        options: of the table.
        table: its name in the run file, such as ``reward.judge.vllm_server``, for messages.

    Raises:
        ConfigError: a secret is missing.
    """

    def __init__(self, options: VLLMServerOptions, table: str) -> None:
        self.options, self.table, self.url = options, table, options.url
        self._process: ServerProcess | None = None
        headers, secrets = secret_parts(options.token_env, {}, table)
        self._connect(headers, secrets)
        self.model = options.model or ""
        self.room = 0  # tokens that it holds, once it was asked

    def _connect(self, headers: Mapping[str, str], secrets: Sequence[str]) -> None:
        options = self.options
        self.base = (urlsplit(self.url).path or "").rstrip("/").removesuffix("/v1")
        self._asker = Asker(
            Connections(self.url),
            headers,
            secrets,
            options.attempt_timeout_seconds,
            options.retries,
            options.backoff_seconds,
            options.max_response_mb << 20,
            longest_key="max_response_mb",
        )

    @classmethod
    def started(cls, options: VLLMServerOptions, table: str, model: str, classifies: bool) -> Server:
        """Start a server of this process and wait until it answers; ``close`` ends it.

        Args:
            options: options with ``start``.
            table: the table's name in the run file, for messages.
            model: folder or hub name.
            classifies: the model is a sequence classifier.

        Raises:
            EnvironmentProblem: the server does not start; the message has what it printed. No server is left.
        """
        start = options.start
        assert start is not None
        _, secrets = secret_parts(options.token_env, {}, table)
        token = secrets[0] if secrets else new_token()
        port = start.port or free_port(start.host)
        named = f"[{start.host}]" if ":" in start.host else start.host
        server = cls(options.model_copy(update={"url": f"http://{named}:{port}"}), table)
        server._connect({"Authorization": f"Bearer {token}"}, [token])
        server._process = ServerProcess(vllm_serve(model, start, port, classifies), environment(token))
        try:
            server._process.wait_until(
                server._answers, start.startup_timeout_minutes * 60, f"[{table}.start] vllm serve"
            )
        except BaseException:
            server.close()
            raise
        return server

    def _answers(self) -> bool:
        try:
            self._asker.answer(None, time.monotonic() + ANSWER_SECONDS, f"{self.base}/health")
        except (NoAnswer, TimeoutError):
            return False
        return True

    def close(self) -> None:
        """End the process, where it is this one's own."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    # -- before the run -----------------------------------------------------

    def check(self) -> None:
        """Refuse a server that does not answer, is not vLLM, or has another release, token or model.

        Raises:
            EnvironmentProblem: no server answers.
            ConfigError: a key does not fit the server; the message names it.
        """
        found = self._asked_at_start("/version", missing="is no vLLM server: it has no /version")
        version = str(found.get("version", "unknown"))
        if not installed.supported(version):
            raise ConfigError(
                f"[{self.table}] url: vLLM {version} runs at {self.url}; the plugin works with {installed.RANGE}."
            )
        listed = self._asked_at_start("/v1/models", missing="serves no models: it has no /v1/models")
        models = {
            str(entry.get("id")): entry for entry in listed.get("data") or () if isinstance(entry, dict)
        }
        if not self.model and len(models) == 1:
            self.model = next(iter(models))
        if self.model not in models:
            said = f"'{self.model}' is not served" if self.model else f"{len(models)} models are served"
            raise ConfigError(
                f"[{self.table}] model: {said} at {self.url}.{did_you_mean(self.model, models)}"
            )
        self.room = int(models[self.model].get("max_model_len") or 0)

    def check_tokens(self, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
        """Refuse a model whose tokens are not those of the folder that the run reads.

        A text is cut into tokens there and here, and tokens spread over the vocabulary are made text there and here.

        Args:
            tokenizer: of the folder.
            path: of the folder, for the message.

        Raises:
            ConfigError: it is of another vocabulary.
        """
        here = list(tokenizer(PROBE, add_special_tokens=False)["input_ids"])
        asked = {"model": self.model, "prompt": PROBE, "add_special_tokens": False}
        there = self._asked_at_start("/tokenize", asked, missing="has no /tokenize").get("tokens")
        if there != here:
            raise ConfigError(self._other_tokens(path, f"{PROBE[:13]!r}... is {there} there and {here} here"))
        ids = spread(len(tokenizer), PROBED_IDS)
        text = str(tokenizer.decode(ids))
        asked = {"model": self.model, "tokens": ids}
        found = self._asked_at_start("/detokenize", asked, missing="has no /detokenize").get("prompt")
        if found != text:
            said = f"ids 0 to {ids[-1]} are {self._asker.shown(str(found))!r} there and {text[:160]!r} here"
            raise ConfigError(self._other_tokens(path, said))

    def _other_tokens(self, path: str, why: str) -> str:
        return (
            f"[{self.table}] model: '{self.model}' at {self.url} has other tokens than '{path}': {why}. Name the folder "
            "of the model that is served, or serve that one."
        )

    def _asked_at_start(
        self, path: str, body: Mapping[str, Any] | None = None, missing: str = ""
    ) -> dict[str, Any]:
        """Return the server's answer before the run begins; refusals name keys of the run file."""
        where = f"[{self.table}] url: {self.url}"
        try:
            answer = self._asker.answer(_encoded(body), time.monotonic() + START_SECONDS, self.base + path)
        except TimeoutError as error:
            raise EnvironmentProblem(f"{where} does not answer: {error}. {_START}") from None
        except NoAnswer as error:
            if error.status in (401, 403):
                raise ConfigError(self._token_refused()) from None
            if error.status in (404, 405):
                raise ConfigError(f"{where} {missing} (status {error.status}). {_START}") from None
            kind = ConfigError if error.status else EnvironmentProblem
            raise kind(f"{where} does not answer {path}: {error}. {_START}") from None
        found = _decoded(answer)
        if found is None:
            raise ConfigError(f"{where} is no vLLM server: {path} gives {self._asker.shown(answer)!r}.")
        return found

    def _token_refused(self) -> str:
        if self.options.token_env is None:
            return (
                f"[{self.table}] token_env: the server at {self.url} wants a token. Put it into an environment "
                'variable and name that: token_env = "VLLM_TOKEN".'
            )
        return f"[{self.table}] token_env: the server at {self.url} refuses the token of ${self.options.token_env}."

    # -- in the run ---------------------------------------------------------

    def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One question with all its tries.

        Raises:
            ConfigError: the server refuses it.
            TrainingFailed: it does not answer, or not with what was asked for.
        """
        tries = self.options.retries + 1
        deadline = time.monotonic() + tries * (self.options.attempt_timeout_seconds + 2 * LONGEST_BACKOFF)
        where = f"[{self.table}] the server at {self.url}"
        try:
            answer = self._asker.answer(_encoded({"model": self.model, **body}), deadline, self.base + path)
        except (NoAnswer, TimeoutError) as error:
            if getattr(error, "status", 0) in (401, 403):
                raise ConfigError(self._token_refused()) from None
            if getattr(error, "status", 0):
                raise ConfigError(f"{where} refuses {path}: {error}.") from None
            raise TrainingFailed(f"{where} does not answer: {error}. The last checkpoint is good.") from None
        found = _decoded(answer)
        if found is None:
            raise TrainingFailed(f"{where} gives no JSON object: {self._asker.shown(answer)!r}.")
        return found

    def broken(self, path: str, answer: object) -> TrainingFailed:
        """Return the error for an answer of another form than was requested."""
        shown = self._asker.shown(json.dumps(answer, default=str))
        return TrainingFailed(f"[{self.table}] the server at {self.url} answers {path} with {shown!r}.")


_START = "Start it: vllm serve MODEL --host 127.0.0.1 --port 8000."


def spread(count: int, most: int) -> list[int]:
    """Return at most ``most`` of the numbers below ``count``, evenly spaced, including the last one."""
    step = max(1, -(-count // most))
    return sorted({*range(0, count, step), count - 1})


def chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Split a sequence into parts of at most ``size``, in order."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def _encoded(body: Mapping[str, Any] | None) -> bytes | None:
    return None if body is None else json.dumps(body).encode()


def _decoded(answer: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
