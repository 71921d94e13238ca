"""What a session's settings mean under each name of the model, and with each kind of turn detection."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from asr_server.annexes.keys.api_keys import ApiKeys
from asr_server.annexes.realtime.client_events import AlawFormat, PcmFormat, SessionUpdate, parse_client_event
from asr_server.annexes.realtime.config import (
    SessionConfig,
    decoding_options,
    default_config,
    interim_interval_s,
    make_secret,
    open_secret,
    update_config,
)
from asr_server.annexes.realtime.server_events import DEFAULT_VAD, SessionTranscription
from asr_server.api.models import Models
from asr_server.core import TEMPERATURE_LADDER
from asr_server.errors import InvalidApiKey, InvalidValue, ModelNotFound
from asr_server.server.settings import ServerSettings
from tests.unit.api.running_app import RunningApp, served
from tests.unit.realtime.realtime_client import open_session

MODELS = Models([served(ServerSettings())])


def updated(config: SessionConfig, **audio_input: Any) -> SessionConfig:
    message = {"type": "session.update", "session": {"audio": {"input": audio_input}}}
    event = parse_client_event(msgspec.json.encode(message))
    assert isinstance(event, SessionUpdate)
    return update_config(config, event.session, MODELS)


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


async def test_a_live_model_named_in_the_address_has_no_detection(app: RunningApp) -> None:
    path = "/v1/realtime?intent=transcription&model=gpt-live-transcribe"
    async with open_session(app.url, path) as client:
        assert (await client.update())["session"]["audio"]["input"]["turn_detection"] is None


# -- Updates --


def test_what_is_not_given_stays_and_null_restores_the_default() -> None:
    config = updated(
        default_config("whisper-1"),
        format={"type": "audio/pcma"},
        transcription={
            "language": "de",
            "prompt": "p",
            "keywords": ["k"],
            "delay": "low",
            "model": "whisper-1",
        },
        turn_detection={"threshold": 0.7, "silence_duration_ms": 600},
    )
    assert updated(config) == config
    assert isinstance(config.format, AlawFormat)
    assert isinstance(updated(config, format=None).format, PcmFormat)
    of_language = updated(config, transcription={"language": "en"}).transcription
    assert (of_language.language, of_language.prompt, of_language.keywords) == ("en", "p", ("k",))
    assert updated(
        config, transcription={"keywords": None, "languages": ["de", "en"]}
    ).transcription == replace(config.transcription, keywords=(), languages=("de", "en"))
    name = MODELS.default.name
    assert updated(config, transcription=None).transcription == SessionTranscription(name)
    assert updated(config, transcription={"model": None}).transcription.model == name
    vad = updated(config, turn_detection={"threshold": None, "prefix_padding_ms": 0}).vad
    assert vad == replace(DEFAULT_VAD, silence_duration_ms=600, prefix_padding_ms=0)
    assert updated(config, turn_detection=None).vad is None


def test_a_model_that_is_not_served_is_refused_wherever_it_is_named() -> None:
    with pytest.raises(ModelNotFound):
        updated(default_config("whisper-1"), transcription={"model": "nobody"})


# -- What they mean --


def test_options_of_a_session_reach_the_decoder() -> None:
    config = updated(
        default_config("whisper-1"),
        transcription={"language": "English", "prompt": "one", "keywords": ["two"]},
    )
    options = decoding_options(config, MODELS)
    model = MODELS.default
    assert (options.language, options.candidate_languages, options.keywords) == ("en", (), ("two",))
    assert options.prompt_tokens == tuple(model.transcriber.tokenizer.encode(" one"))
    assert options.temperatures == TEMPERATURE_LADDER
    assert not options.word_timestamps
    assert not config.is_diarized
    candidates = updated(default_config("whisper-1"), transcription={"languages": ["de", "en"]})
    assert decoding_options(candidates, MODELS).candidate_languages == ("de", "en")
    for name, value in (("language", "klingon"), ("languages", ["klingon"])):
        wrong = updated(default_config("whisper-1"), transcription={name: value})
        with pytest.raises(InvalidValue) as caught:
            decoding_options(wrong, MODELS)
        assert caught.value.param == f"session.audio.input.transcription.{name}"


def test_a_diarized_session_needs_the_times_of_words() -> None:
    models = Models([served(ServerSettings(model_alias="*"))])
    config = default_config("gpt-4o-transcribe-diarize")
    options = decoding_options(config, models)
    assert (config.is_diarized, options.word_timestamps) == (True, True)


# -- Client secrets --


def test_a_secret_opens_its_settings_until_its_last_second(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ApiKeys(ServerSettings(api_key="a-key-of-more-than-20-letters"))
    caller = keys.check("Bearer a-key-of-more-than-20-letters")
    config = updated(default_config("whisper-1"), turn_detection=None, transcription={"prompt": "ü" * 50})
    secret = make_secret(keys, caller, config, 2000)
    assert secret.startswith("ek_")
    assert "=" not in secret
    assert secret != make_secret(keys, caller, config, 2000)
    for now, is_open in ((1999.0, True), (2000.0, True), (2000.1, False)):
        monkeypatch.setattr("asr_server.annexes.realtime.config.time.time", lambda now=now: now)
        if is_open:
            assert open_secret(keys, secret) == (caller, config)
        else:
            with pytest.raises(InvalidApiKey, match="has expired"):
                open_secret(keys, secret)


@pytest.mark.parametrize("at", [5, 40, 60, -3])
def test_a_secret_that_was_changed_or_is_none_is_refused(at: int) -> None:
    keys = ApiKeys(ServerSettings(api_key="a-key-of-more-than-20-letters"))
    caller = keys.check("Bearer a-key-of-more-than-20-letters")
    secret = make_secret(keys, caller, default_config("whisper-1"), 2**40)
    changed = secret[:at] + ("A" if secret[at] != "A" else "B") + secret[at:][1:]
    other = ApiKeys(ServerSettings(api_key="another-key-of-as-many-letters"))
    for given, of in ((changed, keys), (secret, other), ("ek_", keys), ("ek_ü", keys), ("ek_AAAAA", keys)):
        with pytest.raises(InvalidApiKey, match="Incorrect client secret"):
            open_secret(of, given)
