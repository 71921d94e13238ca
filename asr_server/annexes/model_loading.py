"""Load and unload models on request, and unload those that nobody uses."""

import asyncio
import logging
from typing import Final

from fastapi import APIRouter, Depends, Request

from asr_server.api.models import Models
from asr_server.api.openapi import error_responses
from asr_server.api.routes import Name, describe_model
from asr_server.api.schemas import Model
from asr_server.api.state import get_state, models_of, require_admin_key
from asr_server.errors import AdminRequired, EngineUnavailable, InvalidApiKey, ModelNotFound

LOOK_EVERY_S: Final = 1.0  # for idle models
_ERRORS: Final = error_responses(InvalidApiKey, AdminRequired, ModelNotFound, EngineUnavailable)

logger = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/models", dependencies=[Depends(require_admin_key)], tags=["models"])


@router.post("/{name:path}/load", responses=_ERRORS)
async def load_model(name: Name, request: Request) -> Model:
    """Load a model and wait for it."""
    model = models_of(request).choose(name)
    await model.load()
    model.require_engine()
    return describe_model(name, model, get_state(request))


@router.post("/{name:path}/unload", responses=_ERRORS)
async def unload_model(name: Name, request: Request) -> Model:
    """Let a model's requests finish, then give its memory back until the next one."""
    state = get_state(request)
    model = models_of(request).choose(name)
    await model.unload(state.settings.drain_s)
    return describe_model(name, model, state)


async def unload_idle_models(models: Models) -> None:
    """Run until cancelled."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        for model in models:
            try:
                await model.unload_if_idle()
            except Exception:
                logger.exception("model %s could not be unloaded", model.name)
