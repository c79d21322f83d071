"""Things that a user says once and asks for later in the same chat."""

from __future__ import annotations

from dataclasses import dataclass

from training.demo.corpus.grammar import Context, capital
from training.demo.corpus.intents import sentence_case, tidy


@dataclass(frozen=True)
class Memory:
    """A statement with its answer, and a later question with its answer."""

    said: str
    reply: str
    asked: str
    recalled: str


def _make(ctx: Context, said: str, reply: str, asked: str, recalled: str) -> Memory:
    return Memory(
        tidy(ctx.expand(said)),
        sentence_case(tidy(ctx.expand(reply))),
        tidy(ctx.expand(asked)),
        sentence_case(tidy(ctx.expand(recalled))),
    )


KINDS: tuple[tuple[str, str, str, str], ...] = (
    (
        "[my name is|i am|i'm|hello, my name is|hi, i am|you can call me|hello, i'm|call me|hey, i am] {name}",
        "[Hello|Hi|Nice to meet you|Pleased to meet you], {name}! [I am demo.|How can I help you?|How are you?|"
        "What would you like to talk about?]",
        "[what is my name|do you know my name|do you remember my name|who am i|what was my name|what am i called|"
        "tell me my name|say my name|"
        "can you tell me my name|how am i called|what's my name]",
        "[Your name is {name}|You are {name}|You told me that your name is {name}|Yes, you are {name}].",
    ),
    (
        "my [favourite|favorite] [colour|color] is {color}",
        "[{^color} is a lovely colour|I will remember it|A good choice]. [It makes me think of {color.thing}.|It "
        "feels {color.feel}.|]",
        "[what is my favourite colour|what is my favorite color|which colour do i like|do you remember my "
        "favourite colour|which color do i like best]",
        "[Your favourite colour is {color}|You like {color}|You said that it is {color}].",
    ),
    (
        "i have {a animal} [called|named] {pet_name}",
        "[How nice|How lovely]! {pet_name} is a good name. [What is {pet_name} like?|I like {animal.plural}.|]",
        "[what is the name of my {animal}|what is my {animal} called|do you remember the name of my {animal}|how "
        "is my {animal} called|what is my pet called]",
        "[Your {animal} is called {pet_name}|{pet_name}|The name of your {animal} is {pet_name}].",
    ),
    (
        "i [live in|come from|am from] {town}",
        "{town} [sounds interesting|must be nice|is a place I have never seen]. [What do you like about it?|How is "
        "it there?|]",
        "[where do i live|where am i from|which city am i from|do you remember where i live|where do i come from|"
        "what is my city]",
        "[You live in {town}|You told me that you live in {town}|In {town}].",
    ),
    (
        "i am {age} years old",
        "{age} is a fine age. [How does it feel?|I have no age.|]",
        "[how old am i|what is my age|do you remember my age|do you know how old i am]",
        "[You are {age} years old|{age} years|You told me that you are {age}].",
    ),
    (
        "i am {a job}",
        "[That is a useful job|How interesting]: {a job} {job.does}. [Do you like it?|]",
        "[what is my job|what do i do|what is my work|do you remember my job|what do i do for work]",
        "[You are {a job}|You told me that you are {a job}].",
    ),
    (
        "[remember the word|please remember the word|the secret word is|keep in mind the word|my password is|the "
        "magic word is] {object}",
        "[I will remember it|All right, I will keep it in mind|Good: {noun}].",
        "[what was the word|what is the word|which word did i tell you|what is the secret word|do you remember the "
        "word|what did i ask you to remember]",
        "[The word is {noun}|It was {noun}|{noun}].",
    ),
    (
        "[remember the number|the number is|please remember the number|my lucky number is|my number is] {age}",
        "[I will remember it|All right|Good: {age}].",
        "[what was the number|what is the number|which number did i tell you|what is my number|do you remember the "
        "number]",
        "[The number is {age}|It was {age}|{age}].",
    ),
    (
        "my [favourite|favorite] [hobby|thing|subject] is {thing}",
        "[Good choice|I understand that]: {thing.like}.",
        "[what do i like|what is my favourite hobby|what is my favourite thing|what do i like best|do you remember "
        "what i like]",
        "[You like {thing}|You told me that you like {thing}].",
    ),
    (
        "my [sister|brother|friend|mother|father|neighbour] is called {name2}",
        "[{name2} is a nice name|I see|Thank you for telling me]. [What is {name2} like?|Tell me more.|]",
        "[what is the name I told you|who did i tell you about|which name did i tell you]",
        "[You told me about {name2}|{name2}|It was {name2}].",
    ),
)
_WEIGHTS = (6.0, 1.5, 1.5, 1.5, 1.0, 1.0, 1.5, 0.8, 1.0, 0.4)


def memories(ctx: Context, count: int) -> list[Memory]:
    picked: list[Memory] = []
    kinds = list(KINDS)
    weights = list(_WEIGHTS)
    for _ in range(count):
        at = ctx.rng.choices(range(len(kinds)), weights)[0]
        picked.append(_make(ctx, *kinds.pop(at)))
        weights.pop(at)
    return picked


_FACTS: tuple[tuple[str, str, str], ...] = (
    ("{name} has {a noun}.", "what does {name} have", "{name} has {a noun}."),
    ("{name} lives in {town}.", "where does {name} live", "{name} lives in {town}."),
    ("{name} is {a job}.", "what is the job of {name}", "{name} is {a job}."),
    ("The {noun} is {color}.", "what colour is the {noun}", "The {noun} is {color}."),
    ("{name} likes {thing}.", "what does {name} like", "{name} likes {thing}."),
    (
        "The {hero_animal} is called {pet_name}.",
        "what is the {hero_animal} called",
        "The {hero_animal} is called {pet_name}.",
    ),
    ("{name} is {age} years old.", "how old is {name}", "{name} is {age} years old."),
    ("{name} will come on {weekday}.", "when will {name} come", "{name} will come on {weekday}."),
    ("The meeting is on {weekday}.", "when is the meeting", "The meeting is on {weekday}."),
)


def reading(ctx: Context) -> tuple[str, str]:
    """A few facts in the question, and one of them asked for."""
    facts: list[str] = []
    pairs: list[tuple[str, str]] = []
    for fact, question, answer in ctx.rng.sample(_FACTS, ctx.rng.randint(1, 3)):
        local = Context(ctx.rng, ctx.lexicon, ctx.heldout)
        facts.append(capital(tidy(local.expand(fact))))
        pairs.append((tidy(local.expand(question)), capital(tidy(local.expand(answer)))))
    question, answer = ctx.rng.choice(pairs)
    lead = ctx.rng.choice(("", "", "Here are some facts. ", "Read this: ", "Listen. "))
    return f"{lead}{' '.join(facts)} {capital(question)}?", answer
