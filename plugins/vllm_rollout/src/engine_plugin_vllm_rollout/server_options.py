"""The table ``vllm_server``: a vLLM server that runs a frozen model (no torch, no vLLM: read by ``engine validate``)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from engine_plugin_processes.http.options import ServerOptions


class VLLMServerOptions(ServerOptions):
    """``[teacher.vllm_server]``: a running vLLM server that holds a model that is never trained: a teacher, a reward model, a judge. Refused for `actor`, `critic` and `ref`."""

    url: str
    """Address of a ``vllm serve``, such as ``http://127.0.0.1:8000``."""
    model: str | None = None
    """Name of the model at the server; default: the server's only model."""
    connections: Annotated[int, Field(ge=1, le=256)] = 16
    """Maximum number of concurrent requests of each rank."""
    batch_size: Annotated[int, Field(ge=1, le=1024)] = 8
    """Maximum number of sequences in one request."""
    attempt_timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 120.0
    """Maximum time for one attempt."""
    max_response_mb: Annotated[int, Field(ge=1)] = 256
    """Maximum size of a response of the server, in MiB. A larger response is rejected without being read. A teacher's response has about 80 bytes for each token and candidate."""
