"""The HTTP server's routes. Picks the handler, turns every failure into an error object.

POST /v1/completions  /v1/chat/completions  /tokenize  /detokenize
GET  /v1/models  /health  /version  /metrics
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
from typing import Any, Protocol

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from blockferry.cluster.api import chat, completions
from blockferry.cluster.api.bodies import BodyReader
from blockferry.cluster.api.client import EngineClient
from blockferry.cluster.api.errors import ApiError
from blockferry.cluster.api.gate import EVERYBODY, Gate, GateRules, gated
from blockferry.cluster.api.generation import ApiState
from blockferry.cluster.api.prompts import check_token_ids, from_messages, tokenize
from blockferry.cluster.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, parse
from blockferry.cluster.api.served_model import ServedModel
from blockferry.cluster.api.streaming import EventStream, result_while_connected
from blockferry.cluster.metrics import EngineSnapshot, ServerMetrics
from blockferry.engine.errors import BlockferryError

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 5.0


def create_app(engine: EngineClient, model: ServedModel, rules: GateRules = EVERYBODY) -> FastAPI:
    """The application of one served model, behind a gate. It starts nothing and owns no process."""
    state = ApiState(engine=engine, model=model, metrics=ServerMetrics(model.name))
    app = FastAPI(title="Blockferry", version=_version(), redoc_url=None)
    bodies = BodyReader()
    app.add_middleware(Gate, **gated(rules))
    _add_error_handlers(app)
    _add_generation(app, state, bodies)
    _add_tokenizer(app, model, bodies)
    _add_information(app, state)
    return app


class _Prepared(Protocol):
    async def respond(self) -> dict[str, Any]: ...
    def events(self) -> Any: ...


def _add_generation(app: FastAPI, state: ApiState, bodies: BodyReader) -> None:
    @app.post("/v1/completions")
    async def create_completion(request: HttpRequest) -> Response:
        """Continue prompts."""
        body = parse(CompletionRequest, await bodies.read(request))
        prepared = await completions.prepare(state, body, header_id=request.headers.get("x-request-id"))
        return EventStream(prepared.events()) if body.stream else await _whole(request, prepared)

    @app.post("/v1/chat/completions")
    async def create_chat_completion(request: HttpRequest) -> Response:
        """Answer a conversation."""
        body = parse(ChatRequest, await bodies.read(request))
        prepared = await chat.prepare(state, body, header_id=request.headers.get("x-request-id"))
        return EventStream(prepared.events()) if body.stream else await _whole(request, prepared)


async def _whole(request: HttpRequest, prepared: _Prepared) -> Response:
    return JSONResponse(await result_while_connected(request, prepared.respond()))


def _add_tokenizer(app: FastAPI, model: ServedModel, bodies: BodyReader) -> None:
    @app.post("/tokenize")
    async def tokenize_text(request: HttpRequest) -> Response:
        """Token ids of a prompt or of rendered messages."""
        body = parse(TokenizeRequest, await bodies.read(request))
        model.check_name(body.model)
        if body.messages is None:
            with_special = body.add_special_tokens is not False
            ids = await tokenize(body.prompt or "", model, add_special_tokens=with_special, param="prompt")
        else:
            prompt = await from_messages(
                body.messages,
                model,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                add_special_tokens=bool(body.add_special_tokens),
                variables=body.chat_template_kwargs,
            )
            ids = prompt.token_ids.tolist()
        strings = [model.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": model.max_model_len,
                "tokens": ids,
                "token_strs": strings if body.return_token_strs else None,
            }
        )

    @app.post("/detokenize")
    async def detokenize_ids(request: HttpRequest) -> Response:
        """Text of token ids."""
        body = parse(DetokenizeRequest, await bodies.read(request))
        model.check_name(body.model)
        check_token_ids(body.tokens, model.vocab_size, "tokens")
        return JSONResponse({"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _add_information(app: FastAPI, state: ApiState) -> None:
    @app.get("/v1/models")
    async def list_models() -> Response:
        """The models served."""
        return JSONResponse({"object": "list", "data": [state.model.card()]})

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        """One model."""
        state.model.check_name(name)
        return JSONResponse(state.model.card())

    @app.get("/health")
    async def health() -> Response:
        """200 while requests can be answered, 503 otherwise."""
        snapshot = await _snapshot(state.engine)
        if snapshot is None or not snapshot.get("is_serving", True):
            reason = "the engine does not answer" if snapshot is None else "too few instances are left"
            raise ApiError(f"{reason}; see `blockferry status`", status=503, code="unhealthy")
        return Response()

    @app.get("/version")
    async def version() -> Response:
        """The server's release."""
        return JSONResponse({"version": _version()})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus exposition."""
        body = state.metrics.render(await _snapshot(state.engine))
        return Response(body, media_type=CONTENT_TYPE_LATEST)


async def _snapshot(engine: EngineClient) -> EngineSnapshot | None:
    try:
        return await asyncio.wait_for(engine.status(), STATUS_TIMEOUT_S)
    except (BlockferryError, OSError, TimeoutError) as error:
        logger.warning("the engine's status is unknown: %r", error)
        return None


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(_request: HttpRequest, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def on_http_error(request: HttpRequest, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return ApiError(message, status=error.status_code).response()

    @app.exception_handler(Exception)
    async def on_failure(_request: HttpRequest, _error: Exception) -> Response:
        return ApiError("the server failed; its log says why", status=500).response()


def _version() -> str:
    return importlib.metadata.version("blockferry")
