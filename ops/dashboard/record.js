// One request as /admin/requests tells it, put into the words of the table and of its own view.

import { plain } from "./words.js";

const MISSED_SHARE = 0.05;
const MISSED_TOKENS = 64;

/** `state`: "running", "done", "cancelled" or "failed"; of several answers the first that has a result speaks. */
export function summary(record) {
  const { answers } = record;
  const answer = answers.find((each) => each.result) ?? answers[0];
  const { result, timings_seconds: timings } = answer ?? {};
  const state = stateOf(record, answers);
  return {
    id: record.request_id,
    answers: answers.length,
    startedMs: record.started_unix_ms,
    endpoint: record.endpoint.replace(/^\/v1\//, ""),
    state,
    outcome: outcomeOf(state, record, answer),
    path: result?.reuse ?? null,
    cached: result?.cached_tokens ?? null,
    prompt: result?.prompt_tokens ?? null,
    hasMissed: Boolean(result) && hasMissed(result),
    ttft: timings?.ttft ?? null,
    rate: rateOf(result, timings),
    total: timings?.total ?? null,
  };
}

function stateOf({ outcome }, answers) {
  if (outcome === null && answers.some((answer) => answer.finish_reason === null)) return "running";
  if (outcome === "cancelled" || answers.every((answer) => answer.finish_reason === "cancelled")) return "cancelled";
  const hasFailed = answers.some((answer) => answer.finish_reason === "error" || answer.error);
  return hasFailed || (outcome !== null && outcome !== "ok") ? "failed" : "done";
}

function outcomeOf(state, { outcome }, answer) {
  if (state === "running") return "";
  if (state === "failed") return plain(answer?.error?.code ?? outcome ?? "error");
  return answer?.finish_reason ?? "";
}

/** More was achievable than was reused, and by more than a rounding. */
export const hasMissed = ({ achievable_tokens, cached_tokens }) =>
  achievable_tokens - cached_tokens > Math.max(MISSED_TOKENS, achievable_tokens * MISSED_SHARE);

const rateOf = (result, timings) =>
  result && timings?.decode > 0 && result.completion_tokens > 0 ? result.completion_tokens / timings.decode : null;
