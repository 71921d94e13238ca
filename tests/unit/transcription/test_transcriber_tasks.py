"""Tasks that belong together end together, and the first error is raised by itself."""

import asyncio

import pytest

from asr_server.transcription.transcriber import first_error, task_group


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("task")


async def fail(error: BaseException) -> None:
    raise error


async def test_an_error_of_a_task_ends_the_others_and_the_block_and_is_raised_by_itself() -> None:
    ended: list[str] = []

    async def block() -> None:
        async with task_group() as group:
            group.create_task(forever(ended))
            group.create_task(fail(LookupError("first")))
            await forever(ended)

    with pytest.raises(LookupError, match="first"):
        await block()
    assert ended == ["task", "task"]


async def test_an_error_of_the_block_ends_the_tasks_and_is_raised_by_itself() -> None:
    ended: list[str] = []

    async def block() -> None:
        async with task_group() as group:
            group.create_task(forever(ended))
            await asyncio.sleep(0)  # it begins
            raise LookupError("block")

    with pytest.raises(LookupError, match="block"):
        await block()
    assert ended == ["task"]


def test_the_first_error_is_found_in_groups_of_groups() -> None:
    first, second = LookupError("first"), ValueError("second")
    inner = BaseExceptionGroup("inner", [first, second])
    assert first_error(BaseExceptionGroup("outer", [inner, second])) is first
