"""Text to token ids and back, by the checkpoint's own tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import ModelLoadError, RequestError
from engine.text.detokenizer import Detokenizer, TokenBytes
from engine.text.encoder import TextEncoder
from engine.text.reasoning import ANSWER_TAGS
from engine.text.slices import in_one_go


class Tokenizer:
    """A Hugging Face tokenizer. Immutable, so any thread may use it."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, special_tokens: dict[str, str]) -> None:
        self._tokenizer = tokenizer
        self.special_tokens = special_tokens
        """Named special tokens of the checkpoint, e.g. {"eos_token": "<|im_end|>"}."""
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.special_token_ids: frozenset[int] = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.control_token_ids = frozenset(i for i in self.special_token_ids if self.token_of(i) not in ANSWER_TAGS)
        """The special tokens but for the tags of an answer's parts, which some checkpoints mark special too."""
        self._token_bytes = TokenBytes(self.token_of, _decoder_of(tokenizer))
        self._longest_token_bytes = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)
        self.text_encoder = TextEncoder(tokenizer, self._longest_token_bytes)
        """Special tokens written in a text are parsed."""

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read `tokenizer.json` and, where there is one, `tokenizer_config.json`. Raises ModelLoadError."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(f"{path} is missing; a model folder needs a tokenizer.json (Hugging Face layout)")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower for a broken file
            raise ModelLoadError(f"{path} cannot be read as a tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, read_special_tokens(folder))

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def control_tokens(self) -> frozenset[str]:
        return frozenset(token for token in map(self.token_of, self.control_token_ids) if token is not None)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`, in one go. Special tokens written in it are parsed; `add_special_tokens` adds those
        (such as a leading BOS) that the tokenizer puts around a plain text; a rendered chat already has them.

        Raises RequestError for text that is not valid Unicode.
        """
        return in_one_go(self.text_encoder.encode(text, add_special_tokens=add_special_tokens)).token_ids

    def chat_encoder(self, stand_ins: Mapping[str, str], parsed: Collection[str] = ()) -> TextEncoder:
        """For what a chat template wrote: each of `stand_ins` (token to stand-in) is its token, and a control token
        that is spelled out is text, but for those in `parsed`.

        It shares model and rules with this tokenizer, so whatever is no control token has the same ids.
        """
        ours = self._tokenizer
        theirs = tokenizers.Tokenizer(ours.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if getattr(ours, part) is not None:
                setattr(theirs, part, getattr(ours, part))
        added = dict(sorted(ours.get_added_tokens_decoder().items()))
        inert = self.control_tokens - set(parsed)
        theirs.add_tokens([_alike(token, token.content, special=token.content in inert) for token in added.values()])
        if any(theirs.token_to_id(token.content) != token_id for token_id, token in added.items()):
            raise ModelLoadError("tokenizer.json: the ids of its added tokens are not in their order")
        of_token = {token.content: token for token in added.values()}
        theirs.add_tokens([_alike(of_token[token], stand_in, special=False) for token, stand_in in stand_ins.items()])
        theirs.encode_special_tokens = True
        cuts = [stand_ins[token] for token in stand_ins if _ends_what_is_before(of_token[token])]
        meant = {stand_in: token_id for token_id, token in added.items() if (stand_in := stand_ins.get(token.content))}
        known = theirs.get_added_tokens_decoder().items()
        ids = {token_id: meant[token.content] for token_id, token in known if token.content in meant}
        return TextEncoder(theirs, self._longest_token_bytes, cuts, ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are not UTF-8 become U+FFFD. Raises RequestError for an id out of range."""
        for token_id in token_ids:
            if not 0 <= token_id < 2**32:
                raise RequestError(f"token id {token_id} is outside 0..{self.vocab_size - 1}", param="tokens")
        # Of a batch, for that lets other threads run meanwhile.
        texts: list[str] = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return texts[0]

    def new_detokenizer(self) -> Detokenizer:
        """For one request's output; control tokens have no text."""
        return Detokenizer(self._token_bytes, self.control_token_ids)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a character may take several tokens."""
        return self._token_bytes(token_id)

    def token_of(self, token_id: int) -> str | None:
        """The token as it stands in the vocabulary, or None for an id that has none."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def id_of(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.id_of(token)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json` as a dict, empty where there is none. Raises ModelLoadError when it is broken."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} holds a {type(config).__name__}; expected a JSON object")
    return config


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Named special tokens of `tokenizer_config.json`, e.g. {"eos_token": "<|im_end|>"}. Raises ModelLoadError."""
    named: dict[str, str] = {}
    for key, value in read_tokenizer_config(folder).items():
        if not key.endswith("_token"):
            continue
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[key] = content
    return named


def _alike(token: tokenizers.AddedToken, content: str, *, special: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=special,
    )


def _ends_what_is_before(token: tokenizers.AddedToken) -> bool:
    """Whether a text that is cut before this token has the tokens of the whole text."""
    return not (token.lstrip or token.single_word or token.normalized)


def _decoder_of(tokenizer: tokenizers.Tokenizer) -> dict[str, Any] | None:
    """The `decoder` entry of the tokenizer's JSON, without writing out the whole vocabulary."""
    if tokenizer.decoder is None:
        return None
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return decoder
