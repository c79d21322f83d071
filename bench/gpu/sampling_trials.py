"""Is sampling right: greedy to the token, a row whatever is beside it, never outside the filters, and in proportion."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.gpu.budget import Budget
from bench.gpu.report import Comparison, Report, Verdict
from bench.gpu.trials import check_device, generator_for
from engine.kernels import Kernels, SamplingBatch

SETTINGS: tuple[tuple[float, int, float, float], ...] = (
    (1.0, 0, 1.0, 0.0),
    (0.7, 20, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.3, 0, 1.0, 0.1),
    (0.8, 40, 0.95, 0.02),
    (0.0, 0, 1.0, 0.0),
)
"""Temperature, top-k, top-p, min-p."""
_DRAWS = 2048
_DRAWS_AT_ONCE = 128
_SMALL_VOCAB = 128
_SLACK = 1e-4
"""Of a probability at the edge of a filter: float32 sums differ by their order."""


def run_sampling(
    section: str, vocab: int, seed: int, reference: Kernels, candidate: Kernels, report: Report, budget: Budget
) -> None:
    """Every check, on the candidate; greedy also against the reference."""
    checks: tuple[tuple[str, Callable[[], Iterator[Comparison]]], ...] = (
        ("greedy", lambda: _greedy(section, vocab, seed, reference, candidate)),
        ("a row alone and in a batch", lambda: _alone(section, vocab, seed, candidate)),
        ("within the filters", lambda: _within(section, vocab, seed, candidate)),
        ("in proportion", lambda: _in_proportion(section, seed, candidate)),
    )
    for case, check in checks:
        if budget.is_used:
            report.skipped(section, f"sample, {case} and what follows", budget.why)
            return
        try:
            with torch.inference_mode():
                for comparison in check():
                    report.compared(comparison)
        except Exception as error:  # noqa: BLE001 - whatever it raises is wrong, and the next check is run
            check_device(candidate.device)
            detail = f"{type(error).__name__}: {str(error)[:500]}"
            report.compared(Comparison(section, "sample", case, None, None, Verdict.WRONG, detail))


def sampling_batch(settings: list[tuple[float, int, float, float]], seeds: list[int]) -> SamplingBatch:
    """Rows with these settings; each row's offset is its own."""
    temperature, top_k, top_p, min_p = zip(*settings, strict=True)
    return SamplingBatch(
        temperature=torch.tensor(temperature, dtype=torch.float32),
        top_k=torch.tensor(top_k, dtype=torch.int32),
        top_p=torch.tensor(top_p, dtype=torch.float32),
        min_p=torch.tensor(min_p, dtype=torch.float32),
        seeds=torch.tensor(seeds, dtype=torch.int64),
        offsets=torch.tensor([7 * seed % 1000 + 1 for seed in seeds], dtype=torch.int64),
    )


def probabilities(logits: torch.Tensor, setting: tuple[float, int, float, float], slack: float = 0.0) -> torch.Tensor:
    """logits [vocab] -> float64 probabilities after temperature, top-k, top-p and min-p, in this order; `slack` widens
    the last two."""
    temperature, top_k, top_p, min_p = setting
    p = torch.softmax(logits.double() / temperature, dim=-1)
    if top_k:
        p = p * (p >= p.topk(min(top_k, len(p))).values[-1])
        p = p / p.sum()
    if top_p < 1.0:
        values, order = p.sort(descending=True, stable=True)
        is_kept = values.cumsum(-1) - values < top_p + slack
        is_kept[0] = True
        p = torch.zeros_like(p).scatter(0, order, values * is_kept)
    if min_p > 0.0:
        p = p * (p >= (min_p - slack) * p.max())
    return p / p.sum()


def _logits(rows: int, vocab: int, seed: int, name: str) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=generator_for(seed, "sample", name))


def _greedy(section: str, vocab: int, seed: int, reference: Kernels, candidate: Kernels) -> Iterator[Comparison]:
    for rows in (1, 8):
        logits = _logits(rows, vocab, seed, f"greedy {rows}")
        batch = sampling_batch([(0.0, 0, 1.0, 0.0)] * rows, list(range(rows)))
        expected = reference.sample(logits.to(reference.device, copy=True), batch).tolist()
        found = candidate.sample(logits.to(candidate.device, copy=True), batch).tolist()
        yield _yes(section, f"greedy, {rows} rows of {vocab}", found == expected, f"{found} for {expected}")


def _alone(section: str, vocab: int, seed: int, candidate: Kernels) -> Iterator[Comparison]:
    logits = _logits(len(SETTINGS), vocab, seed, "alone").to(candidate.device)
    seeds = [seed % 2**31 + 17 * i for i in range(len(SETTINGS))]
    together = candidate.sample(logits.clone(), sampling_batch(list(SETTINGS), seeds)).tolist()
    backwards = candidate.sample(logits.flip(0).clone(), sampling_batch(list(SETTINGS[::-1]), seeds[::-1])).tolist()[
        ::-1
    ]
    alone = [
        int(candidate.sample(logits[i : i + 1].clone(), sampling_batch([SETTINGS[i]], [seeds[i]]))[0])
        for i in range(len(SETTINGS))
    ]
    yield _yes(section, "a row alone and in a batch", alone == together, f"alone {alone}, together {together}")
    yield _yes(section, "the rows in another order", backwards == together, f"{backwards} for {together}")


def _within(section: str, vocab: int, seed: int, candidate: Kernels) -> Iterator[Comparison]:
    for setting in SETTINGS[1:-1]:
        rows = 16
        logits = _logits(1, vocab, seed, f"within {setting}").expand(rows, -1)
        found = candidate.sample(
            logits.to(candidate.device).clone(), sampling_batch([setting] * rows, list(range(rows)))
        )
        allowed = probabilities(logits[0], setting, _SLACK) > 0
        outside = sorted({token for token in found.tolist() if not allowed[token]})
        yield _yes(section, f"within {_name(setting)}, vocabulary {vocab}", not outside, f"tokens {outside}")


def _in_proportion(section: str, seed: int, candidate: Kernels) -> Iterator[Comparison]:
    """Pearson's chi-square over many seeds, against what would be exceeded once in millions of runs."""
    for setting in SETTINGS[:-1]:
        logits = _logits(1, _SMALL_VOCAB, seed, f"proportion {setting}")
        rows = logits.expand(_DRAWS_AT_ONCE, -1).to(candidate.device)
        parts = []
        for first in range(seed % 2**31, seed % 2**31 + _DRAWS, _DRAWS_AT_ONCE):
            batch = sampling_batch([setting] * len(rows), list(range(first, first + len(rows))))
            parts.append(candidate.sample(rows.clone(), batch))
        found = torch.cat(parts)
        share = _chi_square_share(probabilities(logits[0], setting), found)
        verdict = Verdict.RIGHT if share <= 1.0 else Verdict.WRONG
        yield Comparison(section, "sample", f"in proportion, {_name(setting)}", share, 1.0, verdict)


def _chi_square_share(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Chi-square by its bound at five standard deviations; tokens that are expected fewer than five times are one."""
    counts = torch.bincount(found.cpu(), minlength=len(expected)).double()
    wanted = expected * len(found)
    is_common = wanted >= 5
    pairs = list(zip(counts[is_common].tolist(), wanted[is_common].tolist(), strict=True))
    rest = (float(counts[~is_common].sum()), float(wanted[~is_common].sum()))
    if rest[1] >= 5:
        pairs.append(rest)
    elif rest[0] > rest[1] + 5 * max(rest[1], 1.0) ** 0.5:
        return float("inf")
    if len(pairs) < 2:
        return 0.0
    chi_square = sum((seen - due) ** 2 / due for seen, due in pairs)
    freedom = len(pairs) - 1
    spread = 2 / (9 * freedom)
    # Wilson and Hilferty (1931): the cube root of chi-square by its degrees of freedom is nearly normal.
    return float(chi_square / (freedom * (1 - spread + 5 * spread**0.5) ** 3))


def _yes(section: str, case: str, is_right: bool, detail: str) -> Comparison:
    verdict = Verdict.RIGHT if is_right else Verdict.WRONG
    return Comparison(section, "sample", case, None, None, verdict, "" if is_right else detail)


def _name(setting: tuple[float, int, float, float]) -> str:
    names = ("temperature", "top-k", "top-p", "min-p")
    off = (None, 0, 1.0, 0.0)
    return ", ".join(f"{n} {v:g}" for n, v, o in zip(names, setting, off, strict=True) if v != o)
