// Tables of numbers as colours: similarities, labels, layers over rounds.

import { BOTTOM, RoundChart, TOP, drawRoundAxis, roundSpan } from "./axes.js";
import { asPercent, exact, lastUpTo, tickTexts, told } from "./numbers.js";
import { colours, paint, rgb } from "./theme.js";

const BAR = 34;

// A table with rows and columns that are not rounds. Subclasses say size(), value(i, j), names and words.
export class HeatMap {
  constructor(page, options) {
    Object.assign(this, { page, zooms: false, most: 460 }, options);
  }

  frame(width) {
    const { rows, columns } = this.size();
    const room = width - 44 - 8;
    const cell = Math.min(room / columns, this.square ? this.most / rows : Infinity);
    const tall = this.square ? cell * rows : Math.max(40, Math.min(this.most, 20 * rows));
    const wide = cell * columns;
    return { x: 44 + (room - wide) / 2, y: 22, wide, tall, cell: [wide / columns, tall / rows] };
  }

  height(width) {
    const { y, tall } = this.frame(width);
    return y + tall + BAR + 18;
  }

  draw(pen, width) {
    const { rows, columns } = this.size();
    const frame = this.frame(width);
    const [low, high] = this.domain();
    const { soft, unknown } = colours();
    const blank = rgb(unknown);
    const data = new Uint8ClampedArray(4 * rows * columns);
    for (let i = 0; i < rows; i += 1) {
      for (let j = 0; j < columns; j += 1) {
        paint(data, 4 * (i * columns + j), (this.value(i, j) - low) / (high - low || 1), blank);
      }
    }
    pen.raster({ width: columns, height: rows, data }, frame.x, frame.y, frame.wide, frame.tall);
    const stepX = Math.max(1, Math.ceil((columns > 100 ? 34 : 24) / frame.cell[0]));
    const stepY = Math.max(1, Math.ceil(14 / frame.cell[1]));
    for (let j = 0; j < columns; j += stepX) {
      pen.text(this.columnName(j), frame.x + (j + 0.5) * frame.cell[0], 9, soft, { anchor: "middle" });
    }
    for (let i = 0; i < rows; i += stepY) {
      pen.text(this.rowName(i), frame.x - 8, frame.y + (i + 0.5) * frame.cell[1], soft, { anchor: "end" });
    }
    this.over?.(pen, frame);
    drawBar(pen, frame.x, frame.y + frame.tall + 14, Math.min(frame.wide, 280), [low, high], this.unit, this.format);
  }

  cellAt(px, py, width) {
    const { rows, columns } = this.size();
    const frame = this.frame(width);
    const j = Math.floor((px - frame.x) / frame.cell[0]);
    const i = Math.floor((py - frame.y) / frame.cell[1]);
    return i >= 0 && j >= 0 && i < rows && j < columns ? [i, j] : null;
  }

  hover(px, py, width) {
    const at = this.cellAt(px, py, width);
    if (!at) return null;
    const frame = this.frame(width);
    const mark = (pen) => {
      const [x, y] = [frame.x + at[1] * frame.cell[0], frame.y + at[0] * frame.cell[1]];
      const [w, h] = frame.cell;
      const corners = [[x, y], [x + w, y], [x + w, y + h], [x, y + h]];
      pen.path([corners], { line: colours().card, width: 4, close: true });
      pen.path([corners], { line: colours().ink, width: 2, close: true });
    };
    return { ...this.tell(...at), mark };
  }

  move(point, dx, dy, width) {
    const { rows, columns } = this.size();
    const frame = this.frame(width);
    const [i, j] = (point && this.cellAt(point.x, point.y, width)) ?? [0, 0];
    const row = point ? Math.max(0, Math.min(rows - 1, i + dy)) : 0;
    const column = point ? Math.max(0, Math.min(columns - 1, j + dx)) : 0;
    return { x: frame.x + (column + 0.5) * frame.cell[0], y: frame.y + (row + 0.5) * frame.cell[1] };
  }
}

// What the colours mean.
function drawBar(pen, x, y, width, [low, high], unit, format = "number") {
  const { soft } = colours();
  const data = new Uint8ClampedArray(4 * 128);
  for (let k = 0; k < 128; k += 1) paint(data, 4 * k, k / 127);
  pen.raster({ width: 128, height: 1, data }, x, y, width, 8);
  const texts = tickTexts([low, high], format);
  const plain = format === "number" ? [exact(Number(low.toPrecision(3))), exact(Number(high.toPrecision(3)))] : texts;
  pen.text(plain[0], x, y + 13, soft, { base: "top" });
  pen.text(plain[1], x + width, y + 13, soft, { base: "top", anchor: "end" });
  pen.text(unit, x + width / 2, y + 13, soft, { base: "top", anchor: "middle" });
}

export class LabelMap extends HeatMap {
  constructor(page) {
    super(page, { id: "labels", title: "Who holds what", unit: "samples", format: "number", most: 460, square: false });
  }

  counts() {
    return this.page.run()?.label_counts;
  }

  empty() {
    return this.counts() ? null : "This run does not say which labels its clients hold.";
  }

  caption() {
    return "Training samples of each label at each client, in the same order as above.";
  }

  size() {
    return { rows: this.counts().length, columns: this.counts()[0].length };
  }

  domain() {
    return [0, Math.max(1, ...this.counts().map((row) => Math.max(...row)))];
  }

  // Nothing stays blank.
  value(i, j) {
    return this.count(i, j) || NaN;
  }

  count(i, j) {
    return this.counts()[this.page.clients().order[i]][j];
  }

  rowName(i) {
    return String(this.page.clients().order[i]);
  }

  columnName(j) {
    return String(j);
  }

  tell(i, j) {
    return { title: `Client ${this.rowName(i)}`, rows: [{ label: `label ${j}`, value: String(this.count(i, j)) }] };
  }

  csv() {
    return [["client", ...this.counts()[0].map((_, j) => `label ${j}`)], ...this.counts().map((row, i) => [i, ...row])];
  }

  summary() {
    const { rows, columns } = this.size();
    return `${rows} clients, ${columns} labels`;
  }
}

// Layers over rounds: what is left of each, or what changed; where nothing did, it stays blank.
export class LayerMap extends RoundChart {
  constructor(page, options) {
    super(page, { wide: false, ...options });
  }

  detail() {
    return this.page.store.detail(this.page.selected());
  }

  empty() {
    const detail = this.detail();
    if (!detail?.length) return this.page.trial()?.lacksDetail ? "Left out of this file to keep it small: safari view shows it." : "No rounds yet.";
    if (!detail.layers.length) return "These records do not name layers.";
    return detail[this.what].some((v) => Number.isFinite(v)) ? null : "These records are from before this was written down.";
  }

  caption() {
    return `${this.about} Of ${this.page.whose()}.`;
  }

  row() {
    return Math.max(6, Math.min(24, Math.floor(320 / Math.max(1, this.detail()?.layers.length ?? 1))));
  }

  height() {
    return TOP + BOTTOM + this.row() * (this.detail()?.layers.length ?? 8) + BAR + 6;
  }

  domain() {
    const detail = this.detail();
    const key = `${this.page.selected()}|${detail.generation}|${detail.length}`;
    if (this.known?.key !== key) {
      let high = 0;
      for (const v of detail[this.what]) if (v > high) high = v;
      this.known = { key, high: high || 1 };
    }
    return [0, this.what === "layer_density" ? 1 : this.known.high];
  }

  draw(pen, width, height) {
    const detail = this.detail();
    const x = this.scale(width);
    const { soft } = colours();
    const rounds = this.page.trial().columns.round;
    const bottom = height - BOTTOM - BAR - 6;
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
    drawBar(pen, x.x0, bottom + BOTTOM, Math.min(280, x.x1 - x.x0), this.domain(), this.unit, "percent");
  }

  image(detail, first, last, pixels) {
    const count = detail.layers.length;
    const values = detail[this.what];
    const [low, high] = this.domain();
    const per = Math.ceil((last - first + 1) / Math.max(1, pixels));
    const width = Math.ceil((last - first + 1) / per);
    const data = new Uint8ClampedArray(4 * width * count);
    const blank = rgb(colours().unknown);
    for (let column = 0; column < width; column += 1) {
      const start = first + column * per;
      const end = Math.min(start + per, last + 1);
      for (let layer = 0; layer < count; layer += 1) {
        let sum = 0;
        for (let t = start; t < end; t += 1) sum += values[t * count + layer];
        const share = (sum / (end - start) - low) / (high - low);
        // Churn is mostly far below its largest: the root keeps small changes visible.
        paint(data, 4 * (layer * width + column), share > 0 ? (this.what === "layer_churn" ? Math.sqrt(share) : share) : NaN, blank);
      }
    }
    return { width, height: count, data, per };
  }

  layerAt(py, height) {
    const detail = this.detail();
    const bottom = height - BOTTOM - BAR - 6;
    const k = Math.floor(((py - TOP) / (bottom - TOP)) * detail.layers.length);
    return Math.max(0, Math.min(detail.layers.length - 1, k));
  }

  moveRow(y, dy, height) {
    const row = (height - TOP - BOTTOM - BAR - 6) / this.detail().layers.length;
    return TOP + (Math.max(0, Math.min(this.detail().layers.length - 1, this.layerAt(y, height) + dy)) + 0.5) * row;
  }

  hover(px, py, width, height) {
    const detail = this.detail();
    const rounds = this.page.trial().columns.round;
    const t = Math.min(lastUpTo(rounds, Math.round(this.scale(width).round(px))), detail.length - 1);
    if (t < 0) return null;
    const layer = this.layerAt(py, height);
    const value = detail[this.what][t * detail.layers.length + layer];
    return { title: `Round ${rounds[t]}`, rows: [{ label: `${layer + 1}: ${detail.layers[layer]}`, value: told(value, "percent") }], round: rounds[t] };
  }

  csv() {
    const detail = this.detail();
    const rounds = this.page.trial().columns.round;
    const rows = [["round", ...detail.layers]];
    const count = detail.layers.length;
    for (let t = 0; t < detail.length; t += 1) {
      rows.push([rounds[t], ...Array.from(detail[this.what].slice(t * count, (t + 1) * count), (v) => Number(v.toPrecision(6)))]);
    }
    return rows;
  }

  summary() {
    const detail = this.detail();
    const count = detail.layers.length;
    const last = detail[this.what].slice((detail.length - 1) * count);
    return detail.layers.map((name, k) => `${name} ${asPercent(last[k])}`).join("; ");
  }
}
