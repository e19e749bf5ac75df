// The state of the page, kept in its address: a link shows the same view to somebody else.

const DEFAULTS = {
  off: [], // arms that are hidden, as run/arm
  span: null, // [first, last] round on the axes; null: all
  trial: null, // whose clients are shown
  round: null, // where the slider stands; null: at the newest
  order: "group", // of the clients: group or number
  window: "all", // rounds that count for stand-ins: all, last (50), one
  theme: "auto", // auto, light, dark
};
const CHOICES = { order: ["group", "number"], window: ["all", "last", "one"], theme: ["auto", "light", "dark"] };

function readAddress(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const state = { ...DEFAULTS, off: given.getAll("off"), trial: given.get("trial") };
  const span = /^(\d{1,9})-(\d{1,9})$/.exec(given.get("span") ?? "");
  if (span && Number(span[1]) < Number(span[2])) state.span = [Number(span[1]), Number(span[2])];
  if (/^\d{1,9}$/.test(given.get("round") ?? "")) state.round = Number(given.get("round"));
  for (const [name, allowed] of Object.entries(CHOICES)) {
    if (allowed.includes(given.get(name))) state[name] = given.get(name);
  }
  return state;
}

function writeAddress(state) {
  const out = new URLSearchParams();
  for (const arm of state.off) out.append("off", arm);
  if (state.span) out.set("span", state.span.join("-"));
  if (state.trial) out.set("trial", state.trial);
  if (state.round !== null) out.set("round", state.round);
  for (const name of Object.keys(CHOICES)) if (state[name] !== DEFAULTS[name]) out.set(name, state[name]);
  return `#${out}`;
}

export class PageState {
  constructor() {
    this.values = readAddress(location.hash);
    this.listeners = [];
    addEventListener("hashchange", () => this.take(readAddress(location.hash), false));
  }

  get(name) {
    return this.values[name];
  }

  set(changes) {
    this.take({ ...this.values, ...changes }, true);
  }

  onChange(listener) {
    this.listeners.push(listener);
  }

  take(values, write) {
    const changed = Object.keys(values).filter((k) => JSON.stringify(values[k]) !== JSON.stringify(this.values[k]));
    this.values = values;
    // An empty hash would jump to the top of the page in some browsers.
    if (write && changed.length) history.replaceState(null, "", writeAddress(values));
    if (changed.length) for (const listener of this.listeners) listener(new Set(changed));
  }
}
