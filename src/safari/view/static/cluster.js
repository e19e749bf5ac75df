// Who is like whom: clients in an order in which those alike lie together, and where to cut.

const MOST_GROUPS = 8;

// `distance(i, j)`: smaller is more alike; NaN where it is not known. Average linkage by nearest-neighbour
// chains. Returns the order and each client's group (groups counted from 0 along the order).
export function cluster(count, distance) {
  if (count < 3) return { order: range(count), groups: range(count).map(() => 0) };
  const { table, known } = filled(count, distance);
  if (!known) return { order: range(count), groups: range(count).map(() => 0) };
  const merges = chain(count, table).sort((a, b) => a.height - b.height);
  return cut(count, merges);
}

function filled(count, distance) {
  const table = new Float64Array(count * count);
  let sum = 0;
  let known = 0;
  for (let i = 0; i < count; i += 1) {
    for (let j = i + 1; j < count; j += 1) {
      const d = distance(i, j);
      table[i * count + j] = d;
      if (Number.isFinite(d)) {
        sum += d;
        known += 1;
      }
    }
  }
  // A pair that nobody has seen is neither near nor far.
  for (let i = 0; i < count; i += 1) {
    for (let j = i + 1; j < count; j += 1) {
      if (!Number.isFinite(table[i * count + j])) table[i * count + j] = sum / known;
      table[j * count + i] = table[i * count + j];
    }
  }
  return { table, known };
}

function chain(count, table) {
  const size = new Array(count).fill(1);
  const alive = new Set(range(count));
  const merges = [];
  let path = [];
  while (alive.size > 1) {
    if (!path.length) path = [alive.values().next().value];
    const here = path.at(-1);
    const before = path.at(-2);
    let best = before ?? -1;
    let least = before === undefined ? Infinity : table[here * count + before];
    for (const other of alive) {
      if (other !== here && table[here * count + other] < least) {
        best = other;
        least = table[here * count + other];
      }
    }
    if (best !== before) {
      path.push(best);
      continue;
    }
    path.length -= 2;
    const [keep, gone] = here < best ? [here, best] : [best, here];
    merges.push({ keep, gone, height: least });
    alive.delete(gone);
    for (const other of alive) {
      if (other === keep) continue;
      const d = (size[keep] * table[keep * count + other] + size[gone] * table[gone * count + other]) / (size[keep] + size[gone]);
      table[keep * count + other] = table[other * count + keep] = d;
    }
    size[keep] += size[gone];
  }
  return merges;
}

// The order of the leaves, and the groups below the largest jump in height.
function cut(count, merges) {
  const heights = merges.map((m) => m.height);
  let groups = 1;
  let widest = 0;
  for (let g = 2; g <= Math.min(MOST_GROUPS, count - 1); g += 1) {
    const jump = heights[count - g] - heights[count - g - 1];
    if (jump > widest) {
      widest = jump;
      groups = g;
    }
  }
  // Evenly growing heights are no groups.
  if (widest < 0.15 * (heights.at(-1) - heights[0])) groups = 1;
  const root = range(count);
  const members = new Map(range(count).map((k) => [k, [k]]));
  const find = (k) => (root[k] === k ? k : (root[k] = find(root[k])));
  let parts = null;
  merges.forEach((merge, k) => {
    if (count - k === groups) parts = [...members.values()].map((list) => [...list]);
    const [a, b] = [find(merge.keep), find(merge.gone)];
    root[b] = a;
    members.set(a, [...members.get(a), ...members.get(b)]);
    members.delete(b);
  });
  const order = members.values().next().value;
  const groupOf = new Array(count).fill(0);
  if (parts && groups > 1) {
    const place = new Map(order.map((client, k) => [client, k]));
    parts.sort((p, q) => place.get(p[0]) - place.get(q[0]));
    parts.forEach((list, g) => list.forEach((client) => (groupOf[client] = g)));
  }
  return { order, groups: groupOf };
}

// From a similarity matrix (larger is more alike) or from who holds which labels.
export function clusterBySimilarity({ clients, matrix }) {
  return cluster(clients, (i, j) => -matrix[i * clients + j]);
}

export function clusterByLabels(counts) {
  const shares = counts.map((row) => {
    const length = Math.hypot(...row) || 1;
    return row.map((n) => n / length);
  });
  return cluster(counts.length, (i, j) => 1 - shares[i].reduce((sum, v, k) => sum + v * shares[j][k], 0));
}

function range(count) {
  return Array.from({ length: count }, (_, k) => k);
}
