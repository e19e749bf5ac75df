// All that is known of the runs, as it grows; and the lines that are drawn from it.

import { deviation, lastUpTo, mean } from "./numbers.js";
import { PACKED } from "./source.js";

const MOST_SNAPSHOTS_KEPT = 64;
const MOST_TROUBLES = 20;

export class Store {
  constructor() {
    Object.assign(this, { runs: [], trials: new Map(), table: null, version: 0, source: null, frozen: false, troubles: [] });
    this.snapshots = new Map();
    this.loading = new Set();
    this.series = new Map();
    this.listeners = [];
  }

  onChange(listener) {
    this.listeners.push(listener);
  }

  changed() {
    this.version += 1;
    this.series.clear();
    for (const listener of this.listeners) listener();
  }

  take(kind, value) {
    if (kind === "runs") this.runs = value.runs;
    else if (kind === "table") this.table = value;
    else if (kind === "frozen") this.frozen = true;
    else if (kind === "connection") this.connected = value;
    else if (kind === "trouble") this.troubles = [...new Set([...this.troubles, value])].slice(-MOST_TROUBLES);
    else for (const [key, news] of Object.entries(value)) this.grow(key, news);
    this.changed();
  }

  grow(key, news) {
    let trial = this.trials.get(key);
    if (!trial || trial.generation !== news.generation || news.from === 0) {
      const { run, arm, seed, generation } = news;
      trial = { key, run, arm, seed, generation, columns: {}, seconds: {}, times: {}, names: {}, snapshots: [], detail: null };
      this.trials.set(key, trial);
      this.snapshots.forEach((_, name) => name.startsWith(`${key}@`) && this.snapshots.delete(name));
    }
    extend(trial.columns, news.columns, news.from);
    extend(trial.seconds, news.seconds, news.seconds_from);
    extend(trial.times, { at: news.times }, news.seconds_from);
    trial.names = news.names;
    trial.snapshots.length = Math.min(trial.snapshots.length, news.snapshots_from);
    trial.snapshots.push(...news.snapshots);
    trial.note = news.snapshots_note;
    trial.problems = news.problems;
    trial.deadLayers = news.dead_layers;
    trial.byClass = news.by_class;
    if (trial.detail && news.detail) trial.detail = joined(trial.detail, news.detail);
  }

  // Every client and layer of a trial, if it is here already; else it is fetched and everybody told.
  detail(key) {
    const trial = this.trials.get(key);
    if (!trial) return null;
    const whole = trial.detail && trial.detail.length === trial.columns.round.length;
    if (!whole) this.load(`${key}#${trial.columns.round.length}`, async () => {
      const found = await this.source.detail(key);
      if (found && this.trials.get(key)?.generation === found.generation) this.trials.get(key).detail = found;
      else trial.lacksDetail = found === null;
    });
    return trial.detail;
  }

  // The similarity matrix that was the newest at a round; an older one while that is on its way.
  snapshot(key, round) {
    const trial = this.trials.get(key);
    const at = trial ? lastUpTo(trial.snapshots, round) : -1;
    if (at < 0) return null;
    const name = `${key}@${trial.snapshots[at]}`;
    if (!this.snapshots.has(name)) {
      this.load(name, async () => {
        const found = await this.source.snapshot(key, trial.snapshots[at]);
        if (!found) return;
        this.snapshots.set(name, found);
        if (this.snapshots.size > MOST_SNAPSHOTS_KEPT) this.snapshots.delete(this.snapshots.keys().next().value);
      });
    }
    return this.snapshots.get(name) ?? null;
  }

  async load(name, work) {
    if (this.loading.has(name)) return;
    this.loading.add(name);
    await work();
    // What failed is not asked for again and again: only when there is more of it.
    if (this.loading.size > 5000) this.loading.clear();
    if (name.includes("@")) this.loading.delete(name);
    this.changed();
  }

  // The arms of all runs: what gets a colour.
  arms() {
    const several = this.runs.length > 1;
    const out = [];
    this.runs.forEach((run, number) => {
      for (const own of run.arms) {
        const { name } = own;
        const trials = [...this.trials.values()]
          .filter((t) => t.run === number && t.arm === name && t.seed >= run.seeds.first && t.seed < run.seeds.first + run.seeds.count)
          .sort((a, b) => a.seed - b.seed);
        out.push({ id: `${number}/${name}`, run: number, label: several ? `${run.name}/${name}` : name, own, trials, index: own.look });
      }
    });
    return out;
  }

  // A line for each arm: mean and deviation over the seeds that are furthest; the others on their own.
  lines(column) {
    if (!this.series.has(column)) {
      const found = this.arms().map((arm) => ({ ...arm, ...overSeeds(arm.trials, column) }));
      this.series.set(column, found.filter((line) => line.rounds.length || line.behind.length));
    }
    return this.series.get(column);
  }
}

// Why a chart of clients or layers has nothing to show yet.
export function noDetail(trial) {
  if (trial?.lacksDetail) return "Left out of this file to keep it small: safari view shows it.";
  return trial?.columns.round?.length ? "Loading …" : "No rounds yet.";
}

// What a client is called: by its number, and on a real network by the name that its operator gave it.
export function nameOf(trial, client) {
  const name = trial.names[client];
  return name && name !== String(client) ? `${name} (client ${client})` : `client ${client}`;
}

// When a round was recorded, as far as that is known.
export function timeOf(trial, round) {
  const k = lastUpTo(trial.seconds.round ?? [], round);
  return (k >= 0 && trial.seconds.round[k] === round && trial.times.at[k]) || "";
}

function overSeeds(trials, column) {
  const begun = trials.filter((t) => t.columns.round?.length);
  const length = Math.max(0, ...begun.map((t) => t.columns.round.length));
  const ahead = begun.filter((t) => t.columns.round.length === length);
  const out = { rounds: [], means: [], spreads: [], seeds: ahead.length, behind: [] };
  if (!ahead.length) return out;
  const columns = ahead.map((t) => t.columns[column]);
  // Not every run has every metric.
  if (columns.includes(undefined)) return out;
  const rounds = ahead[0].columns.round;
  for (let k = 0; k < length; k += 1) {
    const values = columns.map((c) => c[k]);
    if (values.some((v) => v === null)) continue;
    out.rounds.push(rounds[k]);
    out.means.push(values.length === 1 ? values[0] : mean(values));
    out.spreads.push(deviation(values));
  }
  const one = (t) => ({ rounds: [], values: [], seed: t.seed });
  for (const trial of begun.filter((t) => t.columns.round.length < length)) {
    const line = one(trial);
    trial.columns[column].forEach((v, k) => {
      if (v === null) return;
      line.rounds.push(trial.columns.round[k]);
      line.values.push(v);
    });
    if (line.rounds.length) out.behind.push(line);
  }
  return out;
}

function extend(columns, news, from) {
  for (const [name, values] of Object.entries(news)) {
    const column = (columns[name] ??= []);
    while (column.length < from) column.push(null);
    column.length = from;
    for (const value of values) column.push(value);
  }
}

// Details that follow each other become one; what does not follow is fetched anew.
function joined(old, news) {
  if (news.from !== old.from + old.length || news.generation !== old.generation) return old;
  if (news.layers.length !== old.layers.length) return old;
  const out = { ...old, length: old.length + news.length };
  for (const name of PACKED) {
    out[name] = new old[name].constructor(old[name].length + news[name].length);
    out[name].set(old[name]);
    out[name].set(news[name], old[name].length);
  }
  return out;
}
