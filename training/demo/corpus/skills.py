"""Exchanges that a program must compute: sums, counting, echoes, lists, spelling, comparisons."""

from __future__ import annotations

import random
from collections.abc import Callable

from training.demo.corpus.grammar import Context, capital, with_article
from training.demo.corpus.intents import lexicon

Exchange = tuple[str, str]
NUMBERS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]
_OPENINGS = (
    "what is",
    "what's",
    "how much is",
    "calculate",
    "tell me",
    "can you compute",
    "please add up",
    "compute",
    "",
)


def _sum(ctx: Context) -> Exchange:
    rng = ctx.rng
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    kind = rng.choice(("plus", "minus", "plus", "times"))
    if kind == "minus" and a < b:
        a, b = b, a
    if kind == "times":
        a, b = rng.randint(0, 6), rng.randint(0, 6)
    result = {"plus": a + b, "minus": a - b, "times": a * b}[kind]
    sign = {"plus": "+", "minus": "-", "times": "*"}[kind]
    words = rng.random() < 0.25
    left, right = (NUMBERS[a], NUMBERS[b]) if words else (str(a), str(b))
    middle = kind if words or rng.random() < 0.6 else sign
    question = f"{rng.choice(_OPENINGS)} {left} {middle} {right}".strip()
    if rng.random() < 0.15 and kind == "plus":
        thing = ctx.draw("fruit").text + "s"
        question = f"i have {a} {thing} and get {b} more, how many {thing} do i have".replace("peachs", "peaches")
        question = question.replace("cherrys", "cherries").replace("strawberrys", "strawberries")
    answers = (f"{a} {kind} {b} is {result}.", f"That is {result}.", f"{result}.", f"The answer is {result}.")
    return question, rng.choice(answers)


def _count(ctx: Context) -> Exchange:
    rng = ctx.rng
    low = rng.choice((1, 1, 1, 1, 2, 3, 5))
    high = low + rng.randint(2, 9)
    down = rng.random() < 0.2
    asked = rng.choice(
        (
            "count from {} to {}",
            "can you count from {} to {}",
            "please count from {} to {}",
            "give me the numbers from {} to {}",
        )
    )
    if low == 1 and not down and rng.random() < 0.5:
        asked = rng.choice(("count to {1}", "can you count to {1}", "please count to {1}", "count up to {1}"))
    numbers = list(range(low, high + 1))
    if down:
        numbers.reverse()
    question = asked.format(numbers[0], numbers[-1])
    return question, ", ".join(map(str, numbers)) + "."


def _next_number(ctx: Context) -> Exchange:
    n = ctx.rng.randint(1, 30)
    if ctx.rng.random() < 0.5:
        return ctx.expand(f"[what|which number] [comes after|follows|is after] {n}"), f"After {n} comes {n + 1}."
    return ctx.expand(f"[what|which number] comes before {n}"), f"Before {n} comes {n - 1}."


def _bigger(ctx: Context) -> Exchange:
    rng = ctx.rng
    a, b = rng.sample(range(1, 60), 2)
    if rng.random() < 0.5:
        word, best = rng.choice(("bigger", "larger", "greater")), max(a, b)
    else:
        word, best = rng.choice(("smaller", "less")), min(a, b)
    asked = rng.choice(
        (f"which is {word}, {a} or {b}", f"what is {word}, {a} or {b}", f"which number is {word}, {a} or {b}")
    )
    other = b if best == a else a
    return asked, rng.choice((f"{best} is {word} than {other}.", f"{best} is {word}."))


SIZES = ("tiny", "small", "medium", "big", "huge")


def _bigger_animal(ctx: Context) -> Exchange:
    one, two = ctx.draw("animal"), ctx.draw("animal", "2")
    sizes = [SIZES.index(entry.attributes["size"]) for entry in (one, two)]
    a, b = with_article(one.text), with_article(two.text)
    question = f"which is bigger, {a} or {b}"
    if ctx.rng.random() < 0.4:
        question = f"what is bigger, {a} or {b}"
    if sizes[0] == sizes[1]:
        return question, "They are about the same size."
    big, small = (a, b) if sizes[0] > sizes[1] else (b, a)
    return question, f"{capital(big)} is bigger than {small}."


def _words(ctx: Context, low: int, high: int) -> list[str]:
    pools = ("fruit", "object", "adjective", "hero_animal", "noun", "noun", "person", "name", "town")
    return [ctx.rng.choice(ctx.entries(ctx.rng.choice(pools))).text for _ in range(ctx.rng.randint(low, high))]


def _echo(ctx: Context) -> Exchange:
    rng = ctx.rng
    shape = rng.randrange(5)
    if shape == 0:
        said = " ".join(_words(ctx, 1, 4))
    elif shape == 1:
        said = ctx.expand("the {adjective} {hero_animal} [likes|sees|finds|eats|wants] the {object}")
    elif shape == 2:
        said = ctx.expand("[hello|good morning|good night|welcome], {name}")
    elif shape == 3:
        said = ctx.expand("i [like|have|see|want] [my|the|your] {adjective} {object}")
    else:
        said = str(rng.randint(1, 999))
    quote = rng.choice(('"', "'", ""))
    asked = rng.choice(
        (
            "repeat after me: {}",
            "say {}",
            "please say {}",
            "repeat: {}",
            "repeat {}",
            "write {}",
            "echo {}",
            "say the words {}",
            "can you say {}",
            "please repeat {}",
            "answer only with {}",
            "say exactly {}",
            "now say {}",
            "please write {}",
        )
    )
    return asked.format(quote + said + quote), capital(said) + ("" if shape in (0, 4) else ".")


def _list(ctx: Context) -> Exchange:
    rng = ctx.rng
    pool, plural = rng.choice(
        (
            ("fruit", "fruits"),
            ("vegetable", "vegetables"),
            ("hero_animal", "animals"),
            ("color", "colours"),
            ("town", "cities"),
            ("country", "countries"),
            ("job", "jobs"),
            ("name", "names"),
            ("animal", "animals"),
            ("weekday", "days"),
            ("month", "months"),
            ("object", "things"),
            ("name", "first names"),
            ("town", "towns"),
            ("color", "colors"),
        )
    )
    n = rng.randint(2, 6)
    items = [entry.text for entry in rng.sample(ctx.entries(pool), n)]
    number = rng.choice((NUMBERS[n], str(n)))
    question = ctx.expand(
        f"[name|list|tell me|give me|can you name|write down|say|please list|i need|name me|can you list|make a "
        f"list of|i want] "
        f"{number} {plural}"
    )
    if rng.random() < 0.35:
        body = "\n".join(f"{i}. {capital(item)}" for i, item in enumerate(items, 1))
    elif rng.random() < 0.3:
        body = "\n".join(f"- {capital(item)}" for item in items)
    else:
        body = capital(", ".join(items[:-1]) + " and " + items[-1]) + "."
    return question, body


def _name_one(ctx: Context) -> Exchange:
    pool, word = ctx.rng.choice(
        (
            ("fruit", "fruit"),
            ("vegetable", "vegetable"),
            ("hero_animal", "animal"),
            ("color", "colour"),
            ("town", "city"),
            ("country", "country"),
            ("job", "job"),
            ("weekday", "day"),
            ("month", "month"),
            ("name", "name"),
        )
    )
    item = ctx.rng.choice(ctx.entries(pool)).text
    asked = ctx.expand(f"[name|tell me|give me|say|think of|choose|pick] [a|any|one|some] {word}")
    return asked.replace("a animal", "an animal"), ctx.rng.choice(
        (f"{capital(item)}.", f"{capital(item)}, for example.", f"How about {item}?")
    )


def _spell(ctx: Context) -> Exchange:
    word = ctx.rng.choice(ctx.entries(ctx.rng.choice(("fruit", "object", "hero_animal")))).text.replace(" ", "")
    asked = ctx.expand(f"[spell|how do you spell|can you spell|please spell|spell the word] {word}")
    return asked, "-".join(word.upper()) + "."


def _category(ctx: Context) -> Exchange:
    kinds = (
        ("fruit", "fruit"),
        ("vegetable", "vegetable"),
        ("animal", "animal"),
        ("color", "colour"),
        ("weekday", "day of the week"),
        ("month", "month"),
        ("job", "job"),
        ("country", "country"),
    )
    (pool, true), (_, other) = ctx.rng.sample(kinds, 2)
    item = ctx.rng.choice(ctx.entries(pool)).text
    claim = true if ctx.rng.random() < 0.55 else other
    subject = with_article(item) if pool in ("fruit", "vegetable", "animal", "job") else item
    head = "Yes" if claim == true else "No"
    return f"is {subject} {with_article(claim)}", f"{head}, {subject} is {with_article(true)}."


SKILLS: tuple[tuple[Callable[[Context], Exchange], float], ...] = (
    (_sum, 3.0),
    (_count, 1.2),
    (_next_number, 0.8),
    (_bigger, 0.7),
    (_bigger_animal, 0.7),
    (_echo, 3.0),
    (_list, 2.5),
    (_name_one, 1.5),
    (_spell, 0.6),
    (_category, 1.0),
)


def skill(rng: random.Random, heldout: bool) -> Exchange:
    make = rng.choices([make for make, _ in SKILLS], [weight for _, weight in SKILLS])[0]
    return make(Context(rng, lexicon(), heldout))
