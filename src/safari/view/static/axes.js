// What charts over rounds have in common: one scale, one axis, one place for the cross-hair.

import { nearest, tickTexts, ticks } from "./numbers.js";
import { colours } from "./theme.js";

const LEFT = 58;
export const TOP = 10;
export const BOTTOM = 30;

class RoundScale {
  constructor([first, last], x0, x1) {
    Object.assign(this, { first, last: Math.max(last, first + 1), x0, x1 });
  }

  x(round) {
    return this.x0 + ((round - this.first) / (this.last - this.first)) * (this.x1 - this.x0);
  }

  round(x) {
    const share = Math.max(0, Math.min(1, (x - this.x0) / (this.x1 - this.x0)));
    return this.first + share * (this.last - this.first);
  }
}

// The rounds on the axes: what the address says, or all that the runs will have.
export function roundSpan(page) {
  return page.state.get("span") ?? [1, Math.max(2, ...page.store.runs.map((run) => run.rounds))];
}

export function drawRoundAxis(pen, scale, bottom, label = true) {
  const { soft, grid } = colours();
  pen.path([[[scale.x0, bottom], [scale.x1, bottom]]], { line: grid, width: 1 });
  const wanted = Math.max(2, Math.floor((scale.x1 - scale.x0) / 80));
  for (const round of ticks(scale.first, scale.last, wanted, true)) {
    const x = scale.x(round);
    pen.path([[[x, bottom], [x, bottom + 4]]], { line: soft, width: 1 });
    const room = scale.x1 + 10 - pen.measure(String(round)) / 2;
    pen.text(String(round), Math.min(x, room), bottom + 8, soft, { anchor: "middle", base: "top" });
  }
  if (label) pen.text("round", scale.x0 - 8, bottom + 8, soft, { anchor: "end", base: "top" });
}

export class ValueScale {
  constructor(low, high, top, bottom) {
    if (!(high > low)) {
      const room = Math.abs(low) * 0.1 || 1;
      [low, high] = [low - room, high + room];
    }
    Object.assign(this, { low, high, top, bottom });
  }

  y(value) {
    return this.bottom - ((value - this.low) / (this.high - this.low)) * (this.bottom - this.top);
  }
}

export function drawValueAxis(pen, scale, x0, x1, format) {
  const { soft, grid } = colours();
  const values = ticks(scale.low, scale.high, Math.max(2, Math.floor((scale.bottom - scale.top) / 44)));
  const texts = tickTexts(values, format);
  values.forEach((value, k) => {
    const y = scale.y(value);
    pen.path([[[x0, y], [x1, y]]], { line: grid, width: 1 });
    pen.text(texts[k], x0 - 8, y, soft, { anchor: "end" });
  });
}

// A chart over rounds: where the pointer is, and where the arrow keys lead.
export class RoundChart {
  constructor(page, options) {
    Object.assign(this, { page, zooms: true, right: 12 }, options);
  }

  scale(width) {
    return new RoundScale(roundSpan(this.page), LEFT, width - this.right);
  }

  // The rounds that the keys step through.
  steps() {
    const [first, last] = roundSpan(this.page);
    return { length: last - first + 1, at: (k) => first + k, near: (round) => Math.round(round) - first };
  }

  move(point, dx, dy, width, height) {
    const scale = this.scale(width);
    const steps = this.steps();
    if (!steps.length) return null;
    const middle = point?.y ?? height / 2;
    let k = point ? steps.near(scale.round(point.x)) + dx : dx < 0 ? steps.length - 1 : 0;
    k = Math.max(0, Math.min(steps.length - 1, k));
    return { x: scale.x(steps.at(k)), y: this.moveRow ? this.moveRow(middle, dy, height) : middle };
  }
}

export function stepsOf(rounds, [first, last]) {
  const inside = rounds.filter((round) => round >= first && round <= last);
  return { length: inside.length, at: (k) => inside[k], near: (round) => nearest(inside, round) };
}
