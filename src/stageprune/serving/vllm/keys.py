"""What tells one cached block of keys and values from another, beside its tokens: the stage that each was in."""

from __future__ import annotations

from stageprune.serving.vllm.settings import EngineSettings

KEY = "stageprune"


def block_key(settings: EngineSettings, prompt_length: int, end: int) -> tuple[str, str]:
    """The key of one block of a request.

    Keys and values of skipped layers depend on the stage of their token. In a request, tokens before the last one of
    the prompt are context and the rest is decode; so tokens and the position of the first decode token say everything,
    and a block without such a token needs no more than its tokens. Engines chain the keys of blocks, thus this key
    also says how the tokens before the block were processed.

    Args:
        settings: of the engine; their fingerprint keeps caches apart that several engines share.
        prompt_length: of the request.
        end: the position behind the block's last token.
    """
    first_decode = prompt_length - 1
    if settings.prefix_cache == "shared" or end <= first_decode:
        return KEY, settings.fingerprint
    role = ":prefill" if settings.role == "prefill" else ""  # which has no full model for the last prompt token
    return KEY, f"{settings.fingerprint}:{first_decode}{role}"
