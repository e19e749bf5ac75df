// Lines by round, one an arm, with the seeds as a band.

import { BOTTOM, RoundChart, TOP, ValueScale, drawRoundAxis, drawValueAxis, roundSpan, stepsOf } from "./axes.js";
import { lastUpTo, nearest, plural, told } from "./numbers.js";
import { colours, lineColour, lineDash } from "./theme.js";

const NAME_GAP = 16;

export class LineChart extends RoundChart {
  constructor(page, options) {
    super(page, { format: "number", floor: null, ceiling: null, references: () => [], tall: 260, ...options });
  }

  lines() {
    const off = new Set(this.page.state.get("off"));
    return this.page.store.lines(this.column).filter((line) => !off.has(line.id));
  }

  // What most runs do not have stays away where there is none of it.
  absent() {
    return Boolean(this.optional) && !this.page.store.lines(this.column).length;
  }

  empty() {
    if (!this.page.store.lines(this.column).length) return this.nothing ?? "No numbers yet.";
    return this.lines().length ? null : "All arms are hidden.";
  }

  caption() {
    const lines = this.lines();
    const seeds = Math.max(0, ...lines.map((line) => line.seeds));
    // Said once, at the first chart.
    const band = seeds > 1 && this.wide ? ` Mean over ${plural(seeds, "seed")}; bands are ± one standard deviation, here and below.` : "";
    const thin = this.wide && lines.some((line) => line.behind.length) ? " Thin lines: seeds that are not so far yet." : "";
    return this.about + band + thin;
  }

  legend() {
    return this.lines().map((line) => ({ label: line.label, colour: lineColour(line.index), dash: lineDash(line.index) }));
  }

  height(width) {
    return width < 480 ? 220 : this.tall;
  }

  steps() {
    return stepsOf(longest(this.lines()), roundSpan(this.page));
  }

  draw(pen, width, height) {
    const lines = this.lines();
    const { soft } = colours();
    this.right = this.nameRoom(pen, lines, width);
    const x = this.scale(width);
    const y = this.values(lines, TOP, height - BOTTOM, width);
    drawValueAxis(pen, y, x.x0, x.x1, this.format);
    drawRoundAxis(pen, x, height - BOTTOM);
    pen.clip(x.x0, TOP - 4, x.x1 - x.x0 + 1, height - BOTTOM - TOP + 8, () => {
      for (const { label, value } of this.references()) {
        if (value < y.low || value > y.high) continue;
        pen.path([[[x.x0, y.y(value)], [x.x1, y.y(value)]]], { line: soft, width: 1, dash: [3, 4] });
        // Where curves rise is the left: the right has more room below.
        pen.text(label, x.x1 - 4, y.y(value) + 10, soft, { anchor: "end" });
      }
      for (const line of lines) this.drawBand(pen, line, x, y);
      for (const line of lines) {
        if (this.points) this.drawPoints(pen, line, x, y);
        else this.drawLine(pen, line, x, y);
      }
    });
    if (this.right > 20) this.drawNames(pen, lines, x, y, height);
  }

  drawBand(pen, line, x, y) {
    const { low, high } = this.thinned(line, x);
    if (!low.some((p, k) => p[1] !== high[k][1])) return;
    const edge = (points) => points.map(([px, v]) => [px, y.y(v)]);
    pen.path([[...edge(high), ...edge(low).reverse()]], { fill: lineColour(line.index), alpha: 0.16, close: true });
  }

  drawLine(pen, line, x, y) {
    const style = { line: lineColour(line.index), dash: lineDash(line.index) };
    const { middle } = this.thinned(line, x);
    pen.path([middle.map(([px, v]) => [px, y.y(v)])], { ...style, width: 2 });
    if (middle.length === 1) pen.circle(middle[0][0], y.y(middle[0][1]), 3, style.line);
    for (const { rounds, values } of line.behind) {
      const points = thin(rounds, values, values, values, x).middle;
      pen.path([points.map(([px, v]) => [px, y.y(v)])], { ...style, width: 1, alpha: 0.8 });
    }
  }

  // What is measured now and then says nothing about the rounds between.
  drawPoints(pen, line, x, y) {
    const behind = line.behind.map(({ rounds, values }) => thin(rounds, values, values, values, x).middle);
    const { middle } = this.thinned(line, x);
    const radius = middle.length > 150 ? 1.5 : 2.5;
    for (const points of [middle, ...behind]) for (const [px, v] of points) pen.circle(px, y.y(v), radius, lineColour(line.index));
  }

  // The same for the band, the line and the axis of one drawing.
  thinned(line, x) {
    const key = [x.first, x.last, x.x0, x.x1].join();
    if (line.thinned?.key !== key) line.thinned = { key, ...this.thin(line, x) };
    return line.thinned;
  }

  thin(line, x) {
    const low = line.means.map((m, k) => m - line.spreads[k]);
    const high = line.means.map((m, k) => m + line.spreads[k]);
    return thin(line.rounds, line.means, low, high, x);
  }

  values(lines, top, bottom, width) {
    const x = this.scale(width);
    let [low, high, lowest] = [Infinity, -Infinity, Infinity];
    for (const line of lines) {
      const { low: below, high: above, middle } = this.thinned(line, x);
      for (const [, v] of below) low = Math.min(low, v);
      for (const [, v] of above) high = Math.max(high, v);
      for (const other of line.behind) {
        for (const [, v] of thin(other.rounds, other.values, other.values, other.values, x).middle) {
          [low, high] = [Math.min(low, v), Math.max(high, v)];
        }
      }
      for (const [, v] of middle) [low, high, lowest] = [Math.min(low, v), Math.max(high, v), Math.min(lowest, v)];
    }
    for (const { value, always } of this.references()) if (always) [low, high] = [Math.min(low, value), Math.max(high, value)];
    if (this.floor !== null) low = Math.min(low, this.floor);
    const room = 0.05 * (high - low || Math.abs(high) || 1);
    if (low !== this.floor) low -= room;
    high += room;
    if (this.ceiling !== null) high = Math.min(high, this.ceiling);
    if (this.bottom !== undefined && lowest >= this.bottom) low = Math.max(low, this.bottom);
    return new ValueScale(low, high, top, bottom);
  }

  nameRoom(pen, lines, width) {
    const widest = Math.max(0, ...lines.map((line) => pen.measure(line.label, 12, 600)));
    return width < 480 || widest > width / 4 || lines.length > 12 ? 12 : widest + 22;
  }

  // Names where the lines end, never one over another.
  drawNames(pen, lines, x, y, height) {
    const ends = lines
      .filter((line) => line.means.length)
      .map((line) => {
        const at = Math.max(0, lastUpTo(line.rounds, x.last));
        const value = line.means[at];
        return { line, x: Math.min(x.x1, x.x(line.rounds[at])), y: Math.max(TOP, Math.min(height - BOTTOM, y.y(value))) };
      })
      .sort((a, b) => a.y - b.y);
    const places = spreadOut(ends.map((end) => end.y), NAME_GAP, TOP, height - BOTTOM);
    ends.forEach((end, k) => {
      const colour = lineColour(end.line.index);
      const from = end.x > x.x1 - 24 ? x.x1 : end.x + 4;
      const to = from + 10;
      pen.path([[[from, end.y], [to, places[k]]]], { line: colour, width: 1.5 });
      pen.text(end.line.label, to + 4, places[k], colours().ink, { weight: 600 });
    });
  }

  hover(px, py, width) {
    const x = this.scale(width);
    const wanted = x.round(px);
    const lines = this.lines();
    const all = longest(lines);
    const at = nearest(all, wanted);
    if (at < 0) return null;
    const round = all[at];
    const rows = [];
    for (const line of lines) {
      const k = line.rounds[nearest(line.rounds, round)] === round ? nearest(line.rounds, round) : -1;
      if (k >= 0) {
        const spread = line.seeds > 1 ? ` ± ${told(line.spreads[k], this.format)}` : "";
        rows.push({ label: line.label, value: told(line.means[k], this.format) + spread, colour: lineColour(line.index), order: line.means[k] });
      }
      for (const other of line.behind) {
        const j = nearest(other.rounds, round);
        if (other.rounds[j] !== round) continue;
        rows.push({ label: `${line.label}, seed ${other.seed}`, value: told(other.values[j], this.format), colour: lineColour(line.index), order: other.values[j] });
      }
    }
    rows.sort((a, b) => b.order - a.order);
    return { title: `Round ${round}`, rows, round };
  }

  csv() {
    const rows = [["round", "arm", "mean", "standard deviation", "seeds"]];
    for (const line of this.lines()) {
      line.rounds.forEach((round, k) => rows.push([round, line.label, line.means[k], line.seeds > 1 ? line.spreads[k] : "", line.seeds]));
      for (const { rounds, values, seed } of line.behind) {
        rounds.forEach((round, k) => rows.push([round, `${line.label}, seed ${seed}`, values[k], "", 1]));
      }
    }
    return rows;
  }

  summary() {
    const last = this.lines()
      .filter((line) => line.means.length)
      .map((line) => `${line.label} ${told(line.means.at(-1), this.format)} in round ${line.rounds.at(-1)}`);
    return last.join("; ");
  }
}

function longest(lines) {
  let best = [];
  for (const line of lines) {
    for (const rounds of [line.rounds, ...line.behind.map((b) => b.rounds)]) if (rounds.length > best.length) best = rounds;
  }
  return best;
}

// What the screen can show: each point, or the mean of what falls on two pixels, between its extremes.
function thin(rounds, means, lows, highs, x) {
  const first = Math.max(0, lastUpTo(rounds, x.first - 1));
  const last = Math.min(rounds.length - 1, lastUpTo(rounds, x.last) + 1);
  const out = { middle: [], low: [], high: [] };
  const bins = Math.max(2, Math.floor((x.x1 - x.x0) / 2));
  const per = Math.ceil((last - first + 1) / bins);
  for (let k = first; k <= last; k += per) {
    const end = Math.min(k + per, last + 1);
    let [sum, at, low, high] = [0, 0, Infinity, -Infinity];
    for (let i = k; i < end; i += 1) {
      sum += means[i];
      at += rounds[i];
      low = Math.min(low, lows[i]);
      high = Math.max(high, highs[i]);
    }
    const px = x.x(at / (end - k));
    out.middle.push([px, sum / (end - k)]);
    out.low.push([px, low]);
    out.high.push([px, high]);
  }
  return out;
}

// Places near the wanted ones (ascending), `gap` apart, between low and high as long as there is room.
function spreadOut(wanted, gap, low, high) {
  const out = [];
  for (const place of wanted) out.push(Math.max(place, out.length ? out.at(-1) + gap : low));
  for (let k = out.length - 1, edge = high; k >= 0; k -= 1, edge = out[k + 1] - gap) out[k] = Math.min(out[k], edge);
  return out;
}
