"""Measure a checkpoint: `python -m training.demo.evaluate perplexity|answers|transcripts|score`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from engine.weights.formats import Nvfp4Weight
from engine.weights.nvfp4 import dequantize_nvfp4
from training.demo.config import DemoConfig
from training.demo.heldout import heldout_questions
from training.demo.model import FastForward, build_config
from training.demo.rows import Encoder, Rows
from training.demo.template import BUNDLE, render
from training.demo.tokenizer import load_tokenizer, token_id
from training.demo.train import EVALUATION_SEED

HERE = Path(__file__).parent
VERDICTS = HERE / "heldout_verdicts.jsonl"
TRANSCRIPTS = HERE / "transcripts.jsonl"
ROWS = 64
BATCH = 25


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a bf16 or NVFP4 folder in float32, by the names that transformers uses."""
    found = load_file(folder / "model.safetensors")
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in found.items():
        if name.endswith((".weight_scale", ".weight_scale_2", ".input_scale")):
            continue
        scale = found.get(f"{name}_scale")
        if scale is None:
            weights[name] = tensor.float()
        else:
            packed = Nvfp4Weight(packed=tensor, scale=scale, global_scale=found[f"{name}_scale_2"])
            weights[name] = dequantize_nvfp4(packed)
    return weights


def load_model(folder: Path) -> Qwen3_5ForCausalLM:
    model = Qwen3_5ForCausalLM(build_config(DemoConfig().shape, [2, 0], 0))
    missing, unexpected = model.load_state_dict(load_weights(folder), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{folder}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.train(False)
    return model


@torch.no_grad()
def perplexity(folder: Path) -> dict[str, float]:
    """On the held-out stream: of the assistant's tokens, and of every token of the chats."""
    plan = DemoConfig().plan
    forward = FastForward(load_model(folder), compiled=False)
    rows = Rows(Encoder(load_tokenizer(), plan), EVALUATION_SEED, plan.row_tokens, heldout=True)
    sums = {"assistant": 0.0, "all": 0.0}
    counts = {"assistant": 0.0, "all": 0.0}
    for _ in track(range(ROWS // 8), disable=not sys.stderr.isatty()):
        tokens, targets, weights = rows.batch(8)
        for kind, chosen in (("assistant", weights == 1.0), ("all", weights > 0.0)):
            mask = chosen.float()
            sums[kind] += float(forward.loss(tokens, targets, mask))
            counts[kind] += float(mask.sum())
    result = {f"{kind}_perplexity": round(math.exp(sums[kind] / counts[kind]), 4) for kind in sums}
    return {**result, "assistant_tokens": counts["assistant"], "all_tokens": counts["all"]}


class Answerer:
    """Greedy answers by transformers' own generation, several prompts at a time."""

    def __init__(self, folder: Path) -> None:
        self.model, self.tokenizer = load_model(folder), load_tokenizer()
        self.stop = token_id(self.tokenizer, "<|endoftext|>")

    @torch.no_grad()
    def answer(self, chats: Sequence[Sequence[dict[str, Any]]], thinking: bool = False) -> list[str]:
        prompts = [render(chat, add_generation_prompt=True, enable_thinking=thinking) for chat in chats]
        encoded = [self.tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
        width = max(map(len, encoded))
        ids = torch.tensor([[self.stop] * (width - len(row)) + row for row in encoded])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in encoded])
        out = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=220,
            do_sample=False,
            eos_token_id=[2, self.stop],
            pad_token_id=self.stop,
        )
        return [self.tokenizer.decode(row[width:].tolist(), skip_special_tokens=True).strip() for row in out]


def answers(folder: Path) -> Iterator[dict[str, Any]]:
    answerer = Answerer(folder)
    questions = heldout_questions()
    for start in track(range(0, len(questions), BATCH), disable=not sys.stderr.isatty()):
        part = questions[start : start + BATCH]
        said = answerer.answer([[{"role": "user", "content": question.question}] for question in part])
        for question, answer in zip(part, said, strict=True):
            yield {
                "id": question.id,
                "subject": question.subject,
                "question": question.question,
                "answer": answer,
                "keyword_found": any(word in answer.lower() for word in question.topic),
            }


CHATS: tuple[tuple[str, ...], ...] = (
    ("Hi there!", "I'm Marta, and I live in Porto.", "Do you like rain?", "What is my name?"),
    ("I had a long day at work.", "What could I eat tonight?", "Thanks, good night!"),
    ("Tell me a story about a baker called Olaf and a bell.", "Who was it about?"),
    ("Please tell me a short story about an owl.", "Another one!"),
    ("What is dalsegno?", "Why does it need a state image?", "How do I start it?"),
    ("How can I see whether the cache works?", "And what happens when reuse collapses?"),
    ("What is NVFP4?", "Are your own weights stored like that?"),
    ("What is 4 plus 5?", "Name three animals.", "What is the opposite of wet?"),
    ("What is the capital of Australia?", "Who are you, then?"),
    ("Do you prefer the sea or the mountains?", "Tell me a joke.", "Bye!"),
)


def transcripts(folder: Path) -> list[dict[str, Any]]:
    """All chats side by side, one turn of each at a time."""
    answerer = Answerer(folder)
    chats: list[list[dict[str, Any]]] = [[] for _ in CHATS]
    for turn in range(max(map(len, CHATS))):
        open_chats = [(chat, said[turn]) for chat, said in zip(chats, CHATS, strict=True) if turn < len(said)]
        for chat, said in open_chats:
            chat.append({"role": "user", "content": said})
        replies = answerer.answer([chat for chat, _ in open_chats])
        for (chat, _), reply in zip(open_chats, replies, strict=True):
            chat.append({"role": "assistant", "content": reply})
    return [{"messages": chat} for chat in chats]


def score() -> dict[str, Any]:
    """Shares of the verdicts that a reader wrote: on topic, grammatical, both."""
    records = [json.loads(line) for line in VERDICTS.read_text(encoding="utf-8").splitlines() if line.strip()]
    both = [record for record in records if record["on_topic"] and record["grammatical"]]
    subjects = sorted({record["subject"] for record in records})
    return {
        "questions": len(records),
        "on_topic": sum(record["on_topic"] for record in records),
        "grammatical": sum(record["grammatical"] for record in records),
        "both": len(both),
        **{
            name: f"{sum(r['subject'] == name for r in both)}/{sum(r['subject'] == name for r in records)}"
            for name in subjects
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("perplexity", "answers", "transcripts", "score"))
    parser.add_argument("--checkpoint", type=Path, default=BUNDLE, help="a folder in bf16 or NVFP4")
    options = parser.parse_args()
    if options.what in ("perplexity", "score"):
        print(json.dumps(perplexity(options.checkpoint) if options.what == "perplexity" else score()))
        return
    for record in answers(options.checkpoint) if options.what == "answers" else transcripts(options.checkpoint):
        print(json.dumps(record, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
