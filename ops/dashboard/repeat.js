// Something done over and over: slower while it fails, not at all while nobody looks at the page.

const LONGEST_WAIT_SECONDS = 15;

/**
 * Do `task` at once and then `seconds()` after each end. It answers false to end it, and is asked again later when it
 * throws. Gives back a function that ends it.
 */
export function repeat(task, seconds) {
  let timer = null;
  let isStopped = false;
  let isRunning = false;
  let failures = 0;

  const later = () => {
    const wait = Math.min(seconds() * 2 ** failures, Math.max(LONGEST_WAIT_SECONDS, seconds()));
    timer = setTimeout(turn, wait * 1000);
  };

  async function turn() {
    clearTimeout(timer);
    if (isStopped || isRunning || document.hidden) return;
    isRunning = true;
    let goesOn = true;
    try {
      goesOn = (await task()) !== false;
      failures = 0;
    } catch {
      failures += 1;
    } finally {
      isRunning = false;
    }
    if (!goesOn) isStopped = true;
    if (!isStopped) later();
  }

  const onVisible = () => document.hidden || turn();
  document.addEventListener("visibilitychange", onVisible);
  turn();
  return () => {
    isStopped = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", onVisible);
  };
}
