"""Asks a cluster what it is, before a run joins it: ``python -m engine_plugin_ray.greeting HOST:PORT``.

A process of its own: Ray ends the one in which it waits in vain, and waits for long. Prints one line of JSON:
``{"ray": ..., "python": ...}`` or ``{"error": ...}``; another end means that no Ray answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

PATIENCE = {
    "RAY_gcs_rpc_server_connect_timeout_s": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_gcs_server_request_timeout_seconds": "5",
}
SECONDS = 60.0  # with the import of Ray
KEY, NAMESPACE = b"CLUSTER_METADATA", b"cluster"  # where Ray itself looks


def greet(address: str) -> dict[str, Any]:
    """What the cluster at ``HOST:PORT`` says; ``{}`` where none answers."""
    command = [sys.executable, "-m", "engine_plugin_ray.greeting", address]
    try:
        done = subprocess.run(
            command, env={**os.environ, **PATIENCE}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    answer: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return answer


def main() -> None:
    """Ask, and print."""
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )
    from ray._raylet import GcsClient

    try:
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        client = GcsClient(address=sys.argv[1])
        found = json.loads(client.internal_kv_get(KEY, NAMESPACE, timeout=5) or b"{}")
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    else:
        answer = {"ray": found.get("ray_version"), "python": found.get("python_version")}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
