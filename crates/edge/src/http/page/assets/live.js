// Repeated reads of what is seen.

import { Refused } from "/page/api.js";

// The codes of replies that a repetition does not change: the caller may not make the call, or the service has no such object.
const FINAL = [400, 403, 404, 501];

// Reads at the interval after each reply, while the page is visible. Returns a function that ends it.
export function live(interval, read, failed) {
  let [timer, isOver] = [undefined, false];
  const turn = async () => {
    let again = true;
    if (!document.hidden) {
      try {
        await read(() => isOver);
      } catch (error) {
        again = !(error instanceof Refused && FINAL.includes(error.status));
        if (!isOver) failed(error);
      }
    }
    if (again && !isOver) timer = setTimeout(turn, interval);
  };
  turn();
  return () => {
    isOver = true;
    clearTimeout(timer);
  };
}
