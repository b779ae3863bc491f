"""The HTTP server of the policy endpoint: one for a run, on the loopback address, on the loop of the episodes.

A session is the endpoint of one episode. Its key is an API key: clients send it with every request.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from aiohttp import web
from pydantic import ValidationError

from engine_plugin_agents.anthropic_messages import MessagesRequest
from engine_plugin_agents.chat_completions import ChatRequest, error_body
from engine_plugin_agents.conversations import Answer, Conversations, Question, Refused
from engine_plugin_agents.policy import LimitReached
from engine_plugin_agents.responses import ResponsesRequest

if TYPE_CHECKING:
    from engine_plugin_agents.episode import Episode

MAX_BODY_BYTES = 16 * 2**20
MAX_IN_FLIGHT = 64
"""Requests of one session at the same time."""
MAX_REFUSED = 100
"""Requests of one session that may be refused; the next one ends the episode."""
BACKLOG = 4096
CLOSE_SECONDS = 0.5
Form = type[ChatRequest | MessagesRequest | ResponsesRequest]
FORMS: dict[str, Form] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
MODELS = "/v1/models"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Session:
    """The endpoint of one episode, until ``close``.

    Args:
        episode: the episode.
        url: address of the server, without a path.
        key: the API key.

    Attributes:
        ended: raises the error that ends the episode before its harness does.
        conversations: what the harness and the policy said.
        limited: whether a request was refused because no turn or token was left.
    """

    def __init__(self, episode: Episode, url: str, key: str) -> None:
        self.url, self.key = url, key  #: constructor argument
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.limited = False
        self.conversations = Conversations(episode)
        self._closed = False
        self._refused = 0
        self._tasks: set[asyncio.Task[web.StreamResponse]] = set()

    async def respond(self, work: Coroutine[Any, Any, web.StreamResponse]) -> web.StreamResponse:
        """Await the response to one request.

        Raises:
            Refused: the request cannot be answered, or the session was closed meanwhile.
        """
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        try:
            if len(self._tasks) > MAX_IN_FLIGHT:
                raise Refused(429, "too_many_requests", f"At most {MAX_IN_FLIGHT} requests at once.")
            return await task
        except asyncio.CancelledError:
            if self._closed:
                raise _over() from None
            raise  # the client has disconnected
        except (Refused, web.HTTPException):
            self._refused += 1
            if self._refused > MAX_REFUSED:
                self._end(
                    RuntimeError(f"the harness sent more than {MAX_REFUSED} requests that were refused")
                )
            raise
        finally:
            task.cancel()
            self._tasks.discard(task)

    async def answer(self, question: Question) -> Answer:
        """Sample the answer to a request; an unexpected error ends the episode, too.

        Raises:
            Refused: the request cannot be answered.
        """
        try:
            return await self.conversations.answer(question)
        except Refused as error:
            self.limited |= isinstance(error.__cause__, LimitReached)
            raise
        except Exception as error:
            self._end(error)
            raise Refused(500, "server_error", f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Answer the requests in flight with an error and accept no other one."""
        self._closed = True
        self.ended.cancel()
        for task in self._tasks:
            task.cancel()

    def _end(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


class EndpointServer:
    """The server of a run.

    consumes: HTTP requests; waits for: sampled turns; unblocked by: the episodes' sessions, clients that disconnect;
    produces: one response for each request.

    Args:
        listener: a bound socket; None: a free port of the loopback address.
    """

    def __init__(self, listener: socket.socket | None = None) -> None:
        self._listener = listener
        self._sessions: dict[int, Session] = {}
        self._count = 0  # sessions so far
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self.url = ""  #: the address, without a path

    async def start(self) -> None:
        """Start to listen; a second call does nothing."""
        async with self._starting:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
            app.router.add_get(MODELS, self._models)
            for path, form in FORMS.items():
                app.router.add_post(path, self._answering(form))
            # a client that disconnects cancels its turn
            self._runner = web.AppRunner(
                app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS
            )
            await self._runner.setup()
            listener = self._listener or bound()
            site = web.SockSite(self._runner, listener, backlog=BACKLOG)
            await site.start()
            self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def open(self, episode: Episode) -> Session:
        """Open the session of an episode."""
        number, self._count = self._count, self._count + 1
        session = Session(episode, self.url, f"sk-{number}-{secrets.token_urlsafe(32)}")
        self._sessions[number] = session
        return session

    def end(self, session: Session) -> None:
        """Close a session and forget it."""
        session.close()
        del self._sessions[int(session.key.split("-")[1])]

    async def close(self) -> None:
        """Stop listening and close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _session(self, request: web.Request) -> Session:
        """Return the session whose key a request has.

        Raises:
            Refused: there is no such session.
        """
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        number = key.split("-")[1] if key.count("-") > 1 else ""
        found = int(number) if number.isdecimal() and len(number) < 20 else self._count
        if session := self._sessions.get(found):
            if hmac.compare_digest(session.key.encode(), key.encode(errors="surrogateescape")):
                return session
        elif found < self._count:
            raise _over()
        raise Refused(401, "invalid_api_key", "The API key is not that of an episode in progress.")

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "engine"}
        return web.json_response({"object": "list", "data": [model]})

    def _answering(self, form: Form) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            """Answer a request of one protocol."""
            session = self._session(request)
            return await session.respond(_answered(session, request, form))

        return handle


async def _answered(session: Session, request: web.Request, form: Form) -> web.StreamResponse:
    try:
        asked = form.model_validate_json(await request.read())
    except ValidationError as error:
        # of a union the alternative that fits most, a list rather than a text
        problems = error.errors(include_url=False, include_input=False)
        found = max(problems, key=lambda problem: (len(problem["loc"]), problem["type"] != "string_type"))
        where = ".".join(map(str, found["loc"]))
        raise Refused(400, "invalid_request", f"{where or 'body'}: {found['msg']}") from error
    answer = await session.answer(asked.question())
    if not asked.stream:
        return web.json_response(asked.whole(answer))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for event in asked.events(answer):
        await response.write(event.encode())
    await response.write_eof()
    return response


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return errors as JSON, in the form that clients of the protocols read."""
    try:
        return await handler(request)
    except Refused as error:
        status, code, message = error.status, error.code, str(error)
    except web.HTTPException as error:
        status, code, message = error.status, error.reason.lower().replace(" ", "_"), error.text or ""
        if status == 404:
            message = f"{request.path} is not served. The endpoint serves {', '.join((MODELS, *FORMS))}."
    return web.json_response(error_body(status, code, message), status=status)


def bound(port: int = 0) -> socket.socket:
    """Return a socket that is bound to a port of the loopback address; 0: a free one.

    Raises:
        OSError: the port is in use.
    """
    return socket.create_server(("127.0.0.1", port), backlog=0)


def _over() -> Refused:
    # 401, because clients send a request with another error again
    return Refused(
        401, "session_over", "The episode of this API key is over. A key is valid for one episode."
    )
