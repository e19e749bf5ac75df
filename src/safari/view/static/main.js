// The page: what is known, what is chosen, and the charts of both.

import { PageState } from "./address.js";
import { Card } from "./card.js";
import { clusterByLabels, clusterBySimilarity } from "./cluster.js";
import { Controls } from "./controls.js";
import { LabelMap } from "./heat.js";
import { ChurnMap, DensityMap, LifeMap } from "./layers.js";
import { LineChart } from "./lines.js";
import { asBytes } from "./numbers.js";
import { drawClasses, drawConfig, drawHead, drawNotes, drawTable, drawTiles } from "./panels.js";
import { metricsOf, scoreCharts } from "./scores.js";
import { SimilarityMap, StandIns } from "./similarity.js";
import { FrozenSource, LiveSource } from "./source.js";
import { Store } from "./store.js";
import { ArrivalStrip } from "./strip.js";
import { onSystemTheme, setTheme } from "./theme.js";
import { TimeChart } from "./times.js";
import { Tip } from "./tip.js";

const FLOAT32 = 4;

class Page {
  constructor() {
    this.state = new PageState();
    this.store = new Store();
    this.hover = { round: null };
    this.tip = new Tip();
    this.cards = [];
    this.memory = new Map();
  }

  // Charts ask for the same things thousands of times in a drawing: found out once, until something changes.
  remember(name, find) {
    if (!this.memory.has(name)) this.memory.set(name, find());
    return this.memory.get(name);
  }

  selected() {
    return this.remember("selected", () => this.findSelected());
  }

  clients() {
    return this.remember("clients", () => this.findClients());
  }

  // Whose clients are shown: as the address says, or the first arm in which somebody stood in.
  findSelected() {
    const wanted = this.state.get("trial");
    if (wanted && this.store.trials.has(wanted)) return wanted;
    const trials = this.store.arms().flatMap((arm) => arm.trials);
    const busy = trials.find((t) => t.snapshots.length) ?? trials.find((t) => t.columns.stood_in?.some((n) => n > 0));
    return (busy ?? trials.at(-1))?.key ?? null;
  }

  trial() {
    return this.store.trials.get(this.selected()) ?? null;
  }

  // The same in words.
  whose() {
    const trial = this.trial();
    const arm = this.store.arms().find((a) => a.trials.includes(trial));
    return arm ? `${arm.label}, seed ${trial.seed}` : "";
  }

  run() {
    return this.store.runs[this.trial()?.run] ?? null;
  }

  // The round of the slider.
  round() {
    const last = this.trial()?.columns.round.at(-1) ?? 1;
    return Math.max(1, Math.min(last, this.state.get("round") ?? last));
  }

  // The clients in their order, with their groups: by similarity where it is known, else by labels.
  findClients() {
    const trial = this.trial();
    const count = this.run()?.drawn_clients ?? 0;
    const numbers = Array.from({ length: count }, (_, k) => k);
    const plain = { order: numbers, groups: numbers.map(() => 0), by: "number" };
    if (!trial) return plain;
    const last = trial.snapshots.at(-1);
    const snapshot = last ? this.store.snapshot(trial.key, last) : null;
    const key = `${trial.key}|${trial.generation}|${snapshot?.round}|${this.run().label_counts !== null}`;
    // While the newest snapshot is on its way, the order of the one before stays.
    const stale = this.grouped?.trial === trial.key && last && !snapshot && this.grouped.by === "similarity";
    if (!stale && this.grouped?.key !== key) {
      let found = plain;
      if (snapshot?.clients === count) found = { ...clusterBySimilarity(snapshot), by: "similarity" };
      else if (this.run().label_counts) found = { ...clusterByLabels(this.run().label_counts), by: "labels" };
      this.grouped = { key, trial: trial.key, ...found };
    }
    return this.state.get("order") === "number" ? { ...this.grouped, order: numbers, by: "number" } : this.grouped;
  }

  hoverRound(round, from) {
    const before = this.hover.round;
    this.hover.round = round;
    for (const card of this.cards) if (card === from || before !== round) card.drawOver();
  }

  refresh() {
    this.memory.clear();
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.updateScores();
      drawHead(this, document.getElementById("runs"));
      drawTiles(this, document.getElementById("tiles"));
      drawTable(this, document.getElementById("results"));
      drawClasses(this, document.getElementById("classes"));
      drawConfig(this, document.getElementById("config"));
      drawNotes(this, document.getElementById("notes"));
      this.controls.draw();
      for (const card of this.cards) card.refresh();
      document.body.dataset.version = this.store.version;
    });
  }

  dense() {
    const sizes = new Set(this.store.runs.map((run) => run.numbers).filter((n) => n !== null));
    return [...sizes].map((n) => ({ label: `dense: ${asBytes(FLOAT32 * n)}`, value: FLOAT32 * n, always: true }));
  }

  // The runs say which metrics there are; charts of others are made when they change.
  updateScores() {
    const key = JSON.stringify(metricsOf(this.store.runs));
    if (!this.store.runs.length || this.scoresKey === key) return;
    this.scoresKey = key;
    this.cards = this.cards.filter((card) => !card.isScore);
    const taken = new Set(this.cards.map((card) => card.chart.id));
    const made = scoreCharts(this, taken).map((chart) => Object.assign(new Card(this, chart), { isScore: true }));
    this.cards.unshift(...made);
    document.getElementById("scores").replaceChildren(...made.map((card) => card.node));
  }
}

function charts(page) {
  const lines = (options) => new LineChart(page, options);
  const counted = "Not counted in this run (wire.every).";
  return {
    clients: [new ArrivalStrip(page), new SimilarityMap(page), new StandIns(page), new LabelMap(page), new TimeChart(page)],
    bytes: [
      lines({ id: "bytes-up", title: "Bytes up", column: "bytes_up", format: "bytes", about: "One upload as really encoded, mean over the clients, in the rounds in which it was counted.", points: true, floor: 0, references: () => page.dense(), nothing: counted }),
      lines({ id: "bytes-down", title: "Bytes down", column: "bytes_down", format: "bytes", about: "The broadcast as really encoded, in the rounds in which it was counted.", points: true, floor: 0, references: () => page.dense(), nothing: counted }),
    ],
    masks: [
      lines({ id: "density", title: "Mask density", column: "support", format: "percent", about: "Share of the prunable weights that is kept: in the mask that the server chose, or else not 0 in the global model.", floor: 0 }),
      lines({ id: "churn", title: "Mask churn", column: "churn", format: "percent", about: "Share of the prunable weights that changed between kept and cut in the round.", floor: 0 }),
      new DensityMap(page),
      new ChurnMap(page),
      new LifeMap(page),
    ],
  };
}

function begin() {
  const page = new Page();
  setTheme(page.state.get("theme"));
  page.controls = new Controls(page);
  document.getElementById("controls").append(...page.controls.general);
  document.getElementById("client-controls").append(...page.controls.clients);
  for (const [room, found] of Object.entries(charts(page))) {
    for (const chart of found) {
      const card = new Card(page, chart);
      page.cards.push(card);
      document.getElementById(room).append(card.node);
    }
  }
  page.store.onChange(() => page.refresh());
  const dress = () => {
    setTheme(page.state.get("theme"));
    page.refresh();
  };
  page.state.onChange((changed) => (changed.has("theme") ? dress() : page.refresh()));
  onSystemTheme(dress);
  const tell = (kind, value) => page.store.take(kind, value);
  const frozen = document.getElementById("frozen");
  page.store.source = frozen ? new FrozenSource(JSON.parse(frozen.textContent), tell) : new LiveSource(tell);
  page.refresh();
}

begin();
