// What the cluster tells of itself, while a view that shows it is open.

import { watch } from "./api.js";

const AGAIN_MS = 3000;

export class Cluster {
  constructor(fail) {
    this.fail = fail;
    this.listeners = [];
    this.abort = null;
  }

  listen(listener) {
    this.listeners.push(listener);
  }

  // Nobody is asked for what nobody sees: each watcher costs the cluster a little.
  setOpen(isOpen) {
    if (isOpen === Boolean(this.abort)) return;
    this.abort?.abort();
    this.abort = isOpen ? new AbortController() : null;
    if (isOpen) this.run(this.abort.signal);
  }

  async run(signal) {
    try {
      for await (const { event, data } of watch(signal)) {
        for (const listener of this.listeners) listener(event, data);
      }
    } catch (error) {
      if (signal.aborted) return;
      this.fail(error);
    }
    if (!signal.aborted) setTimeout(() => !signal.aborted && this.run(signal), AGAIN_MS);
  }
}
