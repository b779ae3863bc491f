"""The cluster that an address means, and checks whether a run may join it: its versions and its token."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_core.errors import ConfigError
from engine_plugin_ray.address import AUTO, host_and_port
from engine_plugin_ray.greeting import MODE, OPEN, TOKEN, asks_for_another, greet

CONNECT_SECONDS = 5.0
NODE_SECONDS = 10.0  # for a node that is just starting


def find(address: str) -> str:
    """Return ``HOST:PORT`` of the cluster that an address means.

    Raises:
        ConfigError: it is no address, or no Ray runs on this machine.
    """
    at = f"runtime.ray.address = '{address}'"
    found = address
    if address == AUTO:
        from ray._private import services

        try:
            found = services.get_ray_address_from_environment(AUTO, None)
        except ConnectionError:
            raise ConfigError(
                f"{at}: no Ray runs on this machine. Give the address of the cluster's head, make this machine a node of "
                "it (ray start --address=HOST:6379), or leave the key out for a cluster of the run's own."
            ) from None
    try:
        host_and_port(found)
    except ValueError as error:
        where = (
            f"runtime.ray.address is '{address}'" if found == address else f"{at}: RAY_ADDRESS is '{found}'"
        )
        raise ConfigError(f"{where}; {error}") from None
    return found


def meet(address: str, found: str) -> str:
    """Check that the cluster may be joined.

    Args:
        address: the address in the run file.
        found: the result of ``find``.

    Returns:
        The authentication mode of the cluster, a value of ``RAY_AUTH_MODE``.

    Raises:
        ConfigError: nothing answers there, or no Ray, or one of another version, or it requires another token, or this
            machine is not one of its nodes.
    """
    at = f"runtime.ray.address = '{address}'" + ("" if found == address else f" ({found})")
    _reach(at, found)
    mode = check(at, greet(found))
    see_node(at, found)
    return mode


def see_node(at: str, found: str) -> None:
    """Check that this machine is a node of the cluster, as joining requires; Ray itself would wait for a minute.

    Args:
        at: the key and its value, for messages.
        found: the cluster's ``HOST:PORT``.

    Raises:
        ConfigError: this machine is no node.
    """
    from ray._private import services

    deadline = time.monotonic() + NODE_SECONDS
    while not services.find_node_ids():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{at}: this machine is no node of the cluster, and engine runs on one of them. Make it one with "
                f"'ray start --address={found}', or start engine on a node."
            )
        time.sleep(0.2)


def check(at: str, answer: Mapping[str, Any]) -> str:
    """Check the answer of ``greet`` and return the authentication mode.

    Args:
        at: the key and its value, for messages.
        answer: the cluster's answer.

    Raises:
        ConfigError: no Ray, one of another version, or one that requires another token or none.
    """
    import ray

    error, ours = answer.get("error", ""), (ray.__version__, platform.python_version())
    if asks_for_another(answer):
        raise ConfigError(
            f"{at}: the cluster asks for a token, and does not know ours ({token_here()}). Set RAY_AUTH_TOKEN to "
            f"the cluster's token, or RAY_AUTH_TOKEN_PATH to the file that holds it{'' if _may_send() else ', and RAY_AUTH_MODE to token'}."
        )
    if not answer or error or not answer.get("ray"):
        raise ConfigError(
            f"{at}: what answers there is no Ray cluster{f' ({error:.200})' if error else ''}. Expected the head of one, "
            "at the port of 'ray start --head' (6379 without a word). Correct the address, or leave it out for a cluster of "
            "the run's own."
        )
    theirs = (answer["ray"], answer["python"])
    if theirs[0] != ours[0] or minor(theirs[1]) != minor(ours[1]):
        raise ConfigError(
            f"{at}: the cluster is of Ray {theirs[0]} and Python {theirs[1]}, and this is Ray {ours[0]} and Python "
            f"{ours[1]}. Run engine in the environment that the cluster was started with, or start the cluster "
            "with this one."
        )
    mode: str = answer.get("mode", OPEN)
    wanted = os.environ.get(MODE, "")
    if mode == OPEN and wanted.lower() == TOKEN:
        raise ConfigError(
            f"{at}: RAY_AUTH_MODE is '{wanted}' here, and the cluster asks for no token. Start it with "
            "RAY_AUTH_MODE=token too, or unset RAY_AUTH_MODE here to trust every client that reaches it."
        )
    return mode


def token_here() -> str:
    """Return which token this process has, in words; Ray uses the first of these."""
    if not _may_send():
        return f"RAY_AUTH_MODE is '{os.environ[MODE]}' here, so none is sent"
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN is set here"
    if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return f"RAY_AUTH_TOKEN_PATH is set here{'' if _holds_text(Path(path)) else ', to a file that is not there or empty'}"
    return (
        "that of ~/.ray/auth_token"
        if _holds_text(Path.home() / ".ray/auth_token")
        else "no token is set here"
    )


def _may_send() -> bool:
    """Return whether this process sends its token; Ray does by default."""
    return os.environ.get(MODE, TOKEN).lower() == TOKEN


def minor(version: str) -> str:
    """Return the minor version: ``3.11`` for ``3.11.7``."""
    return ".".join(str(version).split(".")[:2])


def _reach(at: str, found: str) -> None:
    """Raise ``ConfigError`` for an address at which nothing answers."""
    try:
        socket.create_connection(host_and_port(found), CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{at}: nothing answers there ({error}). Start the cluster (ray start --head), "
            "check the address, or leave it out for a private cluster of the run."
        ) from None


def _holds_text(path: Path) -> bool:
    try:
        return bool(path.read_text("utf-8", "replace").strip())
    except OSError:
        return False
