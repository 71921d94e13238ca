"""What a session's settings mean under each name of the model, and with each kind of turn detection."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asr_server.api.models import ModelRegistry
from asr_server.config import Settings
from asr_server.errors import InvalidValue
from asr_server.realtime.client_events import SessionUpdate, parse_client_event
from asr_server.realtime.config import SessionConfig, default_config, interim_interval_s, update_config
from asr_server.realtime.server_events import DEFAULT_VAD
from tests.api.running_app import RunningApp, served
from tests.realtime.realtime_client import open_session

MODELS = ModelRegistry([served(Settings())])


def updated(config: SessionConfig, **audio_input: Any) -> SessionConfig:
    message = {"type": "session.update", "session": {"audio": {"input": audio_input}}}
    event = parse_client_event(msgspec.json.encode(message))
    assert isinstance(event, SessionUpdate)
    return update_config(config, event.session, MODELS)


def test_turn_detection_has_openais_values_unless_others_are_given() -> None:
    vad = default_config("whisper-1").vad
    assert vad
    assert (vad.type, vad.threshold, vad.prefix_padding_ms, vad.silence_duration_ms) == (
        "server_vad",
        0.5,
        300,
        500,
    )


@pytest.mark.parametrize("model", ["gpt-live-transcribe", "gpt-realtime-whisper"])
def test_a_live_model_leaves_the_commits_to_its_client_unless_detection_is_asked_for(model: str) -> None:
    config = updated(default_config("whisper-1"), transcription={"model": model})
    assert config.vad is None
    assert updated(config, transcription={"model": "whisper-1"}).vad == DEFAULT_VAD
    assert updated(config, turn_detection={"type": "server_vad"}).vad == DEFAULT_VAD
    asked = updated(default_config("whisper-1"), turn_detection={"threshold": 0.7})
    assert updated(asked, transcription={"model": model}).vad == asked.vad


def test_eagerness_sets_the_silence_of_semantic_vad() -> None:
    silences = {}
    for eagerness in ("low", "medium", "high", "auto", None):
        detection = {"type": "semantic_vad", "eagerness": eagerness, "create_response": False}
        vad = updated(default_config("whisper-1"), turn_detection=detection).vad
        assert vad
        silences[eagerness] = vad.silence_duration_ms
    assert silences == {"low": 1500, "medium": 800, "high": 400, "auto": 800, None: 800}


def test_going_back_to_server_vad_gives_its_silence_back() -> None:
    semantic = updated(default_config("whisper-1"), turn_detection={"type": "semantic_vad"})
    assert updated(semantic, turn_detection={"type": "server_vad"}).vad == DEFAULT_VAD


def test_eagerness_without_semantic_vad_is_refused_by_name() -> None:
    with pytest.raises(InvalidValue, match="requires turn_detection type 'semantic_vad'"):
        updated(default_config("whisper-1"), turn_detection={"type": "server_vad", "eagerness": "low"})
    nothing = updated(default_config("whisper-1"), turn_detection={"type": "server_vad", "eagerness": None})
    assert nothing.vad == DEFAULT_VAD


def test_a_keyword_with_a_mark_is_refused() -> None:
    with pytest.raises(InvalidValue, match="A keyword is one term"):
        updated(default_config("whisper-1"), transcription={"keywords": ["good", "<|bad|>"]})


def test_delay_sets_how_often_a_growing_turn_is_read() -> None:
    intervals = [
        interim_interval_s(updated(default_config("whisper-1"), transcription={"delay": delay}), 1.0)
        for delay in ("minimal", "low", "medium", "high", "xhigh", None)
    ]
    assert intervals == [0.4, 0.7, 1.0, 2.0, 4.0, 1.0]
    assert interim_interval_s(default_config("whisper-1"), 0.0) == 0.0


async def test_the_session_says_which_silence_semantic_vad_waits_for(app: RunningApp) -> None:
    async with open_session(f"http://{app.host}:{app.port}") as client:
        session = (await client.update(turn_detection={"type": "semantic_vad", "eagerness": "high"}))[
            "session"
        ]
        detection = session["audio"]["input"]["turn_detection"]
        assert (detection["type"], detection["eagerness"]) == ("semantic_vad", "high")
        assert detection["silence_duration_ms"] == 400


async def test_a_live_model_named_in_the_address_has_no_detection(app: RunningApp) -> None:
    path = "/v1/realtime?intent=transcription&model=gpt-live-transcribe"
    async with open_session(f"http://{app.host}:{app.port}", path) as client:
        assert (await client.update())["session"]["audio"]["input"]["turn_detection"] is None
