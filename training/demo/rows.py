"""Chats as rows of tokens: encoded, weighted by role, packed whole into rows of one length."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer

from training.demo.config import TrainPlan
from training.demo.corpus.documents import Document, document
from training.demo.template import render
from training.demo.tokenizer import token_id

_PENDING = 64
"""Chats that wait for a gap of their size."""


@dataclass(frozen=True)
class Encoded:
    """Token ids of a chat with its end mark, and the loss weight of each as a target."""

    ids: list[int]
    weights: list[float]


class Encoder:
    def __init__(self, tokenizer: Tokenizer, plan: TrainPlan) -> None:
        self.tokenizer = tokenizer
        self.plan = plan
        self.start, self.end = token_id(tokenizer, "<|im_start|>"), token_id(tokenizer, "<|im_end|>")
        self.stop = token_id(tokenizer, "<|endoftext|>")
        self.newline = tokenizer.encode("\n", add_special_tokens=False).ids[0]
        self.no_thought = tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False).ids
        self.thought = tokenizer.encode("<think>\n", add_special_tokens=False).ids

    def encode(self, made: Document) -> Encoded:
        ids = self.tokenizer.encode(render(made.messages, made.tools), add_special_tokens=False).ids
        weights: list[float] = []
        other = self.plan.other_weight
        at = 0
        while at < len(ids):
            header_end = ids.index(self.newline, at) + 1
            turn_end = ids.index(self.end, at) + 1
            role = self.tokenizer.decode(ids[at + 1 : header_end - 1])
            body = ids[header_end:turn_end]
            weights += [other] * (header_end - at)
            weight = {"assistant": 1.0, "user": self.plan.user_weight}.get(role, other)
            given = 0
            if role == "assistant":
                for opening in (self.no_thought, self.thought):
                    if body[: len(opening)] == opening:
                        given = len(opening)
                        break
            weights += [other] * given + [weight] * (len(body) - given)
            at = turn_end
            if at < len(ids):
                weights.append(other)
                at += 1
        return Encoded([*ids, self.stop], [*weights, other])


@dataclass
class Rows:
    """An endless source of rows. Owns its position in the stream, which `state` and `restore` carry over a restart."""

    encoder: Encoder
    seed: int
    length: int
    heldout: bool = False
    long_chats: bool = False
    varied: bool = False
    next_index: int = 0
    pending: dict[int, Encoded] = field(default_factory=dict)

    def state(self) -> dict[str, object]:
        return {"next_index": self.next_index, "pending": list(self.pending)}

    def restore(self, next_index: int, pending: list[int]) -> None:
        self.next_index = next_index
        self.pending = {index: self._encode(index) for index in pending}

    def _encode(self, index: int) -> Encoded:
        made = document(self.seed, index, heldout=self.heldout, long_chats=self.long_chats, varied=self.varied)
        return self.encoder.encode(made)

    def _row(self) -> Encoded:
        """Chats in order of the stream, each time the first one that fits; the last gap is filled with end marks."""
        room = self.length + 1
        ids: list[int] = []
        weights: list[float] = []
        while True:
            while len(self.pending) < _PENDING:
                self.pending[self.next_index] = self._encode(self.next_index)
                self.next_index += 1
            fits = next((index for index, chat in self.pending.items() if len(chat.ids) <= room - len(ids)), None)
            if fits is None and ids:
                break
            chat = self.pending.pop(fits if fits is not None else next(iter(self.pending)))
            ids += chat.ids[:room]
            weights += chat.weights[:room]
        gap = room - len(ids)
        return Encoded(ids + [self.encoder.stop] * gap, weights + [0.0] * gap)

    def batch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """tokens, targets (int64) and weights (float32), each [rows, length]."""
        made = [self._row() for _ in range(rows)]
        ids = torch.tensor([row.ids for row in made])
        weights = torch.tensor([row.weights for row in made])
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weights[:, 1:].contiguous()
