"""Short stories from a grammar: hero, place, thing, trouble, a way out. What the request names is in the story."""

from __future__ import annotations

from dataclasses import dataclass

from training.demo.corpus.grammar import Context, capital, with_article
from training.demo.corpus.intents import sentence_case, tidy

FEMALE_KINDS = frozenset({"girl", "queen", "old woman", "princess", "hen"})
NEUTRAL_KINDS = frozenset({"child", "robot"})
MALE_NAMES = frozenset(
    [
        "Ben",
        "David",
        "Felix",
        "Hugo",
        "Jack",
        "Leo",
        "Noah",
        "Paul",
        "Sam",
        "Victor",
        "Bob",
        "Daniel",
        "Frank",
        "Henry",
        "James",
        "Lucas",
        "Oscar",
        "Robert",
        "Tom",
        "Will",
        "Adam",
        "Carlos",
        "Elias",
        "George",
        "Ivan",
        "Max",
        "Otto",
        "Ravi",
        "Theo",
        "Amir",
        "Chen",
        "Jonas",
        "Marco",
        "Omar",
        "Simon",
        "Walter",
        "Anton",
        "Bruno",
        "Dylan",
        "Isaac",
        "Kofi",
        "Milo",
        "Nils",
        "Pablo",
        "Tim",
    ]
)


@dataclass(frozen=True)
class Story:
    """What a story is about, in words of a request, and its sentences."""

    hero: str
    name: str | None
    place: str
    thing: str
    sentences: tuple[str, ...]

    def text(self, start: int = 0, end: int | None = None) -> str:
        return " ".join(self.sentences[start:end])


def _pronouns(ctx: Context, kind: str, animal: bool, name: str | None) -> tuple[str, str, str]:
    if animal or kind in NEUTRAL_KINDS:
        return ("it", "its", "it")
    if name is not None:
        return ("he", "his", "him") if name in MALE_NAMES else ("she", "her", "her")
    return ("she", "her", "her") if kind in FEMALE_KINDS else ("he", "his", "him")


def make_story(ctx: Context) -> Story:
    rng = ctx.rng
    animal = rng.random() < 0.45
    kind = ctx.draw("hero_animal" if animal else "hero_kind").text
    name = ctx.draw("name").text if rng.random() < 0.5 else None
    if name and not animal:
        matching = [
            k for k in ("girl", "woman", "princess", "baker", "painter", "teacher", "sailor") if name not in MALE_NAMES
        ]
        kind = rng.choice(matching or ["boy", "man", "prince", "baker", "painter", "fisherman", "sailor"])
    elif not animal and rng.random() < 0.25:
        kind = ctx.draw("person").text
    adjective = ctx.draw("adjective").text
    place = ctx.draw("story_place")
    if rng.random() < 0.3:
        ctx.bind("object", ctx.draw("noun").text)
    thing = ctx.draw("object").text
    he, his, him = _pronouns(ctx, kind, animal, name)
    full = f"{adjective} {kind}"
    friend_name = ctx.draw("name", "2").text
    ctx.bind("he", he)
    ctx.bind("his", his)
    ctx.bind("him", him)
    ctx.bind("hero", name or f"the {kind}")
    ctx.bind("kind", kind)
    friend = ctx.draw("hero_animal", "2").text
    ctx.bind("friend", friend if rng.random() < 0.6 else f"{friend} called {friend_name}")
    ctx.bind("buddy", friend)
    intro_hero = with_article(full) + (f" [called|named] {name}" if name else "")
    opening = rng.choice(
        (
            f"{{time_start}} there was {intro_hero} who lived {{story_place.in}}.",
            f"{capital(place.attributes['in'])} lived {intro_hero}.",
            f"There was once {intro_hero}. {{^he}} lived {{story_place.in}}.",
            f"Once upon a time {intro_hero} lived {{story_place.in}}.",
        )
    ).replace("There was a time when there was", "There was once")
    opening = opening.replace(
        "{time_start} there was",
        rng.choice(("Once upon a time there was", "Long ago there was", "Many years ago there was")),
    )
    plot = rng.choice(PLOTS)
    lines = [opening, *(rng.choice(step) for step in plot)]
    if rng.random() < 0.6:
        lines.append(rng.choice(ENDINGS))
    sentences = tuple(sentence_case(tidy(ctx.expand(line))) for line in lines)
    hero = rng.choice((with_article(kind), with_article(full)))
    return Story(hero, name, place.text, thing, sentences)


ENDINGS = (
    "And from that day on, {hero} was never alone again.",
    "{moral}.",
    "And so {hero} learned: {moral}.",
    "That evening everyone [sang|danced|laughed] until the stars came out.",
    "The end.",
    "And they lived happily ever after.",
    "If you pass by {story_place.the}, you may still see the {object}.",
)
_LOST = (
    "{^hero} had {a object} that {he} loved more than anything.",
    "The dearest thing that {hero} had was {a object}.",
    "Every day {hero} took great care of {his} {object}.",
)
_TROUBLE = (
    "One [morning|evening|day] <loss>, and {hero} was very sad.",
    "But one [morning|day|night] <loss>.",
    "Then, one [windy|cold|rainy] day, <loss>. {^hero} did not know what to do.",
)
_SEARCH = ("{^hero} <quest>.", "So {he} <quest>.")
_MEET = (
    'On the way {he} met {a friend}. "[Why are you so sad|What are you looking for|Can I help you]?" asked the '
    "{buddy}.",
    'Then {a friend} came by and said: "[Do not cry, I will help you|Let us look together|Two see more than one]."',
    "There {he} saw {a friend} who was [sitting under a tree|eating an apple|looking at the sky].",
)
_HELP = (
    "Together they [looked|searched] near {story_place.the}, and at last they found the {object} [under a bush|"
    "behind a tree|in an old box|under some leaves].",
    "The {buddy} had a [good|clever|simple] idea, and before the sun went down the {object} was back.",
    '"I know where it is," said the {buddy}, and showed the {object} to {hero}.',
    "They worked all night, and in the morning the {object} was as good as new.",
)
_THANKS = (
    "{^hero} was so <feeling> that {he} [danced|laughed|jumped with joy].",
    '"Thank you," said {hero}. "You are a true friend."',
    "{^hero} shared {his} bread with the {buddy}, and both were <feeling>.",
)
_FIND = (
    "One [morning|day|evening] {hero} found {a object} near {story_place.the}.",
    "One day, on a walk, {he} saw {a object} lying on the ground.",
    "After a long night of rain, {hero} found {a object} in front of the door.",
)
_WONDER = (
    "It was [old|small|golden|heavy], and it shone [in the sun|like a star|a little].",
    '"Who has lost this {object}?" {hero} asked.',
    "{^he} had never seen such a beautiful {object}.",
)
_OWNER = (
    "It belonged to {a friend}, who had looked for it for many days.",
    'Then {he} heard somebody crying: it was {a friend}. "That is my {object}," it said.',
    "Soon {a friend} came along and asked for the {object}.",
)
_GIVE = (
    "{^hero} wanted to keep it, but {he} gave it back at once.",
    "Without a word {hero} gave the {object} to the {buddy}.",
    '"Then you must have it back," said {hero}.',
)
_REWARD = (
    "The {buddy} was so <feeling> that the two became friends.",
    "From then on the {buddy} came to visit every day.",
    '"You are honest," said the {buddy}, and gave {him} [a warm coat|an apple cake|a small golden seed] in return.',
)
_WISH = (
    "{^hero} had only one wish: to [see the sea|learn to sing|climb the highest hill|fly like a bird|find a friend].",
    "{^he} wanted to [see the whole world|make the best {object} of all|learn to dance], but everyone laughed.",
)
_LAUGH = (
    '"You are too [small|slow|young]," the others said.',
    "Nobody believed that {he} could do it.",
    '"That will never work," said an old [owl|crow|goat|neighbour].',
)
_TRY = (
    "But {hero} tried again and again, every day a little.",
    "{^hero} took {his} {object} and went on {his} way.",
    "So {he} took {a object} and began, step by step.",
)
_STORM = (
    "Then a great storm came to {story_place.the}, and everyone was afraid.",
    "One night the [wind|water|snow] came, and the whole neighbourhood was in danger.",
    "Suddenly it grew dark, and nobody could find the way home.",
)
_SAVE = (
    "Only {hero} stayed calm. With the {object} {he} showed all of them the way.",
    "{^hero} thought of the {object}, and with it {he} saved them all.",
    "{^hero} held up the {object}, and it was just what they needed.",
)
_PROUD = (
    "After that nobody laughed at {hero} any more.",
    '"We were wrong," said the others, and {hero} smiled.',
    "Everyone thanked {hero}, and {he} was very <feeling>.",
)
_QUIET = (
    "Every evening {he} sat by the window with {his} {object} and watched the [stars|clouds|birds].",
    "{^he} had {a object}, and it was {his} only friend.",
    "It was a quiet life, with {a object} and a cup of tea.",
)
_VISIT = (
    "One [rainy|snowy|windy] night somebody knocked at the door. It was {a friend}.",
    "Then, one day, {a friend} moved in next door.",
)
_SHARE = (
    '"Come in," said {hero}, "it is warm here."',
    "{^hero} made some soup and showed the {buddy} the {object}.",
    "They talked about the {object} and about far away places until late at night.",
)
_STAY = (
    "In the morning the {buddy} did not want to leave, and {hero} was <feeling>.",
    "Since that night they share the {object}, the soup and the window.",
    "So {hero} found out that an evening for two is better than an evening alone.",
)
PLOTS = (
    (_LOST, _TROUBLE, _SEARCH, _MEET, _HELP, _THANKS),
    (_LOST, _TROUBLE, _MEET, _HELP, _THANKS),
    (_FIND, _WONDER, _OWNER, _GIVE, _REWARD),
    (_WISH, _LAUGH, _TRY, _STORM, _SAVE, _PROUD),
    (_QUIET, _VISIT, _SHARE, _STAY),
    (_FIND, _WONDER, _SEARCH, _MEET, _THANKS),
)
