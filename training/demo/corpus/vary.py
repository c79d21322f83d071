"""Other words for the same request: frames, synonyms, lead-ins and tails, drawn on top of what the patterns give."""

from __future__ import annotations

import random
import re

FRAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        r"how (?:do i|can i|to|do you|does one) (.+)",
        (
            "how would i {0}",
            "what must i do to {0}",
            "what do i need to do to {0}",
            "is there a way to {0}",
            "how am i supposed to {0}",
            "what is the way to {0}",
            "i want to {0}, how",
            "i would like to {0}",
            "i need to {0}",
            "how could one {0}",
            "which steps {0}",
            "show me how to {0}",
            "i have no idea how to {0}",
            "how should i {0}",
            "what is needed to {0}",
            "i try to {0}, but how",
        ),
    ),
    (
        r"what does (.+) do",
        (
            "what is {0} there for",
            "what is the purpose of {0}",
            "what does {0} do exactly",
            "what is {0} good for",
            "why is there {0}",
            "what is the job of {0}",
            "what is the effect of {0}",
            "which role has {0}",
            "what happens with {0}",
            "what would {0} do",
        ),
    ),
    (
        r"what (?:is|are) (.+)",
        (
            "what's {0}",
            "what exactly is {0}",
            "what would {0} be",
            "what do people mean by {0}",
            "i keep hearing about {0}",
            "what about {0}",
            "{0}, what is that",
            "what should i know about {0}",
            "give me a short description of {0}",
            "describe {0} briefly",
            "{0}",
            "i read about {0}, what is it",
            "what do you know of {0}",
            "what is meant by {0}",
            "say something about {0}",
            "how would you put {0}",
            "could you say what {0} is",
            "do you happen to know {0}",
            "a few words about {0}",
            "help me with {0}",
            "so {0} is what",
        ),
    ),
    (
        r"do you (?:like|love|enjoy) (.+)",
        (
            "are you keen on {0}",
            "would you say you like {0}",
            "how do you feel about {0}",
            "are you into {0}",
            "is {0} something you like",
            "{0}, do you like that",
            "does {0} please you",
            "have you a liking for {0}",
            "what are your feelings about {0}",
        ),
    ),
    (
        r"can (?:i|we|one) (.+)",
        (
            "is it possible to {0}",
            "am i able to {0}",
            "may i {0}",
            "would it be possible to {0}",
            "is there a way to {0}",
            "could i {0}",
        ),
    ),
    (
        r"(?:can|could) you (.+)",
        (
            "are you able to {0}",
            "would you be able to {0}",
            "is it possible for you to {0}",
            "would you mind to {0}",
            "i ask you to {0}",
            "it would be nice if you could {0}",
            "{0}",
        ),
    ),
    (
        r"(?:tell me|give me) (.+)",
        (
            "let me know {0}",
            "i'd like to hear {0}",
            "i would love to have {0}",
            "how about {0}",
            "let's hear {0}",
            "i could use {0}",
            "what about {0}",
            "please, {0}",
            "time for {0}",
            "i am in the mood for {0}",
        ),
    ),
    (
        r"i am (.+)",
        (
            "i'm {0}",
            "i am really {0}",
            "lately i am {0}",
            "to be honest, i am {0}",
            "today i'm {0}",
            "i seem to be {0}",
            "you know, i am {0}",
        ),
    ),
    (
        r"i (?:like|love) (.+)",
        (
            "i am fond of {0}",
            "i enjoy {0} a lot",
            "{0} make me happy",
            "i have always liked {0}",
            "i can't get enough of {0}",
        ),
    ),
    (
        r"why (.+)",
        ("for what reason {0}", "how come {0}", "i wonder why {0}", "why exactly {0}", "what is the reason: why {0}"),
    ),
    (r"where (.+)", ("in which place {0}", "where exactly {0}", "i wonder where {0}", "at which place {0}")),
    (r"which (.+)", ("what {0}", "which of all {0}", "i wonder which {0}")),
    (
        r"how many (.+)",
        ("what number of {0}", "how many in total {0}", "do you know how many {0}", "up to how many {0}"),
    ),
    (r"how big is (.+)", ("how large is {0}", "what is the size of {0}", "how much space needs {0}", "is {0} big")),
    (
        r"is (?:it|dalsegno|the daemon) (.+)",
        ("would you say it is {0}", "is this {0}", "is the whole thing {0}", "is the server {0}"),
    ),
)
_COMPILED = tuple((re.compile(pattern), frames) for pattern, frames in FRAMES)

_SETS = (
    "start launch boot run",
    "stop end quit halt finish",
    "show display give",
    "big large huge",
    "small little tiny",
    "quick fast rapid",
    "use employ try",
    "need require want",
    "find locate discover",
    "get obtain receive fetch",
    "change alter modify switch adjust",
    "set choose pick specify",
    "check test verify inspect",
    "explain describe clarify",
    "help assist support",
    "make create build produce",
    "server daemon service",
    "answer reply response",
    "question query",
    "request call message",
    "memory ram",
    "keep hold store save",
    "evicted removed dropped discarded",
    "full occupied exhausted",
    "error failure problem",
    "slow sluggish",
    "model network",
    "weights parameters",
    "computer machine laptop",
    "chat talk conversation",
    "talk speak chat",
    "happy glad cheerful delighted",
    "sad unhappy gloomy miserable",
    "tired exhausted weary",
    "afraid scared frightened",
    "angry furious cross",
    "nice lovely pleasant",
    "good great fine",
    "bad awful terrible",
    "like enjoy appreciate",
    "eat have consume",
    "meal dish dinner",
    "film movie",
    "holiday vacation",
    "work job",
    "friend pal buddy",
    "child kid",
    "present gift",
    "house home",
    "road street",
    "tale story",
    "joke pun",
    "funny amusing silly",
    "name mention",
    "list enumerate",
    "say tell mention",
    "repeat echo",
    "learn study practise",
    "sleep rest",
    "begin start",
    "buy purchase",
    "broken damaged",
    "lost missing",
    "beautiful pretty",
    "old ancient",
    "new fresh",
    "rain drizzle",
    "cold chilly",
    "warm mild",
    "colour color hue",
    "animal creature beast",
    "sound noise",
    "opposite contrary reverse",
    "purpose point aim",
    "part piece component",
    "limit cap restrict",
    "watch monitor observe",
    "notice see recognise",
    "possible feasible",
    "settings options configuration",
    "kind sort type",
    "maximum most highest",
    "difference distinction",
    "reused recycled",
    "works functions",
    "fails breaks",
    "often frequently",
    "also too",
)
SYNONYMS: dict[str, tuple[str, ...]] = {}
for _line in _SETS:
    _words = _line.split()
    for _word in _words:
        SYNONYMS[_word] = (*SYNONYMS.get(_word, ()), *(other for other in _words if other != _word))

LEADS = (
    "i have a question. ",
    "i am new to this. ",
    "something else: ",
    "by the way, ",
    "just curious: ",
    "sorry to bother you. ",
    "excuse me, ",
    "let me ask you something. ",
    "i was wondering: ",
    "hello! ",
    "good morning. ",
    "one more thing. ",
    "hi there. ",
    "oh, and ",
    "well then, ",
    "listen, ",
    "another thing: ",
    "my colleague wants to know: ",
    "my sister asks: ",
    "please be honest: ",
    "be so kind: ",
    "right, ",
    "okay, next: ",
)
TAILS = (
    ", if you don't mind",
    " in your opinion",
    ", do you know",
    " exactly",
    " briefly",
    " in a few words",
    " in simple words",
    ", by any chance",
    ", i wonder",
    " for me",
    " right now",
    ", would you",
    " these days",
    " at all",
    " actually",
    ", please",
    " in this case",
    " here",
    " as well",
    " in practice",
    ", in short",
)
_SMALL_WORDS = frozenset(("the", "a", "an", "please", "do", "is", "are", "of", "to", "just", "it"))


def vary(rng: random.Random, text: str) -> str:
    """A bare lower-case request in other words. Names, numbers and flags stay."""
    if rng.random() < 0.45:
        for pattern, frames in _COMPILED:
            match = pattern.fullmatch(text)
            if match:
                text = rng.choice(frames).format(*match.groups())
                break
    words = text.split(" ")
    if len(words) > 2:
        kept = []
        for word in words:
            roll = rng.random()
            if word in SYNONYMS and roll < 0.35:
                kept.append(rng.choice(SYNONYMS[word]))
            elif not (word in _SMALL_WORDS and roll < 0.05):
                kept.append(word)
        text = " ".join(kept)
    if rng.random() < 0.14:
        text += rng.choice(TAILS)
    if rng.random() < 0.16:
        text = rng.choice(LEADS) + text
    return text
