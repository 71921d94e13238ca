from prometheus_client.parser import text_string_to_metric_families

from asr_server.audio import Recording
from tests.api.running_app import THREE_CHUNKS, RunningApp


async def read(app: RunningApp) -> dict[str, float]:
    reply = await app.client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


async def test_what_was_decoded_is_counted_once_it_is_done(app: RunningApp) -> None:
    before = await read(app)
    await app.post(THREE_CHUNKS)
    after = await read(app)
    assert after["asr_audio_decoded_seconds_total"] - before["asr_audio_decoded_seconds_total"] == 75
    assert after["asr_chunk_bytes_total"] == 75 * 16_000 * 4
    assert after["asr_preprocess_slices_total"] >= 2  # the first chunk leaves alone
    assert after["asr_preprocess_seconds_total"] > 0
    assert after["asr_preprocess_workers"] == app.pool.num_workers


async def test_an_idle_server_holds_nothing(app: RunningApp) -> None:
    await app.post()
    figures = await read(app)
    names = ("requests_in_flight", "chunks", "preprocess_queue_depth", "preprocess_busy")
    assert [figures[f"asr_{name}"] for name in names] == [0, 0, 0, 0]


async def test_samples_that_wait_for_the_rest_of_their_chunk_are_counted(app: RunningApp) -> None:
    with Recording(THREE_CHUNKS) as recording:
        await app.pool.decode_slice(recording)
        assert (await read(app))["asr_preprocess_held_bytes"] == recording.held_bytes > 0
    assert (await read(app))["asr_preprocess_held_bytes"] == 0


async def test_each_replica_has_its_own_line(app: RunningApp) -> None:
    text = (await app.client.get("/metrics")).text
    assert 'asr_replica_ready{replica="replica"} 1.0' in text
