// Tables of numbers as colours: similarities, labels.

import { exact, tickTexts } from "./numbers.js";
import { colours, paint, rgb } from "./theme.js";

export const BAR = 34;

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
export function drawBar(pen, x, y, width, [low, high], unit, format = "number") {
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
