// What can be set: rounds on the axes, whose clients, which round, colours of the page.

import { el, fill } from "./dom.js";
import { roundSpan } from "./axes.js";

export class Controls {
  constructor(page) {
    this.page = page;
    const { state } = page;
    this.first = number("First round on the axes", () => this.setSpan());
    this.last = number("Last round on the axes", () => this.setSpan());
    this.all = el("button", { type: "button", class: "plain", onclick: () => state.set({ span: null }) }, "All rounds");
    this.theme = choice("Colours", { auto: "as the system", light: "light", dark: "dark" }, (theme) => state.set({ theme }));
    this.trial = choice("Arm and seed", {}, (trial) => state.set({ trial, round: null }));
    this.order = choice("Order", { group: "by group", number: "by number" }, (order) => state.set({ order }));
    this.window = choice("Stand-ins of", { all: "all rounds up to it", last: "the last 50 rounds", one: "this round alone" }, (window) => state.set({ window }));
    this.round = el("input", { type: "range", min: 1, max: 1, step: 1, id: "round", oninput: () => this.slide() });
    this.shown = el("output", { for: "round", class: "round" });
    const span = el("fieldset", { class: "span" }, el("legend", {}, "Rounds"), this.first, el("span", { "aria-hidden": "true" }, "to"), this.last, this.all);
    this.general = [span, this.theme.label];
    this.clients = [
      this.trial.label,
      this.order.label,
      el("div", { class: "slider" }, el("label", { for: "round" }, "Round"), this.round, this.shown),
      this.window.label,
    ];
  }

  setSpan() {
    const [first, last] = [Number(this.first.value), Number(this.last.value)];
    if (Number.isInteger(first) && Number.isInteger(last) && first >= 1 && last > first) this.page.state.set({ span: [first, last] });
  }

  slide() {
    const value = Number(this.round.value);
    // At its end it follows the run.
    this.page.state.set({ round: value >= Number(this.round.max) ? null : value });
  }

  draw() {
    const { state, store } = this.page;
    const [first, last] = roundSpan(this.page);
    if (document.activeElement !== this.first) this.first.value = first;
    if (document.activeElement !== this.last) this.last.value = last;
    this.all.disabled = state.get("span") === null;
    for (const name of ["theme", "order", "window"]) this[name].select.value = state.get(name);
    this.drawTrials(store);
    const rounds = this.page.trial()?.columns.round ?? [];
    const end = rounds.at(-1) ?? 1;
    this.round.max = end;
    this.round.value = this.page.round();
    this.round.disabled = rounds.length < 2;
    const text = state.get("round") === null ? `${end}, the newest` : `${this.page.round()} of ${end}`;
    this.shown.textContent = text;
    this.round.setAttribute("aria-valuetext", `round ${text}`);
  }

  drawTrials(store) {
    const arms = store.arms().filter((arm) => arm.trials.length);
    const key = JSON.stringify(arms.map((arm) => arm.trials.map((t) => t.key)));
    if (this.trialKey !== key) {
      this.trialKey = key;
      fill(this.trial.select, arms.flatMap((arm) => arm.trials.map((t) => el("option", { value: t.key }, `${arm.label}, seed ${t.seed}`))));
    }
    const selected = this.page.selected();
    if (selected) this.trial.select.value = selected;
  }
}

function number(label, react) {
  return el("input", { type: "number", min: 1, step: 1, inputmode: "numeric", "aria-label": label, onchange: react });
}

function choice(label, options, react) {
  const select = el("select", { onchange: () => react(select.value) });
  fill(select, Object.entries(options).map(([value, text]) => el("option", { value }, text)));
  return { select, label: el("label", { class: "choice" }, el("span", {}, label), select) };
}
