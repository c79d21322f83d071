"""What a request asks of the engine, and what the engine tells it back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from cache import Frontier, ReuseReport


class FinishReason(StrEnum):
    """Why a generation ended, as OpenAI names it; `cancelled` and `error` never reach a client as a finish_reason."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Thinking(Enum):
    """How an answer may begin: its thinking is told apart, and stop strings are looked for behind it."""

    IS_TEXT = auto()
    """It is not told apart."""
    MAY_COME = auto()
    """In a block that the answer itself may open at its beginning."""
    IS_OPEN = auto()
    """The prompt has opened the block."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are picked and when to stop. The defaults are OpenAI's; values are checked by the HTTP schema."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 4096
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's own end tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; not empty, not part of it, and not looked for in the thinking."""
    includes_stop: bool = False
    """Leave the stop string that was found in the answer."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens."""
    min_tokens: int = 0
    """Neither end tokens nor stop strings end the answer before it has so many."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token and what is added to its logit; each token once."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside each picked one's log probability; None reports nothing."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt, as tokens. `request_id` is unique among the requests that are alive."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    namespace: str = ""
    """Only requests of the same namespace share what is remembered of their prompts."""
    frontiers: tuple[Frontier, ...] = ()
    """Where this prompt is likely to be resumed. Without a turn closure among them, its last token but one is it."""
    thinking: Thinking = Thinking.IS_TEXT
    client: str = ""
    """Who sent it, as an opaque name: clients take turns. Empty where nobody tells, and then no share applies."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one request's life, on the monotonic clock; a phase that was not reached is absent.

    All but `ttft` and `total` are apart from one another (`engine.phases`), and add up to `total`.
    """

    queue_seconds: float | None = None
    """Until it was let in; absent where it never was."""
    restore_seconds: float | None = None
    """Copying what was reused."""
    prefill_seconds: float | None = None
    """Its own part of the steps that computed its prompt."""
    ttft_seconds: float | None = None
    """From the submission to the first token."""
    decode_seconds: float | None = None
    """Steps that gave a token after the first one."""
    total_seconds: float | None = None
    stalled_seconds: float | None = None
    """Let in, but others' prompts were computed; of the steps that it shares with them, their part."""
    preempted_seconds: float | None = None
    """Set aside for others, until it was where it had been."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    """Those of the completion that were thinking; counted where it is told apart."""
    preemptions: int = 0
    """How often it was set aside while it ran, because others needed its room."""
    recomputed_tokens: int = 0
    """Computed a second time because of that."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The model's own log probability of a picked token, before penalties, biases and temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and theirs, likeliest first."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: the tokens since the last piece and their text (whole characters only).

    The last piece of a stream has a `finish_reason`, `usage`, `timings` and `reuse`; its text may be empty.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    reuse: ReuseReport | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """Where asked for: of the tokens that begin in `reasoning` and `text`, so not of those of a stop string."""
    reasoning: str = ""
    """What was thought before `text`."""
