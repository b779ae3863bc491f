"""A vLLM server that runs: what it must be before a run begins, and how it is asked.

::

    GET  /version        its release
    GET  /v1/models      whether it accepts the token, and which models it has
    POST /detokenize     whether its tokens are those of the run's folder
    POST /v1/completions, /classify

Everything is token ids: no text is tokenized there. Tokens, addresses, tries and time-outs are those of
``engine_plugin_processes.http``. vLLM guards only paths below ``/v1`` with its token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from engine_core.errors import ConfigError, EnvironmentProblem, TrainingFailed, did_you_mean
from engine_plugin_processes.http.requests import LONGEST_BACKOFF, Asker, NoAnswer
from engine_plugin_vllm_rollout import installed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine_plugin_vllm_rollout.server_options import VLLMServerOptions

PROBED_IDS = 512  # of the vocabulary, evenly spread
START_SECONDS = 30.0  # for one question at the start


class Server:
    """One server, asked by several threads.

    Args:
        options: of the table.
        table: its name in the run file, such as ``teacher.vllm_server``, for messages.

    Raises:
        ConfigError: a secret is missing.
    """

    def __init__(self, options: VLLMServerOptions, table: str) -> None:
        self.options, self.table, self.url = options, table, options.url
        self.model = options.model or ""
        self.room = 0  # tokens that it holds, once it was asked
        self.base = (urlsplit(self.url).path or "").rstrip("/").removesuffix("/v1")
        self._asker = Asker(options, table, options.max_response_mb << 20, "max_response_mb")

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
        installed.warn_of_release(version, f"[{self.table}] url: ")
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

        Tokens spread over the vocabulary are decoded there and here: all requests are token ids.

        Args:
            tokenizer: of the folder.
            path: of the folder, for the message.

        Raises:
            ConfigError: it is of another vocabulary.
        """
        ids = spread(len(tokenizer), PROBED_IDS)
        text = str(tokenizer.decode(ids))
        asked = {"model": self.model, "tokens": ids}
        found = self._asked_at_start("/detokenize", asked, missing="has no /detokenize").get("prompt")
        if found != text:
            raise ConfigError(
                f"[{self.table}] model: '{self.model}' at {self.url} has other tokens than '{path}': ids 0 to {ids[-1]} are "
                f"{self._asker.shown(str(found))!r} there and {text[:160]!r} here. Name the folder of the model that is "
                "served, or serve that one."
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
