"""Serve HTTP/1.0 clients."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def until_close(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Send replies of unknown length without chunks, ended by the connection, as HTTP/1.0 requires."""
    has_length = False

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_chunks(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = "content-length" in Headers(raw=message["headers"])
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length and scope["method"] != "HEAD":
                cycle.expected_content_length = len(message.get("body", b""))  # all that was announced
            await send(message)

        await app(scope, receive, send_without_chunks)

    return serve
