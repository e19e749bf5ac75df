// What stands around the charts: how the runs stand, the arms, the table, the config and what was skipped.

import { el, fill } from "./dom.js";
import { NOTHING, asCount, asPercent, asSeconds, mean, plural } from "./numbers.js";
import { scoreOf, tellMetric } from "./scores.js";
import { lineDash, lineName } from "./theme.js";

const RECENT = 20;

export function drawHead(page, node) {
  const { runs } = page.store;
  document.title = runs.length ? `${runs.map((run) => run.name).join(", ")} · SAFARI` : "SAFARI";
  fill(
    node,
    runs.map((run, number) =>
      el("div", { class: "run" }, el("h1", {}, run.name), standing(page, run, number), el("p", { class: "setting" }, run.setting)),
    ),
  );
}

function standing(page, run, number) {
  const trials = [...page.store.trials.values()].filter((t) => t.run === number);
  const done = trials.reduce((sum, t) => sum + Math.min(run.rounds, t.columns.round.length), 0);
  const all = run.rounds * run.seeds.count * run.arms.length;
  let words = `${run.state}, ${plural(run.rounds, "round")}`;
  if (run.state !== "finished") {
    const left = remaining(run, trials, all - done);
    words = `${run.state}, ${asPercent(done / all, 0)} of all rounds`;
    if (run.state === "running" && left !== null) words += `, about ${asSeconds(left)} left`;
  }
  if (page.store.frozen && run.state === "running") words = `${asPercent(done / all, 0)} of all rounds, when this was written`;
  const lost = !page.store.frozen && page.store.connected === false ? ", connection lost, trying again" : "";
  return el("p", { class: `state ${lost ? "stopped" : run.state}` }, el("span", { class: "dot", "aria-hidden": "true" }), words + lost);
}

// What the rounds took lately, times those that are left.
function remaining(run, trials, left) {
  const recent = trials.flatMap((t) => {
    const parts = Object.entries(t.seconds).filter(([name]) => name !== "round");
    const length = t.seconds.round?.length ?? 0;
    return Array.from({ length: Math.min(RECENT, length) }, (_, k) => parts.reduce((sum, [, v]) => sum + (v[length - 1 - k] ?? 0), 0));
  });
  return recent.length ? mean(recent) * left : null;
}

// A tile an arm: its newest numbers; pressed when it is shown. Tiles stay what they are while their numbers
// change: a click may last longer than a round.
export function drawTiles(page, node) {
  const arms = page.store.arms();
  const key = JSON.stringify(arms.map((arm) => [arm.id, arm.label]));
  if (node.dataset.shown !== key) {
    node.dataset.shown = key;
    fill(node, arms.map((arm) => tile(page, arm)));
  }
  const off = new Set(page.state.get("off"));
  const lineOf = (arm, column) => page.store.lines(column).find((line) => line.id === arm.id);
  arms.forEach((arm, k) => {
    const metric = scoreOf(page.store.runs[arm.run]);
    const [, big, small] = node.children[k].children;
    node.children[k].setAttribute("aria-pressed", String(!off.has(arm.id)));
    fill(big, score(metric, lineOf(arm, metric.name)));
    small.textContent = words(arm, metric.name === "loss" ? null : lineOf(arm, "loss"));
  });
}

function tile(page, arm) {
  const toggle = () => {
    const off = new Set(page.state.get("off"));
    if (!off.delete(arm.id)) off.add(arm.id);
    page.state.set({ off: [...off] });
  };
  return el(
    "button",
    { type: "button", class: "tile", title: [arm.own.about, ...arm.own.changes].join("\n"), onclick: toggle },
    el("span", { class: "name" }, swatch(arm.index), arm.label),
    el("span", { class: "big" }),
    el("span", { class: "small" }),
  );
}

function swatch(index) {
  const dashed = lineDash(index).length > 0;
  return el("span", { class: `swatch${dashed ? " dashed" : ""}`, "aria-hidden": "true", style: { "--line": lineName(index) } });
}

function score(metric, line) {
  if (!line?.means.length) return [NOTHING];
  const spread = line.seeds > 1 ? el("small", {}, ` ± ${tellMetric(metric, line.spreads.at(-1)).replace(" %", "")}`) : null;
  return [tellMetric(metric, line.means.at(-1)), spread];
}

function words(arm, loss) {
  const sum = (name) => arm.trials.reduce((all, t) => all + t.columns[name].reduce((a, b) => a + b, 0), 0);
  const arrived = sum("arrived");
  const asked = arrived + sum("missing");
  const round = Math.max(0, ...arm.trials.map((t) => t.columns.round.at(-1) ?? 0));
  if (!round) return "not begun";
  const parts = [`round ${asCount(round)}`];
  if (loss?.means.length) parts.push(`loss ${loss.means.at(-1).toFixed(3)}`);
  if (asked) parts.push(`${asPercent(arrived / asked, 0)} arrived`);
  return parts.join(" · ").replaceAll(" %", "\u00a0%").replaceAll("% a", "%\u00a0a");
}

export function drawTable(page, node) {
  const { table } = page.store;
  if (!table || JSON.stringify(table) === node.dataset.shown) return;
  node.dataset.shown = JSON.stringify(table);
  const head = el("tr", {}, table.header.map((name) => el("th", { scope: "col" }, name)));
  const body = table.rows.map(([first, ...rest]) => el("tr", {}, el("th", { scope: "row" }, first), rest.map((text) => el("td", {}, text))));
  fill(
    node,
    scroll("Results", el("table", { class: "numbers" }, el("thead", {}, head), el("tbody", {}, body))),
    ...(table.warnings.length ? [el("ul", { class: "warnings" }, table.warnings.map((text) => el("li", {}, text)))] : []),
    el("p", { class: "caption" }, table.note),
  );
}

// Which classes each arm has learned: a row an arm, the mean over its seeds in the newest test.
export function drawClasses(page, node) {
  const rows = page.store.arms().flatMap((arm) => {
    const known = arm.trials.map((trial) => trial.byClass).filter((row) => row?.length);
    return known.length ? [{ arm, means: known[0].map((_, k) => mean(known.map((row) => row[k]).filter((v) => v !== null && v !== undefined))) }] : [];
  });
  node.hidden = !rows.length;
  const key = JSON.stringify(rows.map(({ arm, means }) => [arm.label, means]));
  if (!rows.length || key === node.dataset.shown) return;
  node.dataset.shown = key;
  const count = Math.max(...rows.map(({ means }) => means.length));
  const names = page.store.runs[rows[0].arm.run].class_names;
  const head = el("tr", {}, el("th", { scope: "col" }, "accuracy of class"), Array.from({ length: count }, (_, k) => el("th", { scope: "col" }, names[k] ?? String(k))));
  const body = rows.map(({ arm, means }) =>
    el("tr", {}, el("th", { scope: "row" }, arm.label), means.map((value) => el("td", { class: "share", style: { "--share": String(value || 0) } }, Number.isFinite(value) ? asPercent(value, 0) : NOTHING))),
  );
  fill(
    node,
    scroll("Accuracy by class", el("table", { class: "numbers" }, el("thead", {}, head), el("tbody", {}, body))),
    el("p", { class: "caption" }, "The global model in the newest test, mean over seeds: which classes an arm has learned, and which it has forgotten."),
  );
}

function scroll(label, table) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, table);
}

// Rules, then what differs between the runs, then everything.
export function drawConfig(page, node) {
  const { runs } = page.store;
  const key = JSON.stringify(runs.map((run) => [run.name, run.fields, run.arms, run.environment]));
  if (!runs.length || node.dataset.shown === key) return;
  node.dataset.shown = key;
  const parts = [el("h3", {}, "What the arms do"), rules(page)];
  if (runs.length > 1) parts.push(el("h3", {}, "What differs"), differences(runs));
  parts.push(el("h3", {}, "Made with"), environment(runs));
  for (const run of runs) {
    const title = runs.length > 1 ? `The whole config of ${run.name}` : "The whole config";
    parts.push(el("details", { class: "config" }, el("summary", {}, title), el("pre", { tabindex: "0" }, run.toml)));
  }
  fill(node, parts);
}

// An arm is its rule, and the settings in which it differs from the other arms.
function rules(page) {
  const arms = page.store.arms();
  const own = arms.some((arm) => arm.own.changes.length);
  const rows = arms.map((arm) => {
    const { rule, options, about, changes } = arm.own;
    const cells = [options ? `${rule} (${options})` : rule, about, ...(own ? [changes.join(", ") || NOTHING] : [])];
    return el("tr", {}, el("th", { scope: "row" }, swatch(arm.index), arm.label), cells.map((text) => el("td", {}, text)));
  });
  const head = headings("arm", "rule for the missing", "what the rule does", ...(own ? ["what else this arm changes"] : []));
  return scroll("Rules", el("table", {}, el("thead", {}, head), el("tbody", {}, rows)));
}

function headings(...names) {
  return el("tr", {}, names.map((name) => el("th", { scope: "col" }, name)));
}

function differing(runs) {
  const tables = runs.map((run) => new Map(run.fields));
  const keys = [...new Set(tables.flatMap((table) => [...table.keys()]))];
  return keys
    .map((key) => [key, tables.map((table) => table.get(key) ?? NOTHING)])
    .filter(([key, values]) => key !== "name" && new Set(values).size > 1);
}

function differences(runs) {
  const found = differing(runs);
  if (!found.length) return el("p", {}, "Nothing: these runs have the same config.");
  const rows = found.map(([key, values]) => el("tr", {}, el("th", { scope: "row" }, key), values.map((value) => el("td", {}, value))));
  const head = headings("field", ...runs.map((run) => run.name));
  return scroll("Differences between the configs", el("table", {}, el("thead", {}, head), el("tbody", {}, rows)));
}

function environment(runs) {
  const tables = runs.map((run) => new Map(run.environment));
  const keys = [...new Set(tables.flatMap((table) => [...table.keys()]))];
  if (!keys.length) return el("p", {}, "These runs do not say.");
  const rows = keys.map((key) => el("tr", {}, el("th", { scope: "row" }, key), tables.map((table) => el("td", {}, table.get(key) ?? NOTHING))));
  const head = headings("part", ...runs.map((run) => run.name));
  return scroll("Versions and hardware", el("table", {}, el("thead", {}, head), el("tbody", {}, rows)));
}

// What could not be read.
export function drawNotes(page, node) {
  const { runs, trials, troubles } = page.store;
  const lines = runs.flatMap((run) => run.problems.map((problem) => `${run.name}: ${problem}`));
  lines.push(...troubles.map((text) => `This page could not take some news: ${text}`));
  for (const trial of trials.values()) {
    const whose = `${runs[trial.run]?.name}, ${trial.arm}, seed ${trial.seed}`;
    for (const problem of trial.problems ?? []) lines.push(`${whose}: ${problem}`);
    for (const layer of trial.deadLayers ?? []) lines.push(`${whose}: layer ${layer} is dead, all of its weights are cut`);
  }
  const key = JSON.stringify(lines);
  if (node.dataset.shown === key) return;
  node.dataset.shown = key;
  node.hidden = !lines.length;
  fill(node, el("h2", {}, plural(lines.length, "note")), el("ul", {}, lines.map((line) => el("li", {}, line))));
}
