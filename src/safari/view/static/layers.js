// Layers over rounds: how much of each is left, how much changes, how long its weights live.

import { BOTTOM, RoundChart, TOP, drawRoundAxis, roundSpan } from "./axes.js";
import { BAR, drawBar } from "./heat.js";
import { NOTHING, exact, lastUpTo, told } from "./numbers.js";
import { noDetail } from "./store.js";
import { colours, paint, rgb } from "./theme.js";

const BELOW = BOTTOM + BAR + 6;
// Rounds over which the life of weights is estimated.
const WINDOW = 50;

class LayerMap extends RoundChart {
  constructor(page, options) {
    super(page, { wide: false, format: "percent", ...options });
  }

  detail() {
    return this.page.store.detail(this.page.selected());
  }

  // A number for each round and layer; NaN where nothing is known.
  values() {
    return this.detail()[this.what];
  }

  empty() {
    const detail = this.detail();
    if (!detail?.length) return noDetail(this.page.trial());
    if (!detail.layers.length) return "These records do not name layers.";
    return this.values().some((v) => !Number.isNaN(v)) ? null : "These records are from before this was written down.";
  }

  caption() {
    return `${this.about} Of ${this.page.whose()}.`;
  }

  row() {
    return Math.max(6, Math.min(24, Math.floor(320 / Math.max(1, this.detail()?.layers.length ?? 1))));
  }

  height() {
    return TOP + BELOW + this.row() * (this.detail()?.layers.length ?? 8);
  }

  domain() {
    return [0, this.largest()];
  }

  largest() {
    const detail = this.detail();
    const key = `${this.page.selected()}|${detail.generation}|${detail.length}`;
    if (this.known?.key !== key) {
      let high = 0;
      for (const v of this.values()) if (v > high && v < Infinity) high = v;
      this.known = { key, high: high || 1 };
    }
    return this.known.high;
  }

  draw(pen, width, height) {
    const detail = this.detail();
    const x = this.scale(width);
    const { soft } = colours();
    const rounds = this.page.trial().columns.round;
    const bottom = height - BELOW;
    const [low, high] = roundSpan(this.page);
    const first = lastUpTo(rounds, low - 1) + 1;
    const last = Math.min(lastUpTo(rounds, high), detail.length - 1);
    if (last >= first) {
      const image = this.image(detail, first, last, Math.floor(x.x1 - x.x0));
      const from = x.x(rounds[first] - 0.5);
      const to = x.x(rounds[first] + image.width * image.per - 0.5);
      pen.clip(x.x0, TOP, x.x1 - x.x0, bottom - TOP, () => pen.raster(image, from, TOP, to - from, bottom - TOP));
    }
    const row = (bottom - TOP) / detail.layers.length;
    const every = Math.max(1, Math.ceil(14 / row));
    detail.layers.forEach((name, k) => {
      if (k % every === 0) pen.text(String(k + 1), x.x0 - 10, TOP + (k + 0.5) * row, soft, { anchor: "end" });
    });
    drawRoundAxis(pen, x, bottom);
    drawBar(pen, x.x0, bottom + BOTTOM, Math.min(280, x.x1 - x.x0), this.domain(), this.unit, this.format);
  }

  // A pixel for each round and layer, or the mean of the rounds that fall on one.
  image(detail, first, last, pixels) {
    const count = detail.layers.length;
    const values = this.values();
    const [low, high] = this.domain();
    const per = Math.ceil((last - first + 1) / Math.max(1, pixels));
    const width = Math.ceil((last - first + 1) / per);
    const data = new Uint8ClampedArray(4 * width * count);
    const [unknown, special] = [rgb(colours().unknown), rgb(colours().refused)];
    for (let column = 0; column < width; column += 1) {
      const start = first + column * per;
      const end = Math.min(start + per, last + 1);
      for (let layer = 0; layer < count; layer += 1) {
        let sum = 0;
        for (let t = start; t < end; t += 1) sum += values[t * count + layer];
        const share = (sum / (end - start) - low) / (high - low);
        const blank = this.isDead(sum) ? special : unknown;
        paint(data, 4 * (layer * width + column), this.shade(share), blank);
      }
    }
    return { width, height: count, data, per };
  }

  // Where in the ramp a share lies; NaN: not in it.
  shade(share) {
    return share;
  }

  isDead() {
    return false;
  }

  layerAt(py, height) {
    const detail = this.detail();
    const k = Math.floor(((py - TOP) / (height - BELOW - TOP)) * detail.layers.length);
    return Math.max(0, Math.min(detail.layers.length - 1, k));
  }

  moveRow(y, dy, height) {
    const row = (height - TOP - BELOW) / this.detail().layers.length;
    return TOP + (Math.max(0, Math.min(this.detail().layers.length - 1, this.layerAt(y, height) + dy)) + 0.5) * row;
  }

  hover(px, py, width, height) {
    const detail = this.detail();
    const rounds = this.page.trial().columns.round;
    const t = Math.min(lastUpTo(rounds, Math.round(this.scale(width).round(px))), detail.length - 1);
    if (t < 0) return null;
    const layer = this.layerAt(py, height);
    const value = this.values()[t * detail.layers.length + layer];
    return { title: `Round ${rounds[t]}`, rows: [{ label: `${layer + 1}: ${detail.layers[layer]}`, value: this.words(value) }], round: rounds[t] };
  }

  words(value) {
    return told(value, this.format);
  }

  csv() {
    const detail = this.detail();
    const rounds = this.page.trial().columns.round;
    const rows = [["round", ...detail.layers]];
    const count = detail.layers.length;
    for (let t = 0; t < detail.length; t += 1) {
      rows.push([rounds[t], ...Array.from(this.values().slice(t * count, (t + 1) * count), (v) => Number(v.toPrecision(6)))]);
    }
    return rows;
  }

  summary() {
    const detail = this.detail();
    const count = detail.layers.length;
    const last = this.values().slice((detail.length - 1) * count);
    return detail.layers.map((name, k) => `${name} ${this.words(last[k])}`).join("; ");
  }
}

// What is kept of each layer. A layer with nothing left is not the same as one without data.
export class DensityMap extends LayerMap {
  constructor(page) {
    super(page, { id: "layer-density", title: "Density by layer", what: "layer_density", unit: "kept", about: "Share of each layer's weights that is kept, first layer on top." });
  }

  domain() {
    return [0, 1];
  }

  isDead(sum) {
    return sum === 0;
  }

  shade(share) {
    return share > 0 ? share : NaN;
  }

  words(value) {
    return value === 0 ? "0 %: dead, nothing of it is left" : super.words(value);
  }

  legend() {
    const dead = this.detail()?.layer_density?.some((v) => v === 0);
    return dead ? [{ label: "dead: nothing of the layer is left", colour: colours().refused }] : [];
  }
}

// What changes in each layer; where nothing does, it stays blank.
export class ChurnMap extends LayerMap {
  constructor(page) {
    super(page, { id: "layer-churn", title: "Churn by layer", what: "layer_churn", unit: "changed (root scale)", about: "Share of each layer's weights that changed between kept and cut in the round." });
  }

  // Churn is mostly far below its largest: the root keeps small changes visible.
  shade(share) {
    return share > 0 ? Math.sqrt(share) : NaN;
  }
}

// How long a weight stays in the model: what is kept over what is cut a round (Little's law), in the last rounds.
export class LifeMap extends LayerMap {
  constructor(page) {
    super(page, { id: "layer-life", title: "Life of weights by layer", format: "number", unit: "rounds" });
  }

  // The mask policy may have kept count itself.
  counted() {
    return Boolean(this.detail()?.mask_age?.some((v) => !Number.isNaN(v)));
  }

  values() {
    const detail = this.detail();
    if (this.counted()) return detail.mask_age;
    const key = `${this.page.selected()}|${detail.generation}|${detail.length}`;
    if (this.kept?.key !== key) this.kept = { key, values: lives(detail) };
    return this.kept.values;
  }

  // Masks that rest have nothing to show.
  absent() {
    const detail = this.detail();
    return Boolean(detail?.length) && !this.values().some((v) => Number.isFinite(v));
  }

  caption() {
    const about = this.counted()
      ? "For how many rounds the kept weights have been in the mask, on average."
      : `Mean number of rounds that a weight stays: kept weights over weights cut a round, in the last ${WINDOW} rounds. Blank where that is longer than these rounds.`;
    return `${about} Of ${this.page.whose()}.`;
  }

  shade(share) {
    return Number.isFinite(share) ? share : NaN;
  }

  words(value) {
    if (value === Infinity) return `more than ${WINDOW} rounds, or than the run so far`;
    return Number.isNaN(value) ? NOTHING : `${exact(Number(value.toPrecision(3)))} rounds`;
  }
}

// Grown minus cut is the change of the density, grown plus cut is the churn.
function lives({ layers, length, layer_density: density, layer_churn: churn }) {
  const count = layers.length;
  const out = new Float32Array(length * count).fill(NaN);
  for (let layer = 0; layer < count; layer += 1) {
    const at = (t) => density[t * count + layer];
    const cut = (t) => Math.max(0, churn[t * count + layer] - (at(t) - at(t - 1))) / 2;
    let [alive, lost] = [0, 0];
    // The first round is the first cut: what it takes away was never trained.
    for (let t = 1; t < length; t += 1) {
      alive += at(t - 1);
      lost += cut(t);
      if (t > WINDOW) {
        alive -= at(t - WINDOW - 1);
        lost -= cut(t - WINDOW);
      }
      // What is longer than the rounds that were looked at cannot be told from them.
      const life = alive > 0 ? alive / Math.max(lost, 1e-12) : NaN;
      out[t * count + layer] = life > Math.min(t, WINDOW) ? Infinity : life;
    }
  }
  return out;
}
