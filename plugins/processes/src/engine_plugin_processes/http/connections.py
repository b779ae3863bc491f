"""Connections to one server, by urllib3, with a deadline for the whole answer."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from typing import Any

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, TimeoutError

CHUNK_BYTES = 65536
MAX_CONNECTIONS = 256  # kept open; as many as ``ServerOptions.connections`` allows


class Passing(Exception):
    """An error: an attempt failed, and another one may succeed.

    Args:
        reason: for the message of the last attempt.
        wait: seconds that the server asks for.
    """

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class Connections:
    """Connections that are kept open between requests. Thread-safe. Proxies of the environment are not used.

    Args:
        url: of the server.
    """

    def __init__(self, url: str) -> None:
        self.pool = urllib3.connection_from_url(url, maxsize=MAX_CONNECTIONS)
        self.path = urllib3.util.parse_url(url).request_uri

    def exchange(
        self,
        body: bytes | None,
        headers: Mapping[str, str],
        seconds: float,
        most: int,
        path: str | None = None,
    ) -> tuple[Any, bytes | None]:
        """Return the response, whatever its status, and its raw body; None for a body of more than ``most`` bytes.

        Args:
            body: to post; None: a GET request.
            headers: to send.
            seconds: for everything, from the connection to the last byte.
            most: bytes of the body.
            path: instead of the path of ``url``.

        Raises:
            Passing: no response came in time, or the connection broke.
        """
        until, response = time.monotonic() + seconds, None
        late = Passing(f"no whole answer within {seconds:.3g} s")
        answer, whole = bytearray(), False
        try:
            response = self.pool.urlopen(
                "GET" if body is None else "POST",
                path or self.path,
                body,
                headers,
                retries=False,
                timeout=urllib3.Timeout(total=max(seconds, 0.001)),
                preload_content=False,
                decode_content=False,
            )
            while part := response.read1(CHUNK_BYTES):
                answer += part
                if len(answer) > most:
                    return response, None
                if time.monotonic() > until:  # the socket's own timeout restarts with each byte
                    raise late
            whole = True
        except NewConnectionError as error:  # a subclass of urllib3's timeout errors
            raise Passing(f"no connection: {_reason(error)}") from None
        except ConnectTimeoutError:
            raise Passing(f"no connection within {seconds:.3g} s") from None
        except TimeoutError:
            raise late from None
        except (HTTPError, http.client.HTTPException, OSError, ValueError) as error:
            raise Passing(f"the connection broke off: {_reason(error)}") from None
        finally:
            if response is not None:
                if not whole:  # a connection with unread bytes is of no use
                    response.close()
                response.release_conn()
        return response, bytes(answer)


def _reason(error: Exception) -> str:
    """Return the error's message without the objects with which the library's messages begin."""
    if error.args and isinstance(error.args[-1], Exception):
        error = error.args[-1]
    return str(error).rpartition(": ")[2] or type(error).__name__
