"""``engine serve-reward``."""

from __future__ import annotations

import contextlib
import os
import signal
from contextlib import closing
from typing import Annotated

import typer

from engine_core.cli.options import AllowCode, Sets
from engine_core.errors import ConfigError
from engine_core.train.stopping import Terminated

SHORTEST_TOKEN = 16


def serve_reward(
    target: Annotated[
        str,
        typer.Argument(metavar="FILE|FOLDER", help="Run file with the reward, or a reward model's folder."),
    ],
    reward: Annotated[
        str | None,
        typer.Option("--reward", metavar="NAME", help="Which [[reward]], where there are several."),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="ADDRESS", help="Address to bind. Other than loopback: needs --token-env."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000,
    token_env: Annotated[
        str | None,
        typer.Option(
            "--token-env",
            metavar="NAME",
            help="Environment variable with the token that requests must bring.",
        ),
    ] = None,
    sets: Sets = None,
    allow_code: AllowCode = False,
) -> None:
    """Serve one reward over HTTP, for the reward 'http' of other runs; SIGTERM or Ctrl-C ends it.

    Prints the address when it is ready. Requests that run at the end are still answered. A host that other machines
    reach needs --token-env.

    Example: engine serve-reward scorer --port 8000
    """
    from engine_plugin_rewards.server.server import RewardServer, require_token
    from engine_plugin_rewards.server.service import RewardService, read_service

    token = _token(token_env)
    require_token(host, token)
    config = read_service(target, reward, sets or (), allow_code)
    with (
        closing(RewardService(config)) as service,
        RewardServer(service, host, port, token) as server,
    ):
        # A shell starts background commands with SIGINT ignored; a SIGINT sent to this process must end it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print(server.url, flush=True)
        with contextlib.suppress(KeyboardInterrupt, Terminated):
            server.serve_forever(poll_interval=0.1)
        server.server_close()  # answers requests that run
        print(f"stopped after {service.scored} samples", flush=True)


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    if len(token) < SHORTEST_TOKEN or not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(
            f"--token-env: ${variable} must hold a token of {SHORTEST_TOKEN} characters or more, without spaces."
        )
    return token
