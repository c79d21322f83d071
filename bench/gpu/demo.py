"""The bundled model end to end: the tokens of the CPU, and the same again after a hit, a restore, and in a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from bench.gpu.report import Comparison, Report, Verdict
from cache import Tier
from engine.catalog import resolve_model
from engine.engine import Engine, EngineOptions, GenerationRequest, SamplingParams, TokenLogprob
from engine.kernels.select import Backend

SECTION = "demo"
MAX_TOKENS = 40
_TOP = 5
_TIE_NATS = 0.2
"""Two tokens whose log probabilities lie closer than this may change places by rounding: bfloat16's error in a logit of
about 10 is a few hundredths for each of the model's layers."""
_MOST_DEPARTURES = 6
"""More ties than this in one answer are no ties."""
_FILLERS = 8
_MOST_TURNS = 4

CHATS: tuple[tuple[str, ...], ...] = (
    (
        "Hi there!",
        "Hi. How are you doing?",
        "I'm Marta, and I live in Porto.",
        "Porto sounds interesting.",
        "What is my name?",
    ),
    ("Tell me a short story about a lighthouse and a fox.",),
    ("What does dalsegno do when its state slots are full?", "It drops what is worth least.", "And then?"),
)
"""Turns of user and assistant, the user's first and last."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer: its tokens with their log probabilities, and where the prompt came from."""

    tokens: tuple[TokenLogprob, ...]
    source: dict[str, int]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.tokens)


@dataclass(frozen=True, slots=True)
class Departure:
    """Where an engine that was led along another's answer picked another token."""

    place: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Answers:
    """Of one engine: each chat cold, again (a hit), from host memory, and all of them at once."""

    departures: tuple[tuple[Departure, ...], ...]
    """From the answers that it was led along, if it was."""
    cold: tuple[Answer, ...]
    hit: tuple[Answer, ...]
    restored: tuple[Answer, ...]
    together: tuple[Answer, ...]


def run_demo(backend: Backend, report: Report, chats: Sequence[Sequence[str]] = CHATS) -> None:
    """Compare an engine on `backend` with itself and with one on the CPU. Raises what the engine raises."""
    reference = asyncio.run(_answers("torch", chats))
    candidate = asyncio.run(_answers(backend, chats, reference.cold))
    for i, chat in enumerate(chats):
        case = f"{chat[-1][:32]!r}"
        report.compared(judge_departures(case, reference.cold[i], candidate.departures[i]))
        report.compared(compare_answers("hit equals cold", case, candidate.cold[i], candidate.hit[i], Tier.DEVICE))
        report.compared(compare_answers("batch equals alone", case, candidate.cold[i], candidate.together[i]))
        if candidate.restored[i].source.get(Tier.HOST, 0):
            report.compared(
                compare_answers("restore equals cold", case, candidate.cold[i], candidate.restored[i], Tier.HOST)
            )
        else:
            report.skipped(SECTION, f"restore equals cold, {case}", "host memory had nothing of it")


async def _answers(backend: Backend, chats: Sequence[Sequence[str]], leads: Sequence[Answer] = ()) -> Answers:
    options = EngineOptions(
        backend=backend,
        max_concurrency=4,
        max_context=640,
        page_size=64,
        kv_pages=16,
        device_state_slots=2,
        host_cache_mib=64,
    )
    engine = await asyncio.to_thread(Engine.load, resolve_model("demo"), options)
    await engine.start()
    try:
        prompts = [_prompt(engine, chat) for chat in chats]
        departures = [
            await _departures(engine, i, prompt, lead)
            for i, (prompt, lead) in enumerate(zip(prompts, leads, strict=False))
        ]
        await engine.reset_cache(list(Tier))
        cold, hit = [], []
        for i, prompt in enumerate(prompts):
            cold.append(await _answer(engine, f"cold-{i}", prompt))
            hit.append(await _answer(engine, f"hit-{i}", prompt))
        restored = [await _restored(engine, i, prompt) for i, prompt in enumerate(prompts)]
        await engine.reset_cache(list(Tier))
        together = await asyncio.gather(*(_answer(engine, f"together-{i}", p) for i, p in enumerate(prompts)))
        return Answers(tuple(departures), tuple(cold), tuple(hit), tuple(restored), tuple(together))
    finally:
        await engine.stop()


async def _restored(engine: Engine, i: int, prompt: Sequence[int]) -> Answer:
    """Ask again once the device has forgotten and host memory has not: others press until the prompt was demoted. What
    is demoted is the cache's choice, so it takes another turn now and then."""
    for turn in range(_MOST_TURNS):
        answer = await _answer(engine, f"before-restore-{i}-{turn}", prompt)
        for number in range(_FILLERS):
            filler = [100 + (37 * number + 11 * i + 5 * turn + 7 * place) % 3000 for place in range(90)]
            await _answer(engine, f"filler-{i}-{turn}-{number}", filler, max_tokens=2)
        await engine.reset_cache([Tier.DEVICE])
        answer = await _answer(engine, f"restore-{i}-{turn}", prompt)
        if answer.source.get(Tier.HOST, 0):
            break
    return answer


async def _departures(engine: Engine, i: int, prompt: Sequence[int], lead: Answer) -> tuple[Departure, ...]:
    """Every place of `lead` at which this engine picks another token; from there it is led on, so that a tie does not
    end the comparison."""
    wanted, done = lead.token_ids, 0
    found: list[Departure] = []
    while done < len(wanted) and len(found) <= _MOST_DEPARTURES:
        answer = await _answer(engine, f"led-{i}-{done}", [*prompt, *wanted[:done]], max_tokens=len(wanted) - done)
        pairs = enumerate(zip(wanted[done:], answer.token_ids, strict=True))
        place = next((place for place, (a, b) in pairs if a != b), None)
        if place is None:
            break
        found.append(Departure(done + place, answer.token_ids[place]))
        done += place + 1
    return tuple(found)


async def _answer(engine: Engine, name: str, prompt: Sequence[int], max_tokens: int = MAX_TOKENS) -> Answer:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=_TOP)
    tokens: list[TokenLogprob] = []
    source: dict[str, int] = {}
    async for delta in engine.submit(GenerationRequest(name, tuple(prompt), sampling)):
        tokens += delta.logprobs
        if delta.reuse is not None:
            source = dict(delta.reuse.source)
    return Answer(tuple(tokens), source)


def _prompt(engine: Engine, chat: Sequence[str]) -> list[int]:
    assert engine.chat_template is not None, "the bundled model has one"
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(chat)]
    return engine.tokenizer.encode(engine.chat_template.render(messages))


def judge_departures(case: str, lead: Answer, departures: Sequence[Departure]) -> Comparison:
    """Every token of `lead`, but for those that were as good as tied with the one that was picked instead."""
    what, case = "same tokens as the CPU", f"{case}, {len(lead.tokens)} tokens"
    if not departures:
        verdict = Verdict.RIGHT if lead.tokens else Verdict.WRONG
        return Comparison(SECTION, what, case, None, None, verdict)
    gap = max(_gap(lead, departure) for departure in departures)
    is_right = gap <= _TIE_NATS and len(departures) <= _MOST_DEPARTURES
    places = ", ".join(str(departure.place) for departure in departures)
    detail = f"another token at {places}, at most {gap:.3f} apart"
    verdict = Verdict.RIGHT if is_right else Verdict.WRONG
    return Comparison(SECTION, what, f"{case}: {detail}", gap, _TIE_NATS, verdict, "" if is_right else detail)


def _gap(lead: Answer, departure: Departure) -> float:
    """How much likelier the lead's own token was, by its own log probabilities."""
    own = lead.tokens[departure.place]
    other = dict(own.top).get(departure.token_id)
    return float("inf") if other is None else own.logprob - other


def compare_answers(what: str, case: str, expected: Answer, found: Answer, tier: Tier | None = None) -> Comparison:
    """Equal tokens, or tokens that part where the expected answer's own two best were as good as tied."""
    if tier is not None and not found.source.get(tier, 0):
        detail = f"nothing was reused from the {tier}: {found.source}"
        return Comparison(SECTION, what, case, None, None, Verdict.WRONG, detail)
    if expected.token_ids == found.token_ids and expected.tokens:
        return Comparison(SECTION, what, f"{case}, {len(expected.tokens)} tokens", None, None, Verdict.RIGHT)
    pairs = zip(expected.token_ids, found.token_ids, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        detail = f"{len(found.tokens)} tokens for {len(expected.tokens)}"
        return Comparison(SECTION, what, case, None, None, Verdict.WRONG, detail)
    gap = _gap(expected, Departure(place, found.token_ids[place]))
    detail = f"parts at token {place} of {len(expected.tokens)}, where the two lie {gap:.3f} apart"
    verdict = Verdict.RIGHT if gap <= _TIE_NATS else Verdict.WRONG
    return Comparison(SECTION, what, f"{case}: {detail}", gap, _TIE_NATS, verdict, detail)
