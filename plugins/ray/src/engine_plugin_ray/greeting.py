"""Asks a cluster for its versions before a run joins it: ``python -m engine_plugin_ray.greeting HOST:PORT``.

Runs in a separate process, because Ray ends a process that waits in vain, and waits long. Prints lines of JSON:
``{"ray": ..., "python": ..., "mode": ...}`` or ``{"error": ...}``; no output means that no Ray answers. The last line
counts. It asks without a token first, and sends its token only to clusters that require one: ``mode`` is the mode that
was used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

PATIENCE = {
    "RAY_gcs_rpc_server_connect_timeout_s": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_gcs_server_request_timeout_seconds": "5",
}
SECONDS = 60.0  # with the import of Ray
KEY, NAMESPACE = b"CLUSTER_METADATA", b"cluster"  # where Ray keeps its versions
MODE = "RAY_AUTH_MODE"
OPEN, TOKEN = "disabled", "token"  # values of MODE


def greet(address: str) -> dict[str, Any]:
    """Return the versions and the mode of the cluster at ``HOST:PORT``, or an ``error``; ``{}`` if none answers."""
    command = [sys.executable, "-m", "engine_plugin_ray.greeting", address]
    try:
        done = subprocess.run(
            command, env={**os.environ, **PATIENCE}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:  # a slow network or a slow machine
        return {"error": f"it did not say so within {SECONDS:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    answer: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return answer


def asks_for_another(answer: Mapping[str, Any]) -> bool:
    """Return whether the cluster requires a token and rejects this process's."""
    return "uthenticat" in answer.get("error", "")


def main() -> None:
    """Ask and print; the last line counts, since Ray ends a process whose token it cannot read."""
    from ray._raylet import AuthenticationTokenLoader, Config

    wanted = os.environ.get(MODE, TOKEN).lower()
    for mode in (OPEN, TOKEN):
        os.environ[MODE] = mode
        Config.initialize("")  # Ray has read its environment when it was imported
        loader = AuthenticationTokenLoader.instance()
        loader.reset_cache()
        if mode == TOKEN and (wanted != TOKEN or not loader.has_token(ignore_auth_mode=True)):
            return
        answer = _ask(sys.argv[1])
        print(json.dumps(answer | {"mode": mode}), flush=True)
        if not asks_for_another(answer):
            return


def _ask(address: str) -> dict[str, Any]:
    """Return the cluster's versions, asked in the present mode."""
    from ray._raylet import GcsClient

    try:
        client = GcsClient(address=address)
        found = json.loads(client.internal_kv_get(KEY, NAMESPACE, timeout=5) or b"{}")
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"ray": found.get("ray_version"), "python": found.get("python_version")}


if __name__ == "__main__":
    main()
