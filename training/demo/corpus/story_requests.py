"""Asking for stories: in many words, for one to be continued, and about one that was told."""

from __future__ import annotations

from training.demo.corpus.grammar import Context, with_article
from training.demo.corpus.intents import tidy
from training.demo.corpus.stories import Story, make_story

_ASK = (
    "[tell me|can you tell me|please tell me|tell us|i want to hear|i would like to hear|write|make up|please "
    "write|can you write|"
    "could you tell|give me|read me|do you know|how about|i'd like|let me hear|i want|write me|invent|create]"
)
_STORY = (
    "[a story|a short story|a little story|a tale|a fairy tale|a bedtime story|a nice story|a small story|a tiny "
    "story|a funny story]"
)
_FRAMES = (
    "think of a tale with {hero} and {thing}",
    "think of a [tale|story] with {thing}",
    "i want to read about {hero} [|and {thing}]",
    "bring {hero} and {thing} together in a [tale|story|fable]",
    "use {hero} and {thing} in a [story|short text|tale]",
    "let {hero} have a small adventure [|{where}]",
    "what did {hero} do {where}? make something up",
    "say something about {hero} in [story form|the form of a story]",
    "a [tale|story|fable], please: {hero}[|, {thing}]",
    "can you imagine {hero} with {thing}? tell it",
    "the theme is {thing}. tell a story",
    "i am in the mood for [a story|a tale|something] about {hero}",
    "got any tales of {hero}",
    "a story with {hero}",
    "put {hero} into a [story|tale] [|{where}]",
    "i would be glad to hear of {hero} and {thing}",
    "[we|i] need a bedtime tale, best with {hero}",
    "[my sister|my little cousin|my grandson] loves stories, [give|find] one about {hero}",
    "your next story takes place {where}",
    "a story {where}, if you like",
    "[amuse|delight|surprise] me with a tale about {hero}",
    "once more, but about {hero}",
    "now one with {thing}",
    "do [me|us] the favour of a story about {hero} and {thing}",
    "[dream up|think up|produce|craft|sketch] [a story|a tale|something short] about {hero} [|and {thing}]",
    "how would a story about {hero} [sound|begin and end]",
    "somebody loses {thing}. tell the story",
    "{hero} finds {thing}. tell the story",
    "{hero} and {thing}: your story, please",
)


def request_and_story(ctx: Context, varied: bool = False) -> tuple[str, str, Story]:
    """A request, the story as it is told, and what it is about."""
    story = make_story(ctx)
    hero, place, thing = story.hero, story.place, with_article(story.thing)
    named = f" named {story.name}" if story.name else ""
    place_in = ctx.draw("story_place").attributes["in"]
    about = [
        "",
        "",
        f"about {hero}",
        f"about {hero}",
        f"with {hero} in it",
        f"about {hero} and {thing}",
        f"about {thing}",
        f"about {hero} who lives {ctx.draw('story_place').attributes['in']}",
        f"that happens {ctx.draw('story_place').attributes['in']}",
        f"about {place}",
        f"in which {thing} is important",
        f"about {hero}, {place} and {thing}",
        f"with {thing} in it",
        f"about {hero} {ctx.draw('story_place').attributes['in']}",
    ]
    if story.name:
        about += [
            f"about {hero}{named}",
            f"about {story.name}",
            f"about {story.name} and {thing}",
            f"with {story.name} as the hero",
            f"about {story.name} {ctx.draw('story_place').attributes['in']}",
            f"about {hero} called {story.name}",
        ]
    what = ctx.rng.choice(about)
    shape = ctx.rng.random()
    if shape < 0.85:
        asked = ctx.expand(f"{_ASK} {_STORY} {what}")
    elif shape < 0.92:
        asked = ctx.expand(f"[a story|story|short story] {what or '[please|now|for me]'}")
    else:
        asked = ctx.expand(
            f"[my child|my daughter|my son|my sister|i] [wants to hear|wants|needs|asks for] a story {what}"
        )
        asked = asked.replace("i wants", "i want").replace("i needs", "i need").replace("i asks", "i ask")
    if varied and ctx.rng.random() < 0.5:
        subject = story.name if story.name and ctx.rng.random() < 0.4 else hero + named
        asked = ctx.expand(ctx.rng.choice(_FRAMES).format(hero=subject, thing=thing, where=place_in))
    lead = ctx.expand("[|||||<sure> |Here is one. |Listen: |Gladly. ]")
    return tidy(asked), lead + story.text(), story


def continuation(ctx: Context) -> tuple[str, str]:
    """Somebody gives the start, the model goes on."""
    story = make_story(ctx)
    cut = ctx.rng.randint(1, max(1, len(story.sentences) - 3))
    asked = ctx.rng.choice(
        (
            "Continue this story: {}",
            "Go on with this story: {}",
            "How does this story go on? {}",
            "Please continue: {}",
            "Finish this story: {}",
            "What happens next? {}",
            "{} What happens next?",
            "{} Please continue the story.",
        )
    )
    return asked.format(story.text(0, cut)), story.text(cut)


def about_story(ctx: Context) -> list[tuple[str, str]]:
    """A story, then questions about it."""
    asked, told, story = request_and_story(ctx)
    ctx.bind("thing_word", story.thing)
    kind = story.hero.split(" ", 1)[1]
    turns = [(asked, told)]
    follow = [
        (
            ctx.expand(
                "[who was the story about|who is the hero|who is the story about|who was the hero of the story]"
            ),
            f"It was about {story.name}." if story.name else f"It was about the {kind}.",
        ),
        (
            ctx.expand("[where did it happen|where does the story take place|where did the hero live|where was that]"),
            f"It happened {ctx.draw('story_place').attributes['in']}.",
        ),
        (
            ctx.expand(
                "[which thing was important|what object was in the story|what was the important thing in the story|"
                "which object was it about]"
            ),
            f"The {story.thing}.",
        ),
        (
            ctx.expand(
                "[what is the moral|what is the moral of the story|what can we learn from it|what do we learn from "
                "the story]"
            ),
            ctx.expand("{moral}."),
        ),
        (
            ctx.expand(
                "[another one|another story|one more|one more story|tell me another one|a different one please|again]"
            ),
            "",
        ),
    ]
    for question, answer in ctx.rng.sample(follow, ctx.rng.randint(1, 2)):
        if not answer:
            other = Context(ctx.rng, ctx.lexicon, ctx.heldout)
            turns.append((question, make_story(other).text()))
            break
        turns.append((question, answer))
    return turns
