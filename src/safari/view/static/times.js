// Where a round's time goes: its parts, stacked.

import { BOTTOM, RoundChart, TOP, ValueScale, drawRoundAxis, drawValueAxis, roundSpan, stepsOf } from "./axes.js";
import { asSeconds, lastUpTo, mean, nearest, told } from "./numbers.js";
import { colours } from "./theme.js";

export class TimeChart extends RoundChart {
  constructor(page) {
    super(page, { id: "time", title: "Time of a round" });
  }

  seconds() {
    return this.page.trial()?.seconds ?? {};
  }

  parts() {
    return Object.keys(this.seconds()).filter((name) => name !== "round");
  }

  empty() {
    return this.seconds().round?.length && this.parts().length ? null : "No times were written down yet.";
  }

  caption() {
    return `Seconds by part, stacked: the mean of the rounds that fall on one place. Of ${this.page.whose()}.`;
  }

  legend() {
    const { parts } = colours();
    return this.parts().map((label, k) => ({ label, colour: parts[k % parts.length] })).reverse();
  }

  height(width) {
    return width < 480 ? 220 : 260;
  }

  steps() {
    return stepsOf(this.seconds().round, roundSpan(this.page));
  }

  draw(pen, width, height) {
    const x = this.scale(width);
    const names = this.parts();
    const { bins, tops } = this.bins(x, names);
    // A first round that sets things up may take far longer than all others.
    const sorted = tops.map((list) => list.at(-1)).sort((a, b) => a - b);
    const usual = sorted[Math.floor(0.98 * (sorted.length - 1))] ?? 1;
    const y = new ValueScale(0, 1.1 * (usual || 1), TOP, height - BOTTOM);
    drawValueAxis(pen, y, x.x0, x.x1, "seconds");
    const { parts } = colours();
    pen.clip(x.x0, TOP, x.x1 - x.x0 + 1, height - BOTTOM - TOP, () => {
      names.forEach((_, k) => {
        const upper = tops.flatMap((list, b) => edges(bins[b], x).map((px) => [px, y.y(list[k])]));
        const lower = tops.flatMap((list, b) => edges(bins[b], x).map((px) => [px, y.y(k ? list[k - 1] : 0)]));
        pen.path([[...upper, ...lower.reverse()]], { fill: parts[k % parts.length], close: true });
      });
    });
    drawRoundAxis(pen, x, height - BOTTOM);
  }

  // Means over as many rounds as share three pixels, summed up part by part.
  bins(x, names) {
    const { round: rounds } = this.seconds();
    const first = lastUpTo(rounds, x.first - 1) + 1;
    const last = lastUpTo(rounds, x.last);
    const per = Math.max(1, Math.ceil((last - first + 1) / ((x.x1 - x.x0) / 3)));
    const [bins, tops] = [[], []];
    for (let k = first; k <= last; k += per) {
      const end = Math.min(k + per, last + 1);
      let sum = 0;
      bins.push([rounds[k], rounds[end - 1]]);
      tops.push(names.map((name) => (sum += mean(this.seconds()[name].slice(k, end).filter((v) => v !== null)) ?? 0)));
    }
    return { bins, tops };
  }

  hover(px, py, width) {
    const { round: rounds } = this.seconds();
    const k = nearest(rounds, this.scale(width).round(px));
    if (k < 0) return null;
    const { parts } = colours();
    const rows = this.parts().map((name, p) => ({ label: name, value: told(this.seconds()[name][k], "seconds"), colour: parts[p % parts.length] }));
    const all = this.parts().reduce((sum, name) => sum + (this.seconds()[name][k] ?? 0), 0);
    return { title: `Round ${rounds[k]}`, rows: [...rows.reverse(), { label: "all", value: told(all, "seconds") }], round: rounds[k] };
  }

  csv() {
    const names = ["round", ...this.parts()];
    return [names, ...this.seconds().round.map((_, k) => names.map((name) => this.seconds()[name][k]))];
  }

  summary() {
    const values = this.parts().map((name) => `${name} ${asSeconds(mean(this.seconds()[name].filter((v) => v !== null)))}`);
    return `mean of all rounds: ${values.join("; ")}`;
  }
}

function edges([first, last], x) {
  return [x.x(first - 0.5), x.x(last + 0.5)];
}
