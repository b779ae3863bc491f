"""The table ``vllm_server``: a vLLM server that runs a frozen model (no torch, no vLLM: read by ``engine validate``)."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from engine_core.specs import Options
from engine_plugin_processes.http.options import ServerOptions
from engine_plugin_vllm_rollout import installed

SET_HERE = ("model", "host", "port", "api_key", "runner", "max_logprobs")


class StartOptions(Options):
    """``start``: where the table is present, the run starts the server itself, and it ends with the run."""

    host: str = "127.0.0.1"
    """Address that it binds, one of loopback: vLLM asks for its token below ``/v1`` alone, and other paths answer anybody."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: one that is free."""
    startup_timeout_minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 15.0
    """Time until it answers."""
    options: dict[str, Any] = {}
    """Options of vLLM's engine (``EngineArgs``) by vLLM's own names: ``{ dtype = "bfloat16", gpu_memory_utilization = 0.3 }``."""

    @field_validator("host")
    @classmethod
    def _loopback(cls, host: str) -> str:
        try:
            address = ipaddress.ip_address(host)
        except ValueError as error:
            raise ValueError(f"{error}. Expected an address such as 127.0.0.1.") from error
        if not address.is_loopback:
            raise ValueError(
                f"'{host}' is reached by other machines, and vLLM asks for its token below /v1 alone: /invocations and others "
                "answer anybody. Expected an address of loopback, such as 127.0.0.1. For other machines start vllm serve "
                "behind a proxy that asks for a token, and name it in `url`."
            )
        return host

    @field_validator("options")
    @classmethod
    def _known(cls, options: dict[str, Any]) -> dict[str, Any]:
        if missing := installed.problem():
            raise ValueError(missing)
        problems = [f"'{name}' is set elsewhere; remove it here." for name in SET_HERE if name in options]
        checked = {name: value for name, value in options.items() if name not in SET_HERE}
        problems += [why for name, value in checked.items() if (why := installed.option_problem(name, value))]
        if problems:
            raise ValueError(" ".join(problems))
        return options


class VLLMServerOptions(ServerOptions):
    """``[teacher.vllm_server]`` and its like: a vLLM server that holds a model that is never trained, one that runs (`url`) or one that the run starts (`start`)."""

    url: str = Field(default="", validate_default=False)
    """Address of a ``vllm serve`` that runs, such as ``http://127.0.0.1:8000``. Not needed with `start`."""
    start: StartOptions | None = None
    """With this table the run starts a dedicated server for the model in `path`."""
    model: str | None = None
    """Its name at the server; default: the only one there."""
    connections: Annotated[int, Field(ge=1, le=256)] = 16
    """Requests at the same time, of each rank."""
    batch_size: Annotated[int, Field(ge=1, le=1024)] = 8
    """Sequences in one request, where the server takes several; a judge that writes is asked one by one."""
    attempt_timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 120.0
    """Time for one try."""
    max_response_mb: Annotated[int, Field(ge=1)] = 256
    """A longer response is refused unread. A teacher's has about 80 bytes for each token and candidate."""

    @model_validator(mode="after")
    def _one_server(self) -> Self:
        if bool(self.url) == (self.start is not None):
            raise ValueError(
                "expected `url`, the address of a vllm serve that runs (such as http://127.0.0.1:8000), or the table `start`, "
                f"which starts one; got {'both' if self.url else 'neither'}."
            )
        return self
