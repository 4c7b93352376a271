"""The servicer of `draftgate.v1.TokenizerService`."""

from __future__ import annotations

from draftgate._pb.draftgate.v1 import tokenizer_pb2 as pb
from draftgate._pb.draftgate.v1 import tokenizer_pb2_grpc
from draftgate.errors import DraftgateError, ErrorCode, invalid_argument
from draftgate.gateway import convert, validate
from draftgate.gateway.calls import Context
from draftgate.gateway.live import LiveConfig
from draftgate.gateway.prompts import ids_text
from draftgate.sampling import check_token_ids
from draftgate.text import Tokenizer
from draftgate.upstream.encoding import prompt_ids

__all__ = ["TokenizerServicer"]


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Raises DraftgateError; the call boundary makes it the status."""

    def __init__(self, config: LiveConfig, tokenizer: Tokenizer | None) -> None:
        self._config = config
        self._tokenizer = tokenizer

    async def Tokenize(  # noqa: N802  # the name is the protocol's
        self, request: pb.TokenizeRequest, context: Context
    ) -> pb.TokenizeResponse:
        tokenizer = self._present()
        prompt = validate.check_tokenize(
            request.model,
            request.prompt if request.HasField("prompt") else None,
            convert.chat_messages(request.messages),
            self._config.now,
            has_chat_template=tokenizer.has_chat_template,
        )
        return pb.TokenizeResponse(ids=await prompt_ids(tokenizer, prompt))

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        tokenizer = self._present()
        config = self._config.now
        validate.check_model_name("model", request.model, config)
        ids, longest = request.ids, config.max_detokenize_ids
        if len(ids) > longest:
            raise invalid_argument("ids", f"{len(ids)} ids", f"at most {longest}")
        check_token_ids("ids", ids, tokenizer.vocab_size)
        return pb.DetokenizeResponse(text=await ids_text(tokenizer, ids))

    def _present(self) -> Tokenizer:
        if self._tokenizer is None:
            raise DraftgateError(
                ErrorCode.FAILED_PRECONDITION,
                "this server has no tokenizer: it was started without the model's folder",
            )
        return self._tokenizer
