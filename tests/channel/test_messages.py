import asyncio

from asr_server.channel.messages import Cancel, Credit, InlineEngineClient, InlineEngineServer


async def test_inline_ends_pass_objects_between_thread_and_loop() -> None:
    client = InlineEngineClient()
    server = InlineEngineServer(client)
    client.send(Cancel("a"))
    client.send(Cancel("b"))
    assert server.receive(wait_s=1.0) == [Cancel("a"), Cancel("b")]
    await asyncio.to_thread(server.send, Credit(2))
    assert await client.receive() == Credit(2)
