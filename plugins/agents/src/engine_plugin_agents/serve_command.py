"""``engine serve`` and ``engine chat``: a model behind the policy endpoint, and a conversation with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated, Any

import typer

from engine_core.cli.options import Sets, Step
from engine_core.errors import ConfigError
from engine_core.redaction import harmless
from engine_core.train.stopping import Terminated


def serve(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL", help="A run: its newest checkpoint; or a model folder, or hub name."
        ),
    ],
    step: Step = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000,
    sets: Sets = None,
) -> None:
    """Serve a model on this machine, by the protocols of OpenAI and Anthropic; SIGTERM or Ctrl-C ends it.

    Prints the address and the API key when it is ready. The model samples as [rollout] says.

    Example: engine serve latest --step best --port 8000

    Raises:
        ConfigError: the port cannot be opened.
    """
    from engine_plugin_agents.server import bound
    from engine_plugin_agents.serving import Service, read_target

    config, checkpoint = read_target(target, step, sets)
    try:
        listener = bound(port)  # before the model is loaded
    except OSError as error:
        raise ConfigError(
            f"--port {port}: {error.strerror or error}. Choose another; 0 takes a free one."
        ) from error
    with listener, closing(Service(config, checkpoint, listener)) as service:
        # A shell starts background commands with SIGINT ignored; a SIGINT sent to this process must end it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print(f"export OPENAI_BASE_URL={service.url}/v1\nexport OPENAI_API_KEY={service.key}", flush=True)
        with contextlib.suppress(KeyboardInterrupt, Terminated):
            service.wait()
    print("stopped", flush=True)


def chat(
    target: Annotated[
        str,
        typer.Argument(metavar="RUN|MODEL|URL", help="As for 'engine serve', or the address of a server."),
    ],
    step: Step = None,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="System message; default: the run's data.system."),
    ] = None,
    key_env: Annotated[
        str, typer.Option("--key-env", metavar="NAME", help="Environment variable with the API key of a URL.")
    ] = "OPENAI_API_KEY",
    sets: Sets = None,
) -> None:
    """Talk to a model in the terminal. /reset begins again, /exit or Ctrl-D ends.

    Of a run or a model the server is in this process; otherwise a URL such as http://127.0.0.1:8000/v1 names it. If
    stdin is not a terminal, each line is a message and only the answers are printed.

    Example: engine chat latest --system "Be brief."

    Raises:
        ConfigError: a server was named with options of a model.
    """
    if target.startswith(("http://", "https://")):
        if step is not None or sets:
            raise ConfigError(f"'{target}' is a server: --step and --set are options of 'engine serve'.")
        converse(target.rstrip("/"), os.environ.get(key_env, ""), system)
        return
    from engine_plugin_agents.serving import Service, read_target

    config, checkpoint = read_target(target, step, sets)
    with closing(Service(config, checkpoint)) as service:
        try:
            converse(f"{service.url}/v1", service.key, config.data.system if system is None else system)
        finally:
            service.check()


def converse(base_url: str, key: str, system: str | None) -> None:
    """Read messages from stdin and print the answers.

    Args:
        base_url: of the server, ends with ``/v1``.
        key: API key.
        system: system message.

    Raises:
        ConfigError: stdin is not a terminal, and the server refused a request.
    """
    shown = sys.stdin.isatty()
    begin = [{"role": "system", "content": system}] if system else []
    messages = [*begin]
    if shown:
        import readline  # noqa: F401  # edits lines

        print(f"{base_url}. /reset begins again, /exit ends.", file=sys.stderr)
    while True:
        try:
            line = input("> " if shown else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip() == "/exit":
            return
        if line.strip() == "/reset":
            messages = [*begin]
        elif line.strip():
            asked = [*messages, {"role": "user", "content": line}]
            try:
                text = ""
                for part in answer(base_url, key, asked):
                    print(harmless(part), end="", flush=True)
                    text += part
                messages = [*asked, {"role": "assistant", "content": text}]
            except (ConfigError, KeyboardInterrupt) as error:  # the message is taken back
                if not shown:
                    raise
                print(f"{error or 'stopped'}. The message is not part of the conversation.", file=sys.stderr)
            print(flush=True)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A handler that follows no redirect: another server would receive the API key."""

    def redirect_request(self, *_: Any) -> None:
        """Refuse the redirect, which makes the answer an error."""


def _opener(base_url: str) -> urllib.request.OpenerDirector:
    """Return what opens requests: a server on this machine is not asked through a proxy of the environment."""
    here = urllib.parse.urlsplit(base_url).hostname in ("127.0.0.1", "::1", "localhost")
    return urllib.request.build_opener(_NoRedirect, *([urllib.request.ProxyHandler({})] if here else ()))


def answer(base_url: str, key: str, messages: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the parts of the answer to a conversation.

    Raises:
        ConfigError: the server cannot be reached, refuses the request, or reports an error in its answer.
    """
    body = json.dumps({"model": "policy", "messages": messages, "stream": True}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    try:
        with _opener(base_url).open(request) as response:
            begun = False
            for line in response:
                field, _, data = line.decode().partition(":")
                if field != "data":  # a comment or an empty line
                    continue
                begun = True
                event = {} if data.strip() == "[DONE]" else json.loads(data)
                if error := event.get("error"):
                    raise ConfigError(f"{base_url} ends its answer with an error: {error}")
                for choice in event.get("choices") or ():
                    yield choice["delta"].get("content") or ""
            if not begun:
                raise ValueError("it sent no events")
    except urllib.error.HTTPError as error:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            message = json.loads(error.read())["error"]["message"]
            raise ConfigError(f"{base_url} refuses the request ({error.code}): {message}") from error
        raise ConfigError(f"{base_url} answers {error.code} {error.reason}.") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{base_url}: no answer ({getattr(error, 'reason', error)}). Expected the URL of a server, with /v1."
        ) from error
