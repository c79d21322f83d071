"""Train the bundled model: `python -m training.demo.train`. Interrupted, it goes on where it was."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from training.demo.config import DemoConfig, TrainPlan
from training.demo.fake_quant import quantised, quantised_groups
from training.demo.model import FastForward, build_config, build_model
from training.demo.rows import Encoder, Rows
from training.demo.template import BUNDLE
from training.demo.tokenizer import load_tokenizer, train_tokenizer, write_tokenizer

DEFAULT_FOLDER = Path("runs/demo")
SAVE_EVERY_SECONDS = 240.0
LOG_EVERY_STEPS = 10
EVALUATE_EVERY_STEPS = 100
EVALUATION_SEED = 99


def learning_rate_share(plan: TrainPlan, step: int) -> float:
    """Warm-up, plateau, then a linear fall: the share of the peak learning rate at a step."""
    if step < plan.warmup_steps:
        return (step + 1) / plan.warmup_steps
    start = plan.decay_from * plan.steps
    if step < start:
        return 1.0
    done = (step - start) / max(1.0, plan.steps - start)
    return 1.0 + (plan.final_lr_share - 1.0) * done


def build_optimizers(model: nn.Module, plan: TrainPlan) -> list[torch.optim.Optimizer]:
    """Muon for the large matrices, AdamW for embeddings, norms, convolutions and the small projections."""
    matrices = [parameter for group in quantised_groups(model) for parameter in group]
    chosen = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=plan.muon_lr, weight_decay=plan.muon_weight_decay, momentum=0.95),
        torch.optim.AdamW(rest, lr=plan.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


class Trainer:
    """One run. Owns the model, the optimisers and the position in the stream; used from one thread."""

    def __init__(self, config: DemoConfig, folder: Path, compiled: bool = True) -> None:
        self.plan, self.folder = config.plan, folder
        folder.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(self.plan.threads)
        tokenizer = load_tokenizer()
        self.encoder = Encoder(tokenizer, self.plan)
        self.config = build_config(config.shape, [self.encoder.end, self.encoder.stop], self.encoder.stop)
        self.model = build_model(self.config, self.plan.seed)
        self.forward = FastForward(self.model, compiled)
        self.groups = quantised_groups(self.model)
        self.optimizers = build_optimizers(self.model, self.plan)
        self.rows = Rows(self.encoder, self.plan.seed, self.plan.row_tokens)
        self.long_rows = Rows(self.encoder, self.plan.seed, self.plan.long_row_tokens, long_chats=True, varied=True)
        self.varied_rows = Rows(self.encoder, self.plan.seed, self.plan.row_tokens, varied=True)
        held = Rows(self.encoder, EVALUATION_SEED, self.plan.row_tokens, heldout=True)
        self.evaluation = held.batch(self.plan.rows_per_step)
        self.step = 0
        self.seconds = 0.0

    @property
    def tokens_per_step(self) -> int:
        return self.plan.row_tokens * self.plan.rows_per_step

    def _sources(self) -> tuple[Rows, ...]:
        return self.rows, self.long_rows, self.varied_rows

    def quantises(self, step: int) -> bool:
        return step >= self.plan.quantised_from * self.plan.steps

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if step >= self.plan.long_from * self.plan.steps and step % self.plan.long_every == 0:
            return self.long_rows.batch(self.tokens_per_step // self.plan.long_row_tokens)
        rows = self.varied_rows if step >= self.plan.varied_from_step else self.rows
        return rows.batch(self.plan.rows_per_step)

    def train_step(self) -> float:
        """One update; returns the weighted mean loss before it."""
        started = time.perf_counter()
        tokens, targets, weights = self._batch(self.step)
        with quantised(self.groups) if self.quantises(self.step) else contextlib.nullcontext():
            loss = self.forward.loss(tokens, targets, weights) / weights.sum()
            torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        share = learning_rate_share(self.plan, self.step)
        for optimizer, peak in zip(self.optimizers, (self.plan.muon_lr, self.plan.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.seconds += time.perf_counter() - started
        return loss.item()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss of the assistant's tokens on a fixed piece of the held-out stream."""
        tokens, targets, weights = self.evaluation
        assistant = (weights == 1.0).float()
        with quantised(self.groups) if self.quantises(self.step) else contextlib.nullcontext():
            return float(self.forward.loss(tokens, targets, assistant) / assistant.sum())

    def save(self) -> None:
        state: dict[str, Any] = {
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "rows": [rows.state() for rows in self._sources()],
        }
        partial = self.folder / "state.pt.partial"
        torch.save(state, partial)
        partial.replace(self.folder / "state.pt")

    def resume(self) -> bool:
        file = self.folder / "state.pt"
        if not file.exists():
            return False
        state = torch.load(file, weights_only=True)
        self.step, self.seconds = state["step"], state["seconds"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for rows, saved in zip(self._sources(), state["rows"], strict=False):
            rows.restore(saved["next_index"], saved["pending"])
        return True


@contextlib.contextmanager
def _report(total: int, done: int, folder: Path) -> Iterator[Any]:
    """A progress bar on a terminal, lines elsewhere; always a JSON line in `log.jsonl`."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        disable=not sys.stderr.isatty(),
    )
    task = bar.add_task("training", total=total, completed=done)
    with bar, (folder / "log.jsonl").open("a", encoding="utf-8") as log:

        def report(record: dict[str, Any]) -> None:
            log.write(json.dumps(record) + "\n")
            log.flush()
            text = "  ".join(f"{key} {value}" for key, value in record.items())
            bar.update(task, completed=record["step"], description=text)
            if bar.disable:
                print(text, flush=True)

        yield report


def run(trainer: Trainer, until: int | None = None) -> None:
    plan, saved_at = trainer.plan, time.monotonic()
    last = min(plan.steps, until or plan.steps)
    with _report(plan.steps, trainer.step, trainer.folder) as report:
        recent: list[float] = []
        mark, marked_step = time.perf_counter(), trainer.step
        while trainer.step < last:
            recent.append(trainer.train_step())
            if trainer.step % LOG_EVERY_STEPS == 0 or trainer.step == last:
                now = time.perf_counter()
                rate = (trainer.step - marked_step) * trainer.tokens_per_step / (now - mark)
                record = {
                    "step": trainer.step,
                    "loss": round(sum(recent) / len(recent), 4),
                    "tokens_per_s": round(rate),
                }
                if trainer.step % EVALUATE_EVERY_STEPS == 0 or trainer.step == last:
                    held = trainer.evaluate()
                    record |= {"heldout_loss": round(held, 4), "heldout_ppl": round(math.exp(held), 3)}
                report(record)
                recent.clear()
                mark, marked_step = time.perf_counter(), trainer.step
            if time.monotonic() - saved_at > SAVE_EVERY_SECONDS:
                trainer.save()
                saved_at = time.monotonic()
    trainer.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="checkpoints and log of the run")
    parser.add_argument("--until", type=int, help="stop after this step (and go on later)")
    parser.add_argument(
        "--new-tokenizer", action="store_true", help="train the tokenizer, too, instead of the bundled one"
    )
    options = parser.parse_args()
    config = DemoConfig()
    if options.new_tokenizer or not (BUNDLE / "tokenizer.json").exists():
        write_tokenizer(train_tokenizer(config.plan.seed), BUNDLE)
    trainer = Trainer(config, options.folder)
    if trainer.resume():
        print(f"resumed at step {trainer.step}", flush=True)
    try:
        run(trainer, options.until)
    except KeyboardInterrupt:
        trainer.save()
        print(f"stopped and saved at step {trainer.step}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
