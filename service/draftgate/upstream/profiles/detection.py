"""Which profile a model server's repository has, told by the tensors of its models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.text import Tokenizer
from draftgate.upstream.profiles import draftgate, inflight_batcher, llmapi
from draftgate.upstream.profiles.base import Profile
from draftgate.upstream.profiles.draftgate import DraftgateProfile
from draftgate.upstream.profiles.inflight_batcher import InflightBatcherProfile
from draftgate.upstream.profiles.llmapi import LlmApiProfile
from draftgate.upstream.profiles.model_view import ModelView
from draftgate.upstream.profiles.templated import TemplatedProfile
from draftgate.upstream.profiles.tokenised import TokenisedProfile

__all__ = ["detect"]

FindModel = Callable[[str], Awaitable[ModelView | None]]
ListModels = Callable[[], Awaitable[Sequence[str]]]

_ENTRIES = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm")
"""Where generations may enter, best first: the names that the shipped repositories have."""

_MOST_NAMES = 20
"""Of models that a message tells."""


async def detect(
    find: FindModel,
    entry: str | None,
    tokenizer: Tokenizer | None = None,
    *,
    names: ListModels | None = None,
) -> Profile:
    """The profile of the models that `find` looks up by name; it finds None where there is none.

    entry: the model to enter at; None takes the first of the usual ones that is there. tokenizer:
    for models that take and give ids, so that callers may give and get text, and for those that
    take text alone, so that they may give messages. names: all models that are there, to be told
    where none of those is.
    Raises DraftgateError(FAILED_PRECONDITION) if no model is there or none is of a known kind.
    """
    wanted = (entry,) if entry else _ENTRIES
    strange = []
    for name in wanted:
        model = await find(name)
        if model is None:
            continue
        profile = await _profile(model, find)
        if profile is not None:
            return profile if tokenizer is None else _completed(profile, model, tokenizer)
        strange.append(name)
    if strange:
        problem = f"its model {strange[0]} is of no kind that the gateway knows"
    else:
        problem = f"it has no model {' or '.join(wanted)}{' (entry)' if entry else ''}"
        problem += await _present(names)
    raise DraftgateError(
        ErrorCode.FAILED_PRECONDITION, f"the model server cannot be used: {problem}"
    )


async def _present(names: ListModels | None) -> str:
    """Which models there are; nothing where that is not told."""
    try:
        found = sorted(await names()) if names else []
    except DraftgateError:
        return ""
    if not found:
        return ""
    more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
    return f", but {', '.join(found[:_MOST_NAMES])}{more}"


async def _profile(model: ModelView, find: FindModel) -> Profile | None:
    if draftgate.is_ensemble(model):
        return DraftgateProfile()
    if draftgate.is_engine(model):
        return DraftgateProfile(at_engine=True)
    if llmapi.is_llmapi(model):
        return LlmApiProfile(model)
    if inflight_batcher.is_engine(model):
        return InflightBatcherProfile(model, model)
    if inflight_batcher.is_text_entry(model):
        return InflightBatcherProfile(model, await _engine_behind(model, find))
    return None


def _completed(profile: Profile, model: ModelView, tokenizer: Tokenizer) -> Profile:
    """The profile with what the tokenizer does for it."""
    if draftgate.is_engine(model) or inflight_batcher.is_engine(model):
        return TokenisedProfile(profile, tokenizer)
    if draftgate.is_ensemble(model):
        return profile
    return TemplatedProfile(profile, tokenizer)


async def _engine_behind(model: ModelView, find: FindModel) -> ModelView | None:
    named = model.parameter("tensorrt_llm_model_name") or "tensorrt_llm"
    for name in model.steps or (named,):
        found = await find(name)
        if found is not None and inflight_batcher.is_engine(found):
            return found
    return None
