// Who arrived: one row a client, one column a round.

import { BOTTOM, RoundChart, TOP, drawRoundAxis, roundSpan } from "./axes.js";
import { lastUpTo, plural } from "./numbers.js";
import { nameOf, noDetail, timeOf } from "./store.js";
import { clientColours, colours, rgb } from "./theme.js";

// As ClientStatus in runs/record.py has them.
const STATUS = { NOT_ASKED: 0, ARRIVED: 1, LOST: 2, LOST_UP: 3, LOST_DOWN: 4, REFUSED: 5 };
// In a detail's `part`: the model came whole, or not at all. Below it, the share that came in 255ths.
const WHOLE = 255;
const WORDS = ["not asked", "arrived", "lost", "lost on the way up", "lost on the way down", "refused"];

export class ArrivalStrip extends RoundChart {
  constructor(page) {
    super(page, { id: "arrivals", title: "Who arrived", wide: true });
  }

  detail() {
    return this.page.store.detail(this.page.selected());
  }

  empty() {
    if (this.detail()?.length) return this.detail().clients ? null : "Too many clients to show them one by one.";
    return noDetail(this.page.trial());
  }

  caption() {
    return "Each row is a client, each column a round. Where an update was lost and another client stood in for it, the cell has that client's colour. A model that came in part is the darker the less of it came.";
  }

  legend() {
    const { arrived, lost, "lost-down": lostDown, refused, unknown } = colours();
    const detail = this.detail();
    if (!detail) return [];
    const has = present(detail);
    const out = [{ label: "arrived", colour: arrived }];
    if (detail.part.some((share) => share < WHOLE)) {
      for (const percent of [75, 25]) out.push({ label: `${percent} % of the model came`, colour: css(mixed(percent / 100)), edge: true });
    }
    const names = [STATUS.LOST, STATUS.LOST_UP, STATUS.LOST_DOWN].filter((code) => has.codes.has(code));
    for (const code of names) out.push({ label: WORDS[code], colour: code === STATUS.LOST_DOWN ? lostDown : lost, edge: true });
    if (has.codes.has(STATUS.REFUSED)) out.push({ label: "refused", colour: refused });
    if (has.codes.has(STATUS.NOT_ASKED)) out.push({ label: "not asked", colour: unknown, edge: true });
    if (has.standIns) {
      const { groups } = this.page.clients();
      const shown = [...new Set(groups)].sort((a, b) => a - b);
      for (const group of shown) {
        const whose = shown.length > 1 ? `a client of group ${letter(group)}` : "another client";
        out.push({ label: `lost, ${whose} stood in`, colour: colours().groups[group % colours().groups.length] });
      }
    }
    return out;
  }

  row() {
    const clients = this.detail()?.clients ?? 10;
    return Math.max(1, Math.min(20, Math.floor(440 / clients)));
  }

  height() {
    const clients = this.detail()?.clients ?? 10;
    return TOP + BOTTOM + this.row() * clients;
  }

  draw(pen, width, height) {
    const detail = this.detail();
    const x = this.scale(width);
    const { order, groups } = this.page.clients();
    const image = this.image(detail, order, groups, Math.floor(x.x1 - x.x0));
    const { soft, groups: hues } = colours();
    const tall = height - TOP - BOTTOM;
    if (image) {
      const from = x.x(image.first - 0.5);
      pen.clip(x.x0, TOP, x.x1 - x.x0, tall, () => pen.raster(image, from, TOP, x.x(image.last + 0.5) - from, tall));
    }
    const row = tall / detail.clients;
    const every = Math.max(1, Math.ceil(14 / row));
    order.forEach((client, k) => {
      const y = TOP + k * row;
      pen.rect(x.x0 - 6, y, 4, row + 0.3, hues[groups[client] % hues.length]);
      if (k % every === 0) pen.text(String(client), x.x0 - 12, y + row / 2, soft, { anchor: "end" });
    });
    drawRoundAxis(pen, x, height - BOTTOM);
  }

  // A pixel for each cell, or the mean of the cells that fall on one.
  image(detail, order, groups, pixels) {
    const rounds = this.page.trial().columns.round;
    const [low, high] = roundSpan(this.page);
    const first = lastUpTo(rounds, low - 1) + 1;
    const last = Math.min(lastUpTo(rounds, high), detail.length - 1);
    if (last < first || pixels < 1) return null;
    const key = [this.page.selected(), detail.generation, detail.length, first, last, pixels, order.join(), colours().arrived].join("|");
    if (this.kept?.key === key) return this.kept.image;
    const per = Math.ceil((last - first + 1) / pixels);
    const width = Math.ceil((last - first + 1) / per);
    const { clients } = detail;
    const table = palette(groups);
    const data = new Uint8ClampedArray(4 * width * clients);
    order.forEach((client, y) => {
      for (let column = 0; column < width; column += 1) {
        const start = first + column * per;
        const end = Math.min(start + per, last + 1);
        let [r, g, b] = [0, 0, 0];
        for (let t = start; t < end; t += 1) {
          const cell = t * clients + client;
          const [red, green, blue] = cellRgb(detail, cell, table);
          r += red;
          g += green;
          b += blue;
        }
        const to = 4 * (y * width + column);
        data[to] = r / (end - start);
        data[to + 1] = g / (end - start);
        data[to + 2] = b / (end - start);
        data[to + 3] = 255;
      }
    });
    const ends = { first: rounds[first], last: rounds[first] + width * per - 1 };
    this.kept = { key, image: { width, height: clients, data, ...ends } };
    return this.kept.image;
  }

  moveRow(y, dy, height) {
    const row = (height - TOP - BOTTOM) / this.detail().clients;
    return Math.max(TOP + row / 2, Math.min(height - BOTTOM - row / 2, y + dy * row));
  }

  hover(px, py, width, height) {
    const detail = this.detail();
    const { order } = this.page.clients();
    const trial = this.page.trial();
    const rounds = trial.columns.round;
    const place = Math.floor(((py - TOP) / (height - TOP - BOTTOM)) * detail.clients);
    const client = order[Math.max(0, Math.min(detail.clients - 1, place))];
    const t = Math.min(lastUpTo(rounds, Math.round(this.scale(width).round(px))), detail.length - 1);
    if (t < 0) return null;
    const cell = t * detail.clients + client;
    return {
      title: [`Round ${rounds[t]}`, nameOf(trial, client), timeOf(trial, rounds[t])].filter(Boolean).join(", "),
      rows: [{ label: statusWords(detail, cell, trial), value: "", colour: this.cellColour(detail, cell) }, ...this.share(detail, client)],
      round: rounds[t],
    };
  }

  cellColour(detail, cell) {
    const table = palette(this.page.clients().groups);
    return css(cellRgb(detail, cell, table));
  }

  share(detail, client) {
    let [asked, arrived] = [0, 0];
    for (let t = 0; t < detail.length; t += 1) {
      const status = detail.status[t * detail.clients + client];
      asked += status !== STATUS.NOT_ASKED;
      arrived += status === STATUS.ARRIVED;
    }
    return [{ label: "arrived so far", value: `${arrived} of ${asked}` }];
  }

  csv() {
    const detail = this.detail();
    const rounds = this.page.trial().columns.round;
    const rows = [["round", "client", "status", "stand-in", "stand-ins", "share"]];
    for (let t = 0; t < detail.length; t += 1) {
      for (let client = 0; client < detail.clients; client += 1) {
        const cell = t * detail.clients + client;
        const stood = detail.stand_in[cell] > 0;
        rows.push([rounds[t], client, WORDS[detail.status[cell]], stood ? detail.stand_in[cell] - 1 : "", stood ? detail.stand_ins[cell] : "", shareOf(detail, cell)]);
      }
    }
    return rows;
  }

  summary() {
    const { columns } = this.page.trial();
    const sum = (name) => columns[name].reduce((a, b) => a + b, 0);
    const asked = sum("arrived") + sum("missing");
    return `${plural(columns.round.length, "round")}; ${sum("arrived")} of ${asked} updates arrived, for ${sum("stood_in")} lost ones another client stood in`;
  }
}

function letter(group) {
  return String.fromCharCode(65 + group);
}

// Which codes there are at all, and whether anybody stood in.
function present(detail) {
  let bits = 0;
  for (let k = 0; k < detail.status.length; k += 1) bits |= 1 << detail.status[k];
  const codes = new Set(Object.values(STATUS).filter((code) => bits & (1 << code)));
  return { codes, standIns: detail.stand_in.some((client) => client > 0) };
}

// How much of a model came: 0 to 1.
function shareOf(detail, cell) {
  if (detail.status[cell] !== STATUS.ARRIVED) return 0;
  return detail.part[cell] === WHOLE ? 1 : Math.round((1000 * detail.part[cell]) / WHOLE) / 1000;
}

function statusWords(detail, cell, trial) {
  const came = inPart(detail, cell) ? `, ${Math.round(100 * shareOf(detail, cell))} % of its model` : "";
  const words = WORDS[detail.status[cell]] + came;
  if (!detail.stand_in[cell]) return words;
  const others = detail.stand_ins[cell] - 1;
  const more = others > 0 ? ` and ${plural(others, "other")}` : "";
  const rest = came ? " for the rest" : "";
  return `${words}; ${nameOf(trial, detail.stand_in[cell] - 1)}${more} stood in${rest}`;
}

function inPart(detail, cell) {
  return detail.status[cell] === STATUS.ARRIVED && detail.part[cell] < WHOLE;
}

// A model that came in part is between arrived and lost, whoever stood in for the rest.
function cellRgb(detail, cell, table) {
  if (inPart(detail, cell)) return mixed(shareOf(detail, cell));
  const at = 3 * shade(detail, cell);
  return [table[at], table[at + 1], table[at + 2]];
}

function mixed(share) {
  const [arrived, lost] = [rgb(colours().arrived), rgb(colours().lost)];
  return arrived.map((value, k) => Math.round(share * value + (1 - share) * lost[k]));
}

function css([r, g, b]) {
  return `rgb(${r} ${g} ${b})`;
}

// Which colour of the palette: that of the client that stood in, or else of the status.
function shade(detail, cell) {
  return detail.stand_in[cell] ? WORDS.length - 1 + detail.stand_in[cell] : detail.status[cell];
}

// Colours by code: one for each status, then a stand-in of each client.
function palette(groups) {
  const { unknown, arrived, lost, "lost-down": lostDown, refused } = colours();
  const all = [unknown, arrived, lost, lost, lostDown, refused, ...clientColours(groups)];
  return Uint8Array.from(all.flatMap(rgb));
}
