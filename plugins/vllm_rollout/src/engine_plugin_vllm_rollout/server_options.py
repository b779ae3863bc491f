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
    """Its name at the server; default: the only one there."""
    connections: Annotated[int, Field(ge=1, le=256)] = 16
    """Requests at the same time, of each rank."""
    batch_size: Annotated[int, Field(ge=1, le=1024)] = 8
    """Sequences in one request."""
    attempt_timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 120.0
    """Time for one try."""
    max_response_mb: Annotated[int, Field(ge=1)] = 256
    """A longer response is refused unread. A teacher's has about 80 bytes for each token and candidate."""
