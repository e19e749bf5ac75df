// Where the data come from: a server that goes on telling, or what was frozen into this file.

// The arrays of a trial's details: a number for each round and client, or each round and layer.
export const PACKED = ["status", "stand_in", "stand_ins", "part", "layer_density", "layer_churn", "mask_age"];

const KINDS = { u1: Uint8Array, u2: Uint16Array, f4: Float32Array };

// Deflated bytes in base64 -> a typed array.
async function unpack({ kind, data }) {
  const text = atob(data);
  const bytes = new Uint8Array(text.length);
  for (let k = 0; k < text.length; k += 1) bytes[k] = text.charCodeAt(k);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new KINDS[kind](await new Response(stream).arrayBuffer());
}

async function unpackDetail(raw) {
  const arrays = await Promise.all(PACKED.map((name) => unpack(raw[name])));
  return { ...raw, ...Object.fromEntries(PACKED.map((name, k) => [name, arrays[k]])) };
}

async function unpackSnapshot(raw) {
  return { ...raw, matrix: await unpack(raw.matrix) };
}

export class LiveSource {
  constructor(tell) {
    this.tell = tell;
    this.connect();
  }

  connect() {
    const events = new EventSource("api/events");
    // One after the other, also where unpacking takes a while.
    let queue = Promise.resolve();
    const take = (kind) => (event) => {
      queue = queue.then(() => this.receive(kind, event.data)).catch((error) => {
        console.error(error);
        this.tell("trouble", `${kind}: ${error}`);
      });
    };
    for (const kind of ["runs", "trials", "table"]) events.addEventListener(kind, take(kind));
    events.addEventListener("open", () => this.tell("connection", true));
    // The browser tries again by itself, unless it was sent away.
    events.addEventListener("error", () => {
      this.tell("connection", false);
      if (events.readyState === EventSource.CLOSED) setTimeout(() => this.connect(), 3000);
    });
  }

  async receive(kind, text) {
    const value = JSON.parse(text);
    if (kind === "trials") {
      for (const news of Object.values(value)) if (news.detail) news.detail = await unpackDetail(news.detail);
    }
    this.tell(kind, value);
  }

  async detail(trial) {
    const found = await this.ask("detail", { trial });
    return found && unpackDetail(found);
  }

  async snapshot(trial, round) {
    const found = await this.ask("similarity", { trial, round });
    return found && unpackSnapshot(found);
  }

  async ask(what, query) {
    try {
      const response = await fetch(`api/${what}?${new URLSearchParams(query)}`);
      return response.ok ? await response.json() : null;
    } catch {
      return null;
    }
  }
}

export class FrozenSource {
  constructor(data, tell) {
    this.data = data;
    for (const kind of ["runs", "trials", "table"]) tell(kind, data[kind]);
    tell("frozen", true);
  }

  async detail(trial) {
    const found = this.data.details[trial];
    return found ? unpackDetail(found) : null;
  }

  async snapshot(trial, round) {
    const found = this.data.snapshots[trial]?.[round];
    return found ? unpackSnapshot(found) : null;
  }
}
