// How alike the server holds each pair of clients for, and who stands in for whom because of it.

import { HeatMap } from "./heat.js";
import { exact, lastUpTo, plural } from "./numbers.js";
import { nameOf, noDetail } from "./store.js";
import { clientColours, colours } from "./theme.js";

const MOST_IN_A_RING = 40;
const MOST_IN_A_TABLE = 1000;
const LAST = 50;

export class SimilarityMap extends HeatMap {
  constructor(page) {
    super(page, { id: "similarity", title: "Similarity", unit: "less alike → more alike", square: true });
  }

  snapshot() {
    return this.page.remember("snapshot", () => this.findSnapshot());
  }

  findSnapshot() {
    const found = this.page.store.snapshot(this.page.selected(), this.page.round());
    // The last one stays while the next is on its way.
    if (found) this.shown = { key: this.page.selected(), found };
    return this.shown?.key === this.page.selected() ? this.shown.found : null;
  }

  empty() {
    const trial = this.page.trial();
    if (!trial?.snapshots.length) return trial?.note ?? "No rounds yet.";
    if (this.snapshot()) return null;
    return lastUpTo(trial.snapshots, this.page.round()) < 0 ? `The first snapshot is of round ${trial.snapshots[0]}.` : "…";
  }

  caption() {
    const trial = this.page.trial();
    const at = trial ? trial.snapshots[lastUpTo(trial.snapshots, this.page.round())] : undefined;
    const how = { similarity: "ordered by group", labels: "ordered by label", number: "in the order of their numbers" }[this.page.clients().by];
    return `How alike the server takes each pair of clients to be, after round ${at}; clients ${how}. ${trial?.note ?? ""}`;
  }

  size() {
    return { rows: this.snapshot().clients, columns: this.snapshot().clients };
  }

  // Without the furthest hundredths: one outlier would take all the colours.
  domain() {
    const { matrix } = this.snapshot();
    if (this.known?.matrix !== matrix) {
      const values = Float32Array.from(matrix).filter(Number.isFinite).sort();
      const at = (share) => values[Math.round(share * (values.length - 1))] ?? 0;
      const [low, high] = values.length > 200 ? [at(0.02), at(0.98)] : [at(0), at(1)];
      this.known = { matrix, ends: high > low ? [low, high] : [low - 1, low] };
    }
    return this.known.ends;
  }

  value(i, j) {
    const { order } = this.page.clients();
    const { clients, matrix } = this.snapshot();
    return i === j ? NaN : matrix[order[i] * clients + order[j]];
  }

  rowName(i) {
    return String(this.page.clients().order[i]);
  }

  columnName(j) {
    return this.rowName(j);
  }

  // Lines between the groups.
  over(pen, frame) {
    const { order, groups } = this.page.clients();
    const { card } = colours();
    order.forEach((client, k) => {
      if (k === 0 || groups[client] === groups[order[k - 1]]) return;
      const [x, y] = [frame.x + k * frame.cell[0], frame.y + k * frame.cell[1]];
      pen.path([[[x, frame.y], [x, frame.y + frame.tall]], [[frame.x, y], [frame.x + frame.wide, y]]], { line: card, width: 2 });
    });
  }

  tell(i, j) {
    const [one, other] = [this.rowName(i), this.rowName(j)];
    const value = this.value(i, j);
    const words = i === j ? "itself" : Number.isFinite(value) ? exact(value) : "never seen together";
    return { title: `Clients ${one} and ${other}`, rows: [{ label: "similarity", value: words }] };
  }

  csv() {
    const { clients, matrix } = this.snapshot();
    const names = Array.from({ length: clients }, (_, k) => k);
    const cell = (i, j) => (i === j || !Number.isFinite(matrix[i * clients + j]) ? "" : Number(exact(matrix[i * clients + j])));
    return [["client", ...names], ...names.map((i) => [i, ...names.map((j) => cell(i, j))])];
  }

  summary() {
    const { groups } = this.page.clients();
    return `${plural(groups.length, "client")} in ${plural(new Set(groups).size, "group")}`;
  }
}

// A ring of clients for a few, a table for many.
export class StandIns extends HeatMap {
  constructor(page) {
    super(page, { id: "stand-ins", title: "Who stands in for whom", unit: "times", square: true });
  }

  detail() {
    return this.page.store.detail(this.page.selected());
  }

  // times[j * clients + i]: how often i stood in for j.
  counts() {
    const detail = this.detail();
    const rounds = this.page.trial().columns.round;
    const end = Math.min(lastUpTo(rounds, this.page.round()) + 1, detail.length);
    const start = { all: 0, last: Math.max(0, end - LAST), one: Math.max(0, end - 1) }[this.page.state.get("window")];
    const key = `${this.page.selected()}|${detail.generation}`;
    if (this.kept?.key !== key) this.kept = { key, ...nobody(detail.clients), start, end: start };
    if (this.kept.start !== start || this.kept.end !== end) {
      moveTo(this.kept, detail, start, end);
      this.kept.most = this.kept.times.reduce((a, b) => Math.max(a, b), 0);
    }
    return Object.assign(this.kept, { from: rounds[start], to: rounds[end - 1] });
  }

  empty() {
    if (!this.detail()?.length) return noDetail(this.page.trial());
    if (!this.detail().clients || this.detail().clients > MOST_IN_A_TABLE) return "Too many clients to show them one by one.";
    return this.counts().most ? null : "Nobody stood in for anybody in these rounds.";
  }

  caption() {
    const detail = this.detail();
    if (!detail?.length) return "";
    const { from, to } = this.counts();
    const when = from === to ? `in round ${to}` : `in rounds ${from} to ${to}`;
    const how = this.ring()
      ? "A band runs from the one that stood in (thick end) to the one that was lost; the wider, the more often."
      : "Rows were lost, columns stood in for them.";
    return `${how} Counted ${when}; where several shared, the first.`;
  }

  ring() {
    return this.detail().clients <= MOST_IN_A_RING;
  }

  size() {
    return { rows: this.counts().clients, columns: this.counts().clients };
  }

  domain() {
    return [0, Math.max(1, this.counts().most)];
  }

  value(i, j) {
    const { order } = this.page.clients();
    const { clients, times } = this.counts();
    return times[order[i] * clients + order[j]] || NaN;
  }

  rowName(i) {
    return String(this.page.clients().order[i]);
  }

  columnName(j) {
    return this.rowName(j);
  }

  height(width) {
    return this.detail() && this.ring() ? Math.min(width, 520) : super.height(width);
  }

  draw(pen, width, height) {
    if (!this.ring()) return super.draw(pen, width, height);
    const places = this.places(width, height);
    const { clients, times, given, most } = this.counts();
    const { order, groups } = this.page.clients();
    const shades = clientColours(groups);
    const { ink, card } = colours();
    const centre = [width / 2, height / 2];
    const links = [];
    for (let j = 0; j < clients; j += 1) {
      for (let i = 0; i < clients; i += 1) if (times[j * clients + i]) links.push([times[j * clients + i], i, j]);
    }
    // The widest at the bottom, so that none is hidden.
    links.sort((a, b) => b[0] - a[0]);
    for (const [count, i, j] of links) {
      const faint = this.focus !== undefined && this.focus !== i && this.focus !== j;
      const band = taper(places[i], places[j], centre, 1.5 + (14 * count) / most);
      pen.path([band], { fill: shades[i], alpha: faint ? 0.08 : 0.72, close: true });
    }
    const busiest = Math.max(1, ...given);
    for (const client of order) {
      const [x, y, angle] = places[client];
      pen.circle(x, y, 5 + 8 * Math.sqrt(given[client] / busiest), shades[client], card);
      const out = 24;
      const anchor = Math.abs(Math.cos(angle)) < 0.3 ? "middle" : Math.cos(angle) > 0 ? "start" : "end";
      pen.text(String(client), x + out * Math.cos(angle) - (anchor === "start" ? 4 : anchor === "end" ? -4 : 0), y + out * Math.sin(angle), ink, { anchor, size: 13, weight: 600 });
    }
    return undefined;
  }

  places(width, height) {
    const { order } = this.page.clients();
    const radius = Math.min(width, height) / 2 - 44;
    const places = [];
    order.forEach((client, k) => {
      const angle = (2 * Math.PI * (k + 0.5)) / order.length - Math.PI / 2;
      places[client] = [width / 2 + radius * Math.cos(angle), height / 2 + radius * Math.sin(angle), angle];
    });
    return places;
  }

  hover(px, py, width, height) {
    if (!this.ring()) return super.hover(px, py, width, height);
    const places = this.places(width, height);
    let [best, least] = [-1, 40];
    places.forEach(([x, y], client) => {
      const far = Math.hypot(px - x, py - y);
      if (far < least) [best, least] = [client, far];
    });
    if (best < 0) return null;
    const { clients, times, given, taken } = this.counts();
    const partners = (of) => {
      const found = Array.from({ length: clients }, (_, k) => [of(k), k]).filter(([n]) => n);
      return found.sort((a, b) => b[0] - a[0]).slice(0, 5).map(([n, k]) => `${k} (${n})`).join(", ");
    };
    const rows = [
      { label: "stood in for others", value: plural(given[best], "time") },
      { label: "others stood in for it", value: plural(taken[best], "time") },
    ];
    if (given[best]) rows.push({ label: "for", value: partners((k) => times[k * clients + best]) });
    if (taken[best]) rows.push({ label: "by", value: partners((k) => times[best * clients + k]) });
    return { title: capital(nameOf(this.page.trial(), best)), rows, focus: best };
  }

  move(point, dx, dy, width, height) {
    if (!this.ring()) return super.move(point, dx, dy, width, height);
    const { order } = this.page.clients();
    const places = this.places(width, height);
    const here = point ? order.findIndex((client) => Math.hypot(places[client][0] - point.x, places[client][1] - point.y) < 3) : -1;
    const next = here < 0 ? 0 : (here + dx + dy + order.length) % order.length;
    const [x, y] = places[order[next]];
    return { x, y };
  }

  tell(i, j) {
    const { order } = this.page.clients();
    const { clients, times } = this.counts();
    const count = times[order[i] * clients + order[j]];
    const trial = this.page.trial();
    return { title: `${capital(nameOf(trial, order[j]))} for ${nameOf(trial, order[i])}`, rows: [{ label: "stood in", value: plural(count, "time") }] };
  }

  csv() {
    const { clients, times } = this.counts();
    const rows = [["lost", "stand-in", "times"]];
    for (let j = 0; j < clients; j += 1) {
      for (let i = 0; i < clients; i += 1) if (times[j * clients + i]) rows.push([j, i, times[j * clients + i]]);
    }
    return rows;
  }

  summary() {
    const { given, most } = this.counts();
    const total = given.reduce((a, b) => a + b, 0);
    return `${plural(total, "time")} in all, at most ${most} for one pair`;
  }
}

function nobody(clients) {
  return { clients, times: new Int32Array(clients * clients), given: new Int32Array(clients), taken: new Int32Array(clients), most: 0 };
}

// Count the rounds from start to end, by way of those in which this differs from what is counted already.
function moveTo(kept, detail, start, end) {
  const overlap = Math.max(start, kept.start) < Math.min(end, kept.end);
  if (!overlap) Object.assign(kept, nobody(kept.clients), { start, end: start });
  tally(kept, detail, kept.start, start, -1);
  tally(kept, detail, start, kept.start, 1);
  tally(kept, detail, kept.end, end, 1);
  tally(kept, detail, end, kept.end, -1);
  Object.assign(kept, { start, end });
}

function tally({ clients, times, given, taken }, { stand_in: standIn }, start, end, sign) {
  for (let t = start; t < end; t += 1) {
    for (let j = 0; j < clients; j += 1) {
      const cell = t * clients + j;
      if (!standIn[cell]) continue;
      times[j * clients + standIn[cell] - 1] += sign;
      given[standIn[cell] - 1] += sign;
      taken[j] += sign;
    }
  }
}

// A band along a curve through the middle, wide where it begins and thin where it ends.
function taper([x0, y0], [x1, y1], [cx, cy], width) {
  if (x0 === x1 && y0 === y1) return [[x0 - width, y0 - width], [x0 + width, y0 - width], [x0 + width, y0 + width]];
  const steps = 24;
  const [left, right] = [[], []];
  // Neighbours bow less than those across the ring.
  const far = Math.hypot(x1 - x0, y1 - y0) / (2 * Math.hypot(x0 - cx, y0 - cy) || 1);
  const pull = 0.25 + 0.5 * (1 - far);
  const [mx, my] = [(x0 + x1) / 2 + (cx - (x0 + x1) / 2) * pull, (y0 + y1) / 2 + (cy - (y0 + y1) / 2) * pull];
  for (let k = 0; k <= steps; k += 1) {
    const t = k / steps;
    const x = (1 - t) ** 2 * x0 + 2 * t * (1 - t) * mx + t ** 2 * x1;
    const y = (1 - t) ** 2 * y0 + 2 * t * (1 - t) * my + t ** 2 * y1;
    const [dx, dy] = [(1 - t) * (mx - x0) + t * (x1 - mx), (1 - t) * (my - y0) + t * (y1 - my)];
    const length = Math.hypot(dx, dy) || 1;
    const half = (width / 2) * (1 - 0.85 * t);
    left.push([x - (half * dy) / length, y + (half * dx) / length]);
    right.push([x + (half * dy) / length, y - (half * dx) / length]);
  }
  return [...left, ...right.reverse()];
}

function capital(words) {
  return words[0].toUpperCase() + words.slice(1);
}
