// Writes an answer token by token, each in the look of the drafter that it counts for.

import { el, lookOf } from "./dom.js";

export class Painter {
  constructor(host) {
    this.host = host;
    host.replaceChildren();
    this.encoder = new TextEncoder();
    this.decoder = new TextDecoder();
    this.rest = new Uint8Array(); // said, and not yet shown
    this.tokens = []; // that came, and are not yet shown
    this.run = null;
  }

  push(piece) {
    this.rest = joined(this.rest, this.encoder.encode(piece.text));
    this.tokens.push(...piece.tokens);
    while (this.tokens.length) {
      const [token] = this.tokens;
      const end = endOf(token.bytes, this.rest);
      // Its text may come later: the server holds back what could become a stop string.
      if (end < 0 && this.rest.length <= token.bytes.length) return;
      this.tokens.shift();
      if (end < 0) continue;
      this.show(this.rest.subarray(0, end), token.drafters);
      this.rest = this.rest.subarray(end);
    }
  }

  end() {
    const drafters = this.tokens[0]?.drafters ?? [];
    this.show(this.rest, drafters);
    this.rest = new Uint8Array();
  }

  show(bytes, drafters) {
    const text = this.decoder.decode(bytes, { stream: true });
    if (!text) return;
    const owner = drafters[0] ?? "";
    if (this.run?.owner !== owner) {
      const title = drafters.length ? `drafted by ${drafters.join(", ")}` : undefined;
      const node = el("span", owner ? { class: `token d${lookOf(owner)}`, title } : {});
      this.host.append(node);
      this.run = { owner, node };
    }
    this.run.node.append(text);
  }
}

function joined(one, other) {
  const all = new Uint8Array(one.length + other.length);
  all.set(one);
  all.set(other, one.length);
  return all;
}

// Where in `data` a token ends that begins there; -1 if it does not.
function endOf(token, data) {
  if (startsAt(token, data, 0)) return token.length;
  // Alone, a token may lack the space before it; special ones are no text at all.
  const bare = token.filter((byte, index) => byte > 32 || (index > 0 && index < token.length - 1));
  if (!bare.length) return -1;
  for (let start = 0; start <= 2; start += 1) {
    if (startsAt(bare, data, start)) return start + bare.length;
  }
  return -1;
}

function startsAt(token, data, start) {
  return (
    token.length + start <= data.length &&
    token.every((byte, index) => data[start + index] === byte)
  );
}
